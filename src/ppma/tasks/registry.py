"""Tasks by name, and their configurations from files."""

import importlib
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ppma import config as configs
from ppma.engine.config import RunConfig
from ppma.engine.task import Task
from ppma.models import files

# The recipes of a checkout, and where a wheel puts them.
RECIPES = (Path(__file__).parents[3] / "configs", Path(sys.prefix) / "share" / "ppma" / "configs")

# For each task the class of its configuration and its own, imported when used: each needs packages that others do not.
TASKS = {
    "classification": ("ClassificationConfig", "Classification"),
    "detection": ("DetectionConfig", "Detection"),
    "segmentation": ("SegmentationConfig", "Segmentation"),
}


def _schema(task: str) -> type[RunConfig]:
    return getattr(importlib.import_module(f"ppma.tasks.{task}.config"), TASKS[task][0])


def find_config(name: str | Path) -> Path:
    """A configuration file: a path, or the name of a recipe of the project, such as "digits_nano"."""
    path = Path(name)
    if path.suffix or path.exists():
        return path
    known = {recipe.stem: recipe for folder in RECIPES for recipe in sorted(folder.glob("*.yaml"))}
    if str(name) not in known:
        raise configs.ConfigError(f"config: expected a YAML file or one of {', '.join(known)}, got {str(name)!r}")
    return known[str(name)]


def load_config(path: str | Path, assignments: Iterable[str] = ()) -> RunConfig:
    """A checked configuration from a YAML file with `key=value` changes; its `task` says which schema it follows."""
    path = find_config(path)
    values = configs.override(configs.read(path), assignments)
    name = values.setdefault("task", "classification")
    configs.require(isinstance(name, str) and name in TASKS, f"{path}: task", f"one of {', '.join(TASKS)}", name)
    return configs.build(_schema(name), values, source=str(path))


def make_task(config: RunConfig) -> Task[Any]:
    """The task of a configuration."""
    task: type[Task[Any]] = getattr(importlib.import_module(f"ppma.tasks.{config.task}.task"), TASKS[config.task][1])
    return task(config)


def task_of(checkpoint: str | Path) -> str:
    """What a weight file was trained for; classification where it does not say."""
    return files.larger_model(checkpoint) or "classification"
