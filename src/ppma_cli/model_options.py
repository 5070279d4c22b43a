"""Options that select a model, and the functions that build or open it."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppma_cli import choices

if TYPE_CHECKING:
    from ppma.models import Checkpoint, PolylineBackbone

_LARGEST = 1 << 16  # pixels


def add_subject(parser: argparse.ArgumentParser, *, default: str | None = None) -> None:
    """Add `--checkpoint` and `--model`; without a default, the packaged weights."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--checkpoint", type=Path, help="a weight file, or a name that `ppma weights` lists")
    which.add_argument(
        "--model",
        default=default,
        help="published weights, an architecture with random weights such as ppma_nano, or a ViT of timm, pretrained "
        f"if its name has a tag (default: {default or 'the weights in this package'})",
    )


def add_changes(parser: argparse.ArgumentParser) -> None:
    """Add `--formulation`, `--mask` and `--size`."""
    parser.add_argument(
        "--formulation", choices=choices.FORMULATIONS, help="paper: mask after the softmax; release: inside it"
    )
    parser.add_argument("--mask", choices=choices.MASKS, help="replace the model's mask")
    parser.add_argument("--size", nargs=2, type=int, metavar=("HEIGHT", "WIDTH"), help="image size")


def model_changes(arguments: argparse.Namespace) -> dict[str, Any]:
    """The configuration changes that the arguments ask for."""
    options = {option: getattr(arguments, option) for option in ("formulation", "mask")}
    return {option: value for option, value in options.items() if value is not None}


def check_image_size(size: Sequence[int]) -> tuple[int, int]:
    """Validate the values of `--size`; returns (height, width)."""
    height, width = size
    if min(height, width) < 1 or max(height, width) > _LARGEST:
        raise ValueError(f"--size: expected a height and a width from 1 to {_LARGEST}, got {height} {width}")
    return height, width


def is_file_name(name: str) -> bool:
    """Whether MODEL looks like a weight file, existing or not, rather than a registered name."""
    from ppma.models.config import CONFIGS

    return name not in CONFIGS and (Path(name).exists() or Path(name).suffix != "" or Path(name).name != name)


def open_model(name: str) -> "str | Checkpoint":
    """Open MODEL if it is a weight file; else return the name."""
    from ppma.models import open_checkpoint

    return open_checkpoint(name) if is_file_name(name) else name


def backbone(name: "str | Checkpoint", arguments: argparse.Namespace, device: str = "cpu") -> "PolylineBackbone":
    """Build a model by name on the given device, or load it from an open weight file, with the arguments' changes."""
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
    """Describe the model around a backbone, if the file holds one."""
    return None if isinstance(opened, str) or not opened.larger else f"a {opened.task} model"
