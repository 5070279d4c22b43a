"""Options that name a model, and the model that they mean."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppma_cli import choices

if TYPE_CHECKING:
    from ppma.models import Checkpoint, PolylineBackbone

_LARGEST = 1 << 16  # pixels along a side


def add_subject(parser: argparse.ArgumentParser, *, default: str) -> None:
    """Which model: a checkpoint, or an architecture with random weights."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--checkpoint", type=Path, help="weights: of `ppma train`, `ppma demo` or the authors")
    which.add_argument(
        "--model", default=default, help="an architecture, with random weights: ppma_nano, ppma_tiny, ... (%(default)s)"
    )


def add_changes(parser: argparse.ArgumentParser) -> None:
    """What a model's configuration may be changed to, and the image's size."""
    parser.add_argument("--formulation", choices=choices.FORMULATIONS, help="mask after or inside the softmax")
    parser.add_argument("--mask", choices=choices.MASKS, help="another mask than the model's own")
    parser.add_argument("--size", nargs=2, type=int, metavar=("HEIGHT", "WIDTH"), help="of the image")


def model_changes(arguments: argparse.Namespace) -> dict[str, Any]:
    """What the arguments change of a model's configuration."""
    options = {option: getattr(arguments, option) for option in ("formulation", "mask")}
    return {option: value for option, value in options.items() if value is not None}


def check_image_size(size: Sequence[int]) -> tuple[int, int]:
    """(height, width) as `--size` takes them."""
    height, width = size
    if min(height, width) < 1 or max(height, width) > _LARGEST:
        raise ValueError(f"--size: expected a height and a width from 1 to {_LARGEST}, got {height} {width}")
    return height, width


def is_file_name(name: str) -> bool:
    """Whether MODEL means a weight file, one that may be missing, rather than a registered name."""
    from ppma.models.config import CONFIGS

    return name not in CONFIGS and (Path(name).exists() or Path(name).suffix != "" or Path(name).name != name)


def open_model(name: str) -> "str | Checkpoint":
    """The weight file that MODEL names, opened, or else the name."""
    from ppma.models import open_checkpoint

    return open_checkpoint(name) if is_file_name(name) else name


def backbone(name: "str | Checkpoint", arguments: argparse.Namespace, device: str = "cpu") -> "PolylineBackbone":
    """A model by its name, new on this device, or from an open weight file; with what the arguments change."""
    import torch

    from ppma.models import CONFIGS, Checkpoint, PolylineBackbone, load_checkpoint
    from ppma.ops import checks

    changes = model_changes(arguments)
    if isinstance(name, Checkpoint):
        return load_checkpoint(name, **changes)
    checks.one_of("MODEL", name, CONFIGS)
    with torch.device(device):
        return PolylineBackbone(CONFIGS[name].replace(**changes)).eval()


def larger_model(opened: "str | Checkpoint") -> str | None:
    """What a file holds beside a backbone, if it does."""
    return None if isinstance(opened, str) or not opened.larger else f"a {opened.task} model"
