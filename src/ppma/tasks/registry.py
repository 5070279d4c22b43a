"""Tasks by name, and their configurations from recipes."""

import dataclasses
import pkgutil
import warnings
from collections.abc import Collection, Iterable, Mapping
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
    hint = "; `ppma.load_retrofit` loads retrofitted ViTs" if name == "retrofit" else ""
    configs.require(isinstance(name, str) and name in TASKS, source, f"one of {', '.join(TASKS)}{hint}", name)
    found = TASKS[str(name)]
    return pkgutil.resolve_name(found) if isinstance(found, str) else found


def load_config(recipe: str | Path, assignments: Iterable[str] = ()) -> RunConfig:
    """Load and validate a recipe; its `task` selects the schema.

    A recipe or an assignment that selects a model of timm replaces `model_args`, `init` and the preprocessing of what
    it builds on by the model's own, with a warning about the latter; what it sets itself is kept. One that selects a
    model of ours again restores them.

    Args:
        recipe: path of a YAML file, or name of a packaged recipe.
        assignments: `key=value` changes, see `ppma.recipes.resolve`.

    Examples:
        >>> from ppma.tasks.registry import load_config
        >>> load_config("digits_nano", ["steps=3", "data.image_size=48"]).data.image_size
        48
    """
    values = recipes.resolve(recipe, assignments, _for_model)
    replaced = _take_replaced(values)
    task = task_class(values.setdefault("task", "classification"), f"{recipe}: task")
    config = configs.build(task.schema, values, source=str(recipe))
    if replaced is not None:
        _tell_preprocessing(config, replaced)
    return config


def resolve(recipe: str | Path, assignments: Iterable[str] = ()) -> dict[str, Any]:
    """The values of a recipe from which `load_config` builds a configuration."""
    values = recipes.resolve(recipe, assignments, _for_model)
    _take_replaced(values)
    return values


_REPLACED = "_replaced"  # a key in the values of a recipe
_OF_MODEL = ("model_args", "init")


@dataclasses.dataclass(frozen=True)
class _Replaced:
    """What a model of timm replaced in the values of a recipe.

    Attributes:
        values: of `_OF_MODEL`.
        data: preprocessing.
        own: preprocessing of the model, in its place.
    """

    values: dict[str, Any]
    data: dict[str, Any]
    own: dict[str, Any]

    def still_own(self, data: Mapping[str, Any]) -> list[str]:
        """Keys of the preprocessing that nothing else has set since."""
        return [key for key, value in self.own.items() if _plain(data.get(key)) == _plain(value)]


def _for_model(below: dict[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """The values that a recipe builds on, for the model that it selects, if it does."""
    if "model" not in above:
        return below
    below = _restore(below)
    name, data = above["model"], below.get("data", {})
    if not is_timm(name) or not isinstance(data, dict):
        return below
    task = task_class({**below, **above}.get("task", "classification"))
    given = above.get("data")
    own = _without(_only(preprocessing_values(name), task.preprocessing_keys), given if isinstance(given, dict) else {})
    replaced = _Replaced(_only(below, _OF_MODEL), _only(data, own), own)
    return {**_without(below, _OF_MODEL), "data": {**data, **own}, _REPLACED: replaced}


def _restore(values: dict[str, Any]) -> dict[str, Any]:
    """The values before they were changed for a model of timm."""
    values = dict(values)
    replaced, data = _take_replaced(values), values.get("data")
    if replaced is None or not isinstance(data, dict):
        return values
    keys = replaced.still_own(data)
    data = {**_without(data, keys), **_only(replaced.data, keys)}
    return {**_without(values, _OF_MODEL), **replaced.values, "data": data}


def _take_replaced(values: dict[str, Any]) -> _Replaced | None:
    return values.pop(_REPLACED) if isinstance(values.get(_REPLACED), _Replaced) else None


def _only(values: Mapping[str, Any], keys: Collection[str]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key in keys}


def _without(values: Mapping[str, Any], keys: Collection[str]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in keys}


def _tell_preprocessing(config: Any, replaced: _Replaced) -> None:
    """Warn about the preprocessing that a model of timm changed."""
    data = {field.name: getattr(config.data, field.name) for field in dataclasses.fields(config.data)}
    before = {field.name: field.default for field in dataclasses.fields(config.data)} | replaced.data
    pairs = {key: (_plain(data[key]), _plain(before[key])) for key in replaced.still_own(data)}
    changes = [f"{key} {new} instead of {old}" for key, (new, old) in pairs.items() if new != old]
    if changes:
        warnings.warn(f"data: the preprocessing is that of timm's {config.model}: {', '.join(changes)}", stacklevel=3)


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


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
