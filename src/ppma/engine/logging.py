"""Logging of a run: metrics.csv, progress, and curves at the end."""

import contextlib
import csv
import io
import math
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from ppma.atomic import write_atomically
from ppma.engine.trackers import Trackers

if TYPE_CHECKING:
    from matplotlib.figure import Figure

METRICS = "metrics.csv"
LINE_SECONDS = 10.0  # between progress lines when stderr is not a terminal

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


class ProgressLine:
    """A progress bar on a terminal, else a line every `LINE_SECONDS`.

    Args:
        title: name of the work.
        total: amount of work.
        done: amount already done.
        enabled: False in processes that do not print.
        unit: unit of `total`.
        within: a running bar, below which this one is shown.
    """

    def __init__(
        self,
        title: str,
        total: int,
        done: int = 0,
        *,
        enabled: bool = True,
        unit: str = "steps",
        within: "ProgressLine | None" = None,
    ) -> None:
        self.title, self.total, self.first, self.enabled, self.unit = title, total, done, enabled, unit
        # The extra `train`; readers of a run's folder, such as figures, do without.
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        self.console: Console = within.console if within is not None else Console(stderr=True)
        self.started = self.printed = time.monotonic()
        self.within = within
        self.bar: Progress | None = within.bar if within is not None else None
        if self.bar is None and enabled and self.console.is_terminal:
            self.bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("ETA"),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}"),
                console=self.console,
            )
            self.bar.start()
        if self.bar is not None:
            self.task = self.bar.add_task(title, total=total, completed=done, note="")

    def update(self, done: int, note: str = "") -> None:
        """Show the progress, with a note beside it."""
        if self.bar is not None:
            self.bar.update(self.task, completed=done, note=note)
        elif self.enabled and (time.monotonic() - self.printed >= LINE_SECONDS):
            self.printed = time.monotonic()
            left = (self.printed - self.started) / max(done - self.first, 1) * (self.total - done)
            self.say(f"{self.title}: {done}/{self.total} {self.unit}, ETA {_duration(left)}, {note}".rstrip(", "))

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        if self.enabled:
            self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Remove the bar."""
        if self.bar is not None and self.within is not None:
            self.bar.remove_task(self.task)
        elif self.bar is not None:
            self.bar.stop()


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"


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
