"""`ppma info`: parameters, FLOPs and activations of models."""

import argparse
import json
from typing import TYPE_CHECKING

from ppma_cli.model_options import add_changes, backbone, check_image_size, larger_model, open_model
from ppma_cli.output import table

if TYPE_CHECKING:
    from ppma.models.backbone import PolylineBackbone
    from ppma.models.profile import PartProfile, Profile

HELP = "print parameters, FLOPs, activations and attention of one model or all"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="a registered name, a weight file or a published name (default: all)"
    )
    add_changes(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print a table of costs."""
    from ppma.models.config import CONFIGS
    from ppma.models.profile import profile

    names = [arguments.model] if arguments.model else list(CONFIGS)
    size = check_image_size(arguments.size) if arguments.size else None
    # costs depend on shapes alone; on the meta device no weights are initialised
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
        if inside := larger_model(opened[arguments.model]):
            print(f"the backbone of {inside}; its heads are not counted")
        print(_describe(models[arguments.model], profiles[arguments.model]))
    else:
        print(_overview(models, profiles))
    return 0


_COSTS = ("parameters", "GFLOPs", "M activations")


def _costs(part: "PartProfile") -> list[str]:
    return [f"{part.parameters:,}", f"{part.macs / 1e9:.3f}", f"{part.activations / 1e6:.2f}"]


def _overview(models: dict[str, "PolylineBackbone"], profiles: dict[str, "Profile"]) -> str:
    rows = [["model", "formulation", "mask", "image", *_COSTS, "attention of the stages"]]
    for name, model in models.items():
        config, found = model.config, profiles[name]
        image = "x".join(map(str, found.size))
        rows.append([name, config.formulation, config.mask, image, *_costs(found.total), " ".join(config.kinds)])
    return table(rows)


def _describe(model: "PolylineBackbone", found: "Profile") -> str:
    config = model.config
    rows = [["part", "grid", "channels", "blocks", "attention", *_COSTS]]
    for part in found.parts:
        grid = "x".join(map(str, part.grid)) if part.grid else ""
        blocks = str(part.blocks) if part.blocks else ""
        rows.append([part.name, grid, str(part.channels), blocks, part.attention, *_costs(part)])
    rows.append(["total", "", "", "", "", *_costs(found.total)])
    title = f"{config.formulation} formulation, mask {config.mask}, image {found.size[0]}x{found.size[1]}"
    return f"{title}; a multiply-add is one FLOP\n\n{table(rows)}"
