"""Tasks by name, and their configurations from files."""

import importlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ppma import config as configs
from ppma import recipes
from ppma.engine.config import RunConfig
from ppma.engine.task import Task
from ppma.models import files

# For each task the class of its configuration and its own, imported when used: each needs packages that others do not.
TASKS = {
    "classification": ("ClassificationConfig", "Classification"),
    "detection": ("DetectionConfig", "Detection"),
    "segmentation": ("SegmentationConfig", "Segmentation"),
}


def _schema(task: str) -> type[RunConfig]:
    return getattr(importlib.import_module(f"ppma.tasks.{task}.config"), TASKS[task][0])


def load_config(recipe: str | Path, assignments: Iterable[str] = ()) -> RunConfig:
    """A checked configuration from a recipe with `key=value` changes; its `task` says which schema it follows.

    Args:
        recipe: a YAML file, or the name of a packaged recipe.
        assignments: see `ppma.recipes.resolve`.
    """
    values = recipes.resolve(recipe, assignments)
    name = values.setdefault("task", "classification")
    configs.require(isinstance(name, str) and name in TASKS, f"{recipe}: task", f"one of {', '.join(TASKS)}", name)
    return configs.build(_schema(name), values, source=str(recipe))


def recipe_schema() -> dict[str, Any]:
    """The JSON schema of recipes, of whichever task."""
    schemas = []
    for task in TASKS:
        schema = configs.json_schema(_schema(task))
        schema["properties"] |= {
            "task": {"const": task},
            "base": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
            "description": {"type": "string"},
        }
        schemas.append({"title": task, **schema})
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "ppma recipe", "anyOf": schemas}


def make_task(config: RunConfig) -> Task[Any]:
    """The task of a configuration."""
    task: type[Task[Any]] = getattr(importlib.import_module(f"ppma.tasks.{config.task}.task"), TASKS[config.task][1])
    return task(config)


def task_of(checkpoint: str | Path) -> str:
    """What a weight file was trained for; classification where it does not say."""
    return files.larger_model(checkpoint) or "classification"
