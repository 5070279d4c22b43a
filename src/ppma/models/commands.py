"""`ppma info` and `ppma convert`: each parses, calls, prints."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ppma import masks
from ppma.layers.attention import ATTENTION_KINDS, FORMULATIONS
from ppma.models.backbone import PolylineBackbone
from ppma.models.checkpoints import Checkpoint, open_checkpoint
from ppma.models.config import CONFIGS
from ppma.models.loading import load_checkpoint, save_checkpoint
from ppma.models.profile import PartProfile, Profile, profile
from ppma.models.timm_config import variant_name
from ppma.ops import checks
from ppma.outputs import check_target

_LARGEST = 1 << 16  # pixels along a side


def model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--formulation", choices=FORMULATIONS, help="mask after or inside the softmax")
    parser.add_argument("--mask", choices=masks.KINDS, help="another mask than the model's own")
    parser.add_argument("--size", nargs=2, type=int, metavar=("HEIGHT", "WIDTH"), help="of the image")


def model_changes(arguments: argparse.Namespace) -> dict[str, Any]:
    """What the arguments change of a model's configuration."""
    options = {option: getattr(arguments, option) for option in ("formulation", "mask")}
    return {option: value for option, value in options.items() if value is not None}


def is_file_name(name: str) -> bool:
    """Whether MODEL means a weight file, one that may be missing, rather than a registered name."""
    return name not in CONFIGS and (Path(name).exists() or Path(name).suffix != "" or Path(name).name != name)


def open_model(name: str) -> str | Checkpoint:
    """The weight file that MODEL names, opened, or else the name."""
    return open_checkpoint(name) if is_file_name(name) else name


def backbone(name: str | Checkpoint, arguments: argparse.Namespace, device: str = "cpu") -> PolylineBackbone:
    """A model by its name, new on this device, or from an open weight file; with what the arguments change."""
    changes = model_changes(arguments)
    if isinstance(name, Checkpoint):
        return load_checkpoint(name, **changes)
    checks.one_of("MODEL", name, CONFIGS)
    with torch.device(device):
        return PolylineBackbone(CONFIGS[name].replace(**changes)).eval()


def check_image_size(size: Sequence[int]) -> tuple[int, int]:
    """(height, width) as `--size` takes them."""
    height, width = size
    if min(height, width) < 1 or max(height, width) > _LARGEST:
        raise ValueError(f"--size: expected a height and a width from 1 to {_LARGEST}, got {height} {width}")
    return height, width


def _table(rows: list[list[str]]) -> str:
    """Columns side by side: words to the left, numbers to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    left = [not any(row[column][:1].isdigit() for row in rows[1:]) for column in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.ljust(width) if to_left else cell.rjust(width)
            for cell, width, to_left in zip(row, widths, left, strict=True)
        )
        for row in rows
    ]
    return "\n".join(line.rstrip() for line in lines)


def info_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help="a registered name or a weight file; all if omitted")
    model_arguments(parser)
    parser.add_argument("--json", action="store_true", help="for machines")


def info(arguments: argparse.Namespace) -> int:
    """Print what models cost."""
    names = [arguments.model] if arguments.model else list(CONFIGS)
    size = check_image_size(arguments.size) if arguments.size else None
    # costs follow from shapes; weights would only take time to initialise
    opened = {name: open_model(name) for name in names}
    models = {name: backbone(opened[name], arguments, device="meta") for name in names}
    profiles = {name: profile(model, size) for name, model in models.items()}
    if arguments.json:
        documents = [
            {"name": name, **profiles[name].to_dict(), "config": model.config.to_dict()}
            for name, model in models.items()
        ]
        print(json.dumps(documents[0] if arguments.model else documents, indent=2))
    elif arguments.model:
        if inside := _larger_model(opened[arguments.model]):
            print(f"the backbone of {inside}; its heads are not counted")
        print(_describe(models[arguments.model], profiles[arguments.model]))
    else:
        print(_overview(models, profiles))
    return 0


def _larger_model(opened: str | Checkpoint) -> str | None:
    """What a file holds beside a backbone, if it does."""
    return f"a {opened.task} model" if isinstance(opened, Checkpoint) and opened.larger else None


_COSTS = ("parameters", "GFLOPs", "M activations")


def _costs(part: PartProfile) -> list[str]:
    return [f"{part.parameters:,}", f"{part.macs / 1e9:.3f}", f"{part.activations / 1e6:.2f}"]


def _overview(models: dict[str, PolylineBackbone], profiles: dict[str, Profile]) -> str:
    rows = [["model", "formulation", "mask", "image", *_COSTS, "attention of the stages"]]
    for name, model in models.items():
        config, found = model.config, profiles[name]
        image = "x".join(map(str, found.size))
        rows.append([name, config.formulation, config.mask, image, *_costs(found.total), " ".join(config.kinds)])
    return _table(rows)


def _describe(model: PolylineBackbone, found: Profile) -> str:
    config = model.config
    rows = [["part", "grid", "channels", "blocks", "attention", *_COSTS]]
    for part in found.parts:
        grid = "x".join(map(str, part.grid)) if part.grid else ""
        blocks = str(part.blocks) if part.blocks else ""
        rows.append([part.name, grid, str(part.channels), blocks, part.attention, *_costs(part)])
    rows.append(["total", "", "", "", "", *_costs(found.total)])
    title = f"{config.formulation} formulation, mask {config.mask}, image {found.size[0]}x{found.size[1]}"
    return f"{title}; a multiply-add is one FLOP\n\n{_table(rows)}"


def convert_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="IN", help="a checkpoint of the authors, best.pth for example")
    parser.add_argument("target", metavar="OUT.safetensors")
    parser.add_argument("--ema", action="store_true", help="take the EMA weights")
    parser.add_argument("--mask", choices=masks.KINDS, help="where shapes do not tell it, v2h for example")
    parser.add_argument(
        "--kinds", nargs="+", choices=ATTENTION_KINDS, help="attention of each stage, for shapes of no published model"
    )


def convert(arguments: argparse.Namespace) -> int:
    """Convert a checkpoint."""
    target = check_target("OUT", arguments.target, (".safetensors",))
    overrides = {
        option: getattr(arguments, option) for option in ("mask", "kinds") if getattr(arguments, option) is not None
    }
    source = open_checkpoint(arguments.source)
    model = load_checkpoint(source, ema=arguments.ema, **overrides)
    save_checkpoint(model, target)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    name = variant_name(model.config) or "a model of its own"
    head = f"{model.num_classes} classes" if model.num_classes else "no classifier"
    if inside := _larger_model(source):
        print(f"converted: the backbone of {inside}, without its heads")
    print(f"{target}: {name}, mask {model.config.mask}, {parameters:,} parameters, {head}")
    return 0
