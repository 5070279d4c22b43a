"""Tasks by name, and their configurations from files."""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ppma import config as configs
from ppma.engine.config import RunConfig
from ppma.engine.task import Task
from ppma.tasks.classification.config import ClassificationConfig
from ppma.tasks.classification.task import Classification

# The recipes of a checkout, and where a wheel puts them.
RECIPES = (Path(__file__).parents[3] / "configs", Path(sys.prefix) / "share" / "ppma" / "configs")

SCHEMAS: dict[str, type[RunConfig]] = {"classification": ClassificationConfig}
TASKS: dict[str, type[Task[Any]]] = {"classification": Classification}


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
    configs.require(name in SCHEMAS, f"{path}: task", f"one of {', '.join(SCHEMAS)}", name)
    return configs.build(SCHEMAS[name], values, source=str(path))


def make_task(config: RunConfig) -> Task[Any]:
    """The task of a configuration."""
    return TASKS[config.task](config)
