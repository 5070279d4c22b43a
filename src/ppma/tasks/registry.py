"""Tasks by name, and their configurations from files."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ppma import config as configs
from ppma.engine.config import RunConfig
from ppma.engine.task import Task
from ppma.tasks.classification.config import ClassificationConfig
from ppma.tasks.classification.task import Classification

SCHEMAS: dict[str, type[RunConfig]] = {"classification": ClassificationConfig}
TASKS: dict[str, type[Task[Any]]] = {"classification": Classification}


def load_config(path: str | Path, assignments: Iterable[str] = ()) -> RunConfig:
    """A checked configuration from a YAML file with `key=value` changes; its `task` says which schema it follows."""
    values = configs.override(configs.read(path), assignments)
    name = values.setdefault("task", "classification")
    configs.require(name in SCHEMAS, f"{path}: task", f"one of {', '.join(SCHEMAS)}", name)
    return configs.build(SCHEMAS[name], values, source=str(path))


def make_task(config: RunConfig) -> Task[Any]:
    """The task of a configuration."""
    return TASKS[config.task](config)
