"""`ppma info`, `ppma convert` and `ppma export`: each parses, calls, prints."""

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import torch

from ppma import masks
from ppma.layers.attention import ATTENTION_KINDS, FORMULATIONS
from ppma.models import export as exporting
from ppma.models.backbone import PolylineBackbone
from ppma.models.checkpoint import load_checkpoint, save_checkpoint
from ppma.models.config import CONFIGS
from ppma.models.preprocessing import variant_name
from ppma.models.profile import PartProfile, Profile, profile
from ppma.ops import checks


def _model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--formulation", choices=FORMULATIONS, help="mask after or inside the softmax")
    parser.add_argument("--mask", choices=masks.KINDS, help="another mask than the model's own")
    parser.add_argument("--size", nargs=2, type=int, metavar=("HEIGHT", "WIDTH"), help="of the image")


def _model(name: str, arguments: argparse.Namespace, device: str = "cpu") -> PolylineBackbone:
    """A model by its name, new on this device, or from a weight file; with what the arguments change."""
    changes: dict[str, Any] = {
        option: getattr(arguments, option)
        for option in ("formulation", "mask")
        if getattr(arguments, option) is not None
    }
    if Path(name).is_file():
        return load_checkpoint(name, **changes)
    checks.one_of("MODEL", name, CONFIGS)
    with torch.device(device):
        return PolylineBackbone(CONFIGS[name].replace(**changes)).eval()


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
    _model_arguments(parser)
    parser.add_argument("--json", action="store_true", help="for machines")


def info(arguments: argparse.Namespace) -> int:
    """Print what models cost."""
    names = [arguments.model] if arguments.model else list(CONFIGS)
    size = tuple(arguments.size) if arguments.size else None
    # costs follow from shapes; weights would only take time to initialise
    models = {name: _model(name, arguments, device="meta") for name in names}
    profiles = {name: profile(model, size) for name, model in models.items()}
    if arguments.json:
        documents = [
            {"name": name, **profiles[name].to_dict(), "config": model.config.to_dict()}
            for name, model in models.items()
        ]
        print(json.dumps(documents[0] if arguments.model else documents, indent=2))
    elif arguments.model:
        print(_describe(models[arguments.model], profiles[arguments.model]))
    else:
        print(_overview(models, profiles))
    return 0


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
    if Path(arguments.target).suffix != ".safetensors":
        raise ValueError(f"OUT: expected a name that ends in .safetensors, got {arguments.target}")
    overrides = {
        option: getattr(arguments, option) for option in ("mask", "kinds") if getattr(arguments, option) is not None
    }
    model = load_checkpoint(arguments.source, ema=arguments.ema, **overrides)
    save_checkpoint(model, arguments.target)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    name = variant_name(model.config) or "a model of its own"
    head = f"{model.num_classes} classes" if model.num_classes else "no classifier"
    print(f"{arguments.target}: {name}, mask {model.config.mask}, {parameters:,} parameters, {head}")
    return 0


_AGREEMENT = 1e-3  # more than float32 can explain


def export_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a registered name or a weight file")
    parser.add_argument("target", metavar="OUT", help="OUT.onnx, or OUT.pt2 for a torch.export program")
    _model_arguments(parser)
    parser.add_argument(
        "--static", action="store_true", help="fix batch 1, height and width instead of leaving them open"
    )
    parser.add_argument("--opset", type=int, default=exporting.OPSET, help="of ONNX (default: %(default)s)")


def export(arguments: argparse.Namespace) -> int:
    """Export a model and compare the file with it."""
    target = Path(arguments.target)
    checks.one_of("suffix of OUT", target.suffix, (".onnx", ".pt2"))
    if target.suffix == ".onnx":
        missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if importlib.util.find_spec(name) is None]
        if missing:
            raise ValueError(f"ONNX needs {', '.join(missing)}: pip install 'ppma[export]'")
    model = _model(arguments.model, arguments)
    height, width = arguments.size or model.pretrained_cfg["input_size"][1:]
    dynamic = not arguments.static
    sizes = [(height, width), (height + 32, width + 17)] if dynamic else [(height, width)]
    print("capturing the graph; a large model with open sizes takes a minute or more", file=sys.stderr)
    if target.suffix == ".onnx":
        exporting.export_onnx(model, target, (height, width), dynamic=dynamic, opset=arguments.opset)
        differences = exporting.onnx_differences(model, target, sizes)
        what = f"ONNX opset {arguments.opset}, compared in onnxruntime"
    else:
        torch.export.save(exporting.export_program(model, (height, width), dynamic=dynamic), target)
        differences = exporting.program_differences(model, target, sizes)
        what = "torch.export program, compared after loading"
    shape = "(batch, {}, height, width)" if dynamic else f"(1, {{}}, {height}, {width})"
    print(f"{target}: image {shape.format(model.config.in_chans)}; {what}:")
    for size, difference in zip(sizes, differences, strict=True):
        print(f"  {size[0]}x{size[1]}: differs from eager by {difference:.1e} of the largest output")
    return 0 if max(differences) < _AGREEMENT else 1
