"""Tasks by name, and their configurations from files."""

import pkgutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ppma import config as configs
from ppma.engine.config import RunConfig
from ppma.tasks.base import Task

# The recipes of a checkout, and where a wheel puts them.
RECIPES = (Path(__file__).parents[3] / "configs", Path(sys.prefix) / "share" / "ppma" / "configs")

# Classes, or where they are: those of the package are imported when used, as each needs packages that others do not.
TASKS: dict[str, str | type[Task[Any]]] = {
    "classification": "ppma.tasks.classification.task:Classification",
    "detection": "ppma.tasks.detection.task:Detection",
    "segmentation": "ppma.tasks.segmentation.task:Segmentation",
}


def task_class(name: object, source: str = "task") -> type[Task[Any]]:
    """A task by its name; `source` says in messages where the name comes from."""
    configs.require(isinstance(name, str) and name in TASKS, source, f"one of {', '.join(TASKS)}", name)
    found = TASKS[str(name)]
    return pkgutil.resolve_name(found) if isinstance(found, str) else found


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
    task = task_class(values.setdefault("task", "classification"), f"{path}: task")
    return configs.build(task.schema, values, source=str(path))


def make_task(config: RunConfig) -> Task[Any]:
    """The task of a configuration."""
    return task_class(config.task)(config)
