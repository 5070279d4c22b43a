"""Tasks by name, and their configurations from recipes."""

import pkgutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ppma import config as configs
from ppma import recipes
from ppma.engine.config import RunConfig
from ppma.models.timm_models import is_timm, preprocessing_values
from ppma.tasks.base import Task

# Classes, or their import paths: each task needs packages that others do not, so it is imported when used.
TASKS: dict[str, str | type[Task[Any]]] = {
    "classification": "ppma.tasks.classification.task:Classification",
    "detection": "ppma.tasks.detection.task:Detection",
    "regions": "ppma.tasks.regions.task:RegionsTask",
    "segmentation": "ppma.tasks.segmentation.task:Segmentation",
}


def task_class(name: object, source: str = "task") -> type[Task[Any]]:
    """Look up a task by name.

    Args:
        name: a name of `TASKS`.
        source: prefix of the error message.

    Examples:
        >>> from ppma.tasks.registry import task_class
        >>> task_class("classification").monitor
        'top1'
    """
    configs.require(isinstance(name, str) and name in TASKS, source, f"one of {', '.join(TASKS)}", name)
    found = TASKS[str(name)]
    return pkgutil.resolve_name(found) if isinstance(found, str) else found


def load_config(recipe: str | Path, assignments: Iterable[str] = ()) -> RunConfig:
    """Load and validate a recipe; its `task` selects the schema.

    A recipe or an assignment that selects a model of timm replaces `model_args`, `init` and the preprocessing of what
    it builds on by the model's own; what it sets itself is kept.

    Args:
        recipe: path of a YAML file, or name of a packaged recipe.
        assignments: `key=value` changes, see `ppma.recipes.resolve`.

    Examples:
        >>> from ppma.tasks.registry import load_config
        >>> load_config("digits_nano", ["steps=3", "data.image_size=48"]).data.image_size
        48
    """
    values = recipes.resolve(recipe, assignments, _for_timm)
    task = task_class(values.setdefault("task", "classification"), f"{recipe}: task")
    return configs.build(task.schema, values, source=str(recipe))


def _for_timm(below: dict[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """The values that a recipe builds on, for the model of timm that it selects, if it does."""
    name = above.get("model")
    if not is_timm(name):
        return below
    task = task_class({**below, **above}.get("task", "classification"))
    measured = {key: value for key, value in preprocessing_values(str(name)).items() if key in task.preprocessing_keys}
    kept = {key: value for key, value in below.items() if key not in ("model_args", "init")}
    data = below.get("data")
    return {**kept, "data": {**(data if isinstance(data, dict) else {}), **measured}}


def recipe_schema() -> dict[str, Any]:
    """The JSON schema of recipes of any task."""
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
    """Make the task of a configuration."""
    return task_class(config.task)(config)
