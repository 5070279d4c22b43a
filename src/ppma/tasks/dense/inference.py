"""Evaluation of dense models: data and batches."""

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from ppma import config as configs
from ppma.data.source import check_classes
from ppma.recipes import is_recipe
from ppma.tasks.registry import load_config

Config = TypeVar("Config")


def data_configuration(stored: Config, task: str, data: str, assignments: Iterable[str]) -> Config:
    """The configuration of an evaluation.

    Args:
        stored: configuration from the checkpoint; its fields are a subset of those of the task's schema.
        task: name of the checkpoint's task.
        data: a recipe, or a folder that replaces `data.root`.
        assignments: `key=value` overrides.
    """
    if is_recipe(data):
        chosen = load_config(data, assignments)
        if chosen.task != task:
            raise configs.ConfigError(f"{data}: expected a {task} recipe for this checkpoint, got {chosen.task}")
        return type(stored)(**{field.name: getattr(chosen, field.name) for field in dataclasses.fields(stored)})  # type: ignore[arg-type]
    if not Path(data).is_dir():
        raise ValueError(f"data: expected a recipe or a folder, got {data!r}")
    values = configs.override(configs.to_dict(stored), [f"data.root={data}", *assignments])
    return configs.build(type(stored), values)


def check_data_classes(found: tuple[str, ...], classes: tuple[str, ...]) -> None:
    """Compare the classes of the data with the checkpoint's; numbers, of a file without names, fit any names."""
    if len(found) != len(classes) or classes != tuple(map(str, range(len(classes)))):
        check_classes(found, classes, found="the data", expected="the checkpoint")


def collate(samples: list[tuple[Tensor, Any]]) -> tuple[list[Tensor], list[Any]]:
    """Batch samples as lists, because image sizes differ."""
    images, targets = zip(*samples, strict=True)
    return list(images), list(targets)
