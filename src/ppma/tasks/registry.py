"""Tasks by name, and their configurations from files."""

import pkgutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ppma import config as configs
from ppma import recipes
from ppma.engine.config import RunConfig
from ppma.tasks.base import Task

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


def load_config(recipe: str | Path, assignments: Iterable[str] = ()) -> RunConfig:
    """A checked configuration from a recipe with `key=value` changes; its `task` says which schema it follows.

    Args:
        recipe: a YAML file, or the name of a packaged recipe.
        assignments: see `ppma.recipes.resolve`.
    """
    values = recipes.resolve(recipe, assignments)
    task = task_class(values.setdefault("task", "classification"), f"{recipe}: task")
    return configs.build(task.schema, values, source=str(recipe))


def recipe_schema() -> dict[str, Any]:
    """The JSON schema of recipes, of whichever task."""
    schemas = []
    for task in TASKS:
        schema = configs.json_schema(task_class(task).schema)
        schema["properties"] |= {
            "task": {"const": task},
            "base": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
            "description": {"type": "string"},
        }
        schemas.append({"title": task, **schema})
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "ppma recipe", "anyOf": schemas}


def make_task(config: RunConfig) -> Task[Any]:
    """The task of a configuration."""
    return task_class(config.task)(config)
