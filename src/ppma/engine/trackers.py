"""Experiment trackers beside metrics.csv: TensorBoard, trackio and wandb, each imported when used."""

import importlib
import importlib.util
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ppma.config import ConfigError

PROJECT = "ppma"
EVENTS, WANDB = "tensorboard", "wandb"  # folders in the run's


def check_installed(names: Sequence[str]) -> None:
    """Raise a ConfigError unless the packages of these trackers are installed."""
    for name in names:
        if name != "csv" and importlib.util.find_spec(name) is None:
            raise ConfigError(f"log: {name} is not installed: pip install {name}, or leave it out of log")


class Trackers:
    """Sends rows to trackers. They repeat what is in metrics.csv, so one that fails later is dropped with a warning.

    Args:
        names: entries of `RunConfig.log`.
        run: the run's folder; its name is the name of the run.
        step: where the run starts; above 0, the earlier run is continued.
        config: plain values of the configuration.

    Raises:
        ConfigError: a tracker does not start.
    """

    def __init__(self, names: Sequence[str], run: Path, step: int, config: Mapping[str, Any]) -> None:
        self.open: dict[str, Any] = {}
        for name in names:
            try:
                if name == "tensorboard":
                    self.open[name] = _TensorBoard(run, step)
                elif name != "csv":
                    self.open[name] = _start(name, run, step, config)
            except Exception as error:  # no login, no network, no disk space
                raise ConfigError(f"log: {name} does not start: {_reason(error)}") from None

    def add(self, row: Mapping[str, float]) -> None:
        """Log a row of metrics at its step."""
        values = {key: value for key, value in row.items() if key != "step"}
        for name, tracker in list(self.open.items()):
            try:
                tracker.log(values, step=int(row["step"]))
            except Exception as error:  # no network, no disk space: the run continues
                self._drop(name, error)

    def close(self) -> None:
        """Finish every tracker."""
        for name, tracker in list(self.open.items()):
            try:
                tracker.finish()
            except Exception as error:
                self._drop(name, error)

    def _drop(self, name: str, error: Exception) -> None:
        self.open.pop(name, None)
        warnings.warn(f"log: {name} gets no more rows: {_reason(error)}", stacklevel=4)


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


class _TensorBoard:
    def __init__(self, run: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(run / EVENTS), purge_step=step)

    def log(self, values: Mapping[str, float], step: int) -> None:
        for key, value in values.items():
            self.writer.add_scalar(key, value, step)

    def finish(self) -> None:
        self.writer.close()


def _start(name: str, run: Path, step: int, config: Mapping[str, Any]) -> Any:
    """A run of trackio or wandb, which share their interface; trackio continues a run by name, wandb by id."""
    options: dict[str, Any] = {"resume": "allow" if step else "never"}
    if name == "wandb":
        options["dir"] = str(run)
        latest = run / WANDB / "latest-run"  # a link to a folder whose name ends with the id
        if step and latest.is_symlink():
            options["id"] = latest.resolve().name.rpartition("-")[2]
    return importlib.import_module(name).init(project=PROJECT, name=run.name, config=dict(config), **options)
