"""The files that a run leaves for its user: weights, summary, curves."""

import copy
import io
import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from ppma.atomic import write_atomically
from ppma.engine import checkpoint, folder
from ppma.engine.errors import IncompleteRunError
from ppma.engine.logging import MetricsLog, curves, format_metrics, headline

SaveWeights = Callable[[nn.Module, Path], None]


class ResultFiles:
    """Writes the files of a run, in the main process. A failed write is a warning; at the end of the run, an error.

    Attributes:
        failed: the files that could not be written, with the reason.
    """

    def __init__(self, run: Path, save_weights: SaveWeights) -> None:
        self.run, self._save = run, save_weights
        self.failed: dict[str, str] = {}
        self._unsaved_best: nn.Module | None = None

    def write(self, name: str, write: Callable[[], None], what: str = "") -> bool:
        """Call `write`, which writes the file `name`; False and a warning if the disk refuses."""
        try:
            write()
        except OSError as error:
            self.failed[name] = error.strerror or str(error)
            warnings.warn(f"{what or name} not written, the earlier ones are kept: {error}", stacklevel=3)
            return False
        self.failed.pop(name, None)
        return True

    def save_checkpoint(self, path: Path, state: dict[str, Any]) -> bool:
        """Write a training checkpoint."""
        return self.write(f"{checkpoint.FOLDER}/{path.name}", lambda: checkpoint.save(path, state), "checkpoint")

    def save_weights(self, model: nn.Module, *, improved: bool) -> None:
        """Write the last weights and, if they improved, the best; best weights that fail are kept to try again."""
        self._write_weights(folder.LAST, model)
        best = model if improved else self._unsaved_best
        if best is not None:
            written = self._write_weights(folder.BEST, best)
            self._unsaved_best = None if written else copy.deepcopy(best)

    def retry_weights(self, model: nn.Module) -> None:
        """Try again to write weights that failed; `model` has the last ones."""
        if folder.LAST in self.failed:
            self._write_weights(folder.LAST, model)
        if self._unsaved_best is not None:
            self._write_weights(folder.BEST, self._unsaved_best)

    def write_summary(self, summary: dict[str, Any], log: MetricsLog) -> None:
        """Write the summary, the curves, and rows of metrics.csv that failed."""
        text = json.dumps(summary, indent=2) + "\n"
        self.write(folder.METRICS, log.flush)
        self.write(folder.SUMMARY, lambda: write_atomically(self.run / folder.SUMMARY, text.encode()))
        self.write(folder.CURVES, lambda: self._draw_curves(log))

    def check_complete(self, step: int) -> None:
        """Raise an IncompleteRunError unless every result of a run that ended at `step` was written."""
        last = f"{checkpoint.FOLDER}/{checkpoint.path_of(self.run, step).name}"
        expected = (folder.LAST, folder.BEST, last, folder.METRICS, folder.SUMMARY, folder.CURVES)
        missing = [name for name in expected if name in self.failed]
        if missing:
            left = checkpoint.steps(self.run)
            way = f"--resume auto continues from step {left[-1]}" if left else "--overwrite trains again"
            raise IncompleteRunError(
                f"{self.run}: all {step} steps are done, but {', '.join(missing)} could not be written "
                f"({self.failed[missing[0]]}); make room, then {way}"
            )

    def _write_weights(self, name: str, model: nn.Module) -> bool:
        return self.write(name, lambda: self._save(model, self.run / name), "weights")

    def _draw_curves(self, log: MetricsLog) -> None:
        picture = io.BytesIO()
        curves(log.rows).savefig(picture, dpi=120)
        write_atomically(self.run / folder.CURVES, picture.getbuffer())


def describe(summary: Mapping[str, Any]) -> str:
    """The outcome of a run in one line, from the contents of summary.json.

    Examples:
        >>> describe({"steps": 114, "seconds": 29.4, "best_step": 95, "val_top1": 98.333, "val_count": 180})
        '114 steps in 29 s; at step 95, the best: val_top1 98.33'
    """
    early = " (stopped early)" if summary.get("stopped_early") else ""
    measured = {name: value for name, value in summary.items() if name.startswith(("val_", "test_"))}
    found = f"; at step {summary['best_step']}, the best: {format_metrics(headline(measured))}" if measured else ""
    return f"{summary['steps']} steps in {summary['seconds']:.0f} s{early}{found}"
