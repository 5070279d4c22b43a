"""`ppma export`: export a classifier, a segmentation model or a backbone to ONNX or torch.export."""

import argparse
import importlib.util
from typing import TYPE_CHECKING

from ppma_cli import choices
from ppma_cli.model_options import add_changes, backbone, check_image_size, model_changes, open_model

if TYPE_CHECKING:
    from torch import nn

    from ppma.models import Checkpoint, PolylineBackbone
    from ppma.models.timm_features import TimmFeatures

HELP = "export a model to ONNX or torch.export"

_AGREEMENT = 1e-3  # larger differences are not float32 rounding
_SUFFIXES = (".onnx", ".pt2")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a registered name, a weight file or a published name")
    parser.add_argument("target", metavar="OUT", help="FILE.onnx, or FILE.pt2 for a torch.export program")
    add_changes(parser)
    parser.add_argument(
        "--static", action="store_true", help="fix batch 1, height and width instead of exporting dynamic axes"
    )
    parser.add_argument(
        "--backbone-only", action="store_true", help="export the features of every stage, without a head"
    )
    parser.add_argument(
        "--check",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="run the file, in onnxruntime or as a loaded program, and compare it with the model (default: yes)",
    )
    parser.add_argument("--opset", type=int, default=choices.OPSET, help="ONNX opset (default: %(default)s)")


def run(arguments: argparse.Namespace) -> int:
    """Export a model and compare the file's outputs with the model's."""
    from ppma.models import export as exporting
    from ppma.outputs import check_target
    from ppma.progress import Progress

    target = check_target("OUT", arguments.target, _SUFFIXES)
    if target.suffix.lower() == ".onnx":
        _check_onnx(arguments.opset, arguments.check)
    asked = check_image_size(arguments.size) if arguments.size else None
    model, outputs = _subject(arguments)
    inside = exporting.backbone_in(model)
    height, width = asked or inside.pretrained_cfg["input_size"][1:]
    dynamic = not arguments.static
    exporting.check_size(model, (height, width), dynamic=dynamic)
    any_size = dynamic and exporting.takes_any_size(model)
    sizes = [(height, width), (height + 32, width + 17)] if any_size else [(height, width)]
    if target.suffix.lower() == ".onnx":
        with Progress("exporting to ONNX"):
            inputs, shapes = exporting.image_inputs(model, (height, width), dynamic=dynamic)
            names = {"input_names": ["image"], "output_names": [*outputs]}
            exporting.export_onnx(model, inputs, target, dynamic_shapes=shapes, opset=arguments.opset, **names)
        compare, what, how = exporting.onnx_differences, f"ONNX opset {arguments.opset}", "in onnxruntime"
    else:
        with Progress("exporting with torch.export"):
            exporting.save_program(exporting.export_program(model, (height, width), dynamic=dynamic), target)
        compare, what, how = exporting.program_differences, "torch.export program", "after loading"
    extents = "height, width" if any_size else f"{height}, {width}"
    shape = f"({'batch' if dynamic else 1}, {exporting.input_channels(model)}, {extents})"
    line = f"{target}: image {shape} to {', '.join(outputs.values())}; {what}"
    if not arguments.check:
        print(f"{line}, not compared")
        return 0
    with Progress("comparing outputs"):
        differences = compare(model, target, sizes)
    print(f"{line}, compared {how}:")
    for size, difference in zip(sizes, differences, strict=True):
        print(f"  {size[0]}x{size[1]}: differs from eager by {difference:.1e} of the largest output")
    return 0 if max(differences) < _AGREEMENT else 1


def _check_onnx(opset: int, check: bool) -> None:
    needed = ("onnx", "onnxscript", *(["onnxruntime"] if check else []))
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"ONNX needs {', '.join(missing)}: pip install {' '.join(missing)}")
    from ppma.models import export as exporting

    exporting.check_opset(opset)


def _backbone(opened: "str | Checkpoint", arguments: argparse.Namespace) -> "PolylineBackbone | TimmFeatures":
    from ppma.models import Checkpoint

    if isinstance(opened, Checkpoint) and opened.timm_model is not None:
        from ppma.tasks.dense.backbone import timm_backbone  # with the features of a pyramid

        return timm_backbone(opened, **model_changes(arguments)).eval()
    return backbone(opened, arguments)


def _subject(arguments: argparse.Namespace) -> tuple["nn.Module", dict[str, str]]:
    """The module to export, and its outputs as name -> description."""
    from ppma.models import Checkpoint
    from ppma.models.export import StageFeatures
    from ppma.tasks.registry import task_class

    opened = open_model(arguments.model)
    if arguments.backbone_only:
        features = StageFeatures(_backbone(opened, arguments))
        stages = range(len(features.backbone.feature_info))
        return features, {f"stage{index + 1}": f"features of stage {index + 1}" for index in stages}
    if isinstance(opened, Checkpoint):
        return task_class(opened.task, str(opened.path)).exportable(opened, **model_changes(arguments))
    model = backbone(opened, arguments)
    return model, {"logits": "class scores" if model.num_classes else "features"}
