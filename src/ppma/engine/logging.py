"""Logging of a run: metrics.csv, and curves at the end."""

import contextlib
import csv
import io
import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from ppma.atomic import write_atomically
from ppma.engine.trackers import Trackers

if TYPE_CHECKING:
    from matplotlib.figure import Figure

METRICS = "metrics.csv"

Row = dict[str, float]


def read_rows(path: Path) -> list[Row]:
    """Read a metrics.csv; empty cells and truncated rows are skipped."""
    if not path.is_file():
        return []
    rows = []
    with open(path, newline="", encoding="utf-8", errors="replace") as file, contextlib.suppress(csv.Error):
        for cells in csv.DictReader(file):
            with contextlib.suppress(ValueError, TypeError):
                rows.append({key: float(cell) for key, cell in cells.items() if cell})
    return [row for row in rows if "step" in row]


class MetricsLog:
    """Rows of metrics.csv, also sent to the trackers.

    Args:
        run: the run's folder.
        step: where the run starts; rows of an interrupted run from this step on are dropped.
        trackers: where rows are sent besides; None for nowhere.
    """

    def __init__(self, run: Path, step: int, trackers: Trackers | None = None) -> None:
        self.path = run / METRICS
        self.rows = [row for row in read_rows(self.path) if row["step"] < step]
        self.columns: list[str] = []
        self.trackers = trackers
        self._write()

    def add(self, row: Row) -> None:
        """Append a row; a new column rewrites the file. A row that cannot be written is retried with the next one."""
        self.rows.append(row)
        try:
            if set(row) <= set(self.columns):
                with open(self.path, "a", newline="", encoding="utf-8") as file:
                    self._writer(file).writerow({key: _cell(value) for key, value in row.items()})
            else:
                self._write()
        except OSError as error:
            self.columns = []
            warnings.warn(f"a row of {METRICS} not written yet: {error}", stacklevel=2)
        if self.trackers is not None:
            self.trackers.add(row)

    def flush(self) -> None:
        """Write the rows that failed before; raises an OSError if they fail again."""
        if not self.columns:
            self._write()

    def _write(self) -> None:
        self.columns = list(dict.fromkeys(key for row in self.rows for key in row)) or ["step"]
        text = io.StringIO()
        writer = self._writer(text)
        writer.writeheader()
        writer.writerows([{key: _cell(value) for key, value in row.items()} for row in self.rows])
        write_atomically(self.path, text.getvalue().encode())

    def _writer(self, file: TextIO) -> csv.DictWriter:
        return csv.DictWriter(file, self.columns, restval="", lineterminator="\n")

    def close(self) -> None:
        """Finish the trackers."""
        if self.trackers is not None:
            self.trackers.close()


def _cell(value: float) -> str:
    return str(int(value)) if math.isfinite(value) and float(value).is_integer() else repr(float(value))


def headline(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics worth a line: without numbers of samples and throughput.

    Examples:
        >>> headline({"val_top1": 98.3, "val_count": 180, "val_per_second": 512.0})
        {'val_top1': 98.3}
    """
    return {name: value for name, value in metrics.items() if not name.endswith(("count", "per_second"))}


def format_metrics(metrics: Mapping[str, float]) -> str:
    """Format metrics in one line.

    Examples:
        >>> format_metrics({"val_top1": 98.333, "val_loss": 0.05})
        'val_top1 98.33, val_loss 0.05'
    """
    return ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())


def curves(rows: list[Row]) -> "Figure":
    """Plot losses on the left and validation metrics on the right, over steps."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(key for row in rows for key in row))
    losses = [name for name in names if name.endswith("loss")]
    measured = [name for name in headline(dict.fromkeys(names, 0.0)) if name.startswith("val_") and name not in losses]
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    for axis, title, chosen in zip(figure.subplots(1, 2), ("loss", "metrics"), (losses, measured), strict=True):
        for name in chosen:
            points = [(row["step"], row[name]) for row in rows if name in row]
            axis.plot(*zip(*points, strict=True), label=name, marker="." if len(points) < 50 else None)
        axis.set_xlabel("step")
        axis.set_title(title)
        axis.grid(alpha=0.3)
        if chosen:
            axis.legend()
    return figure
