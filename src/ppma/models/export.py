"""Export to other runtimes: torch.export programs and ONNX."""

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ppma.atomic import write_atomically
from ppma.models.backbone import PolylineBackbone
from ppma.models.timm_models import TimmModel
from ppma.ops import decompositions

OPSET = 20  # the first that has GELU
NEWEST_OPSET = 23
LARGEST = 8192  # the exporter needs an upper bound of dynamic sizes
_ONE_GRID = ("cross", "hilbert")  # masks whose scan order is fixed when the graph is captured


def backbone_in(model: nn.Module) -> Any:
    """The backbone that a model is or contains: one of ours, or one of timm that `ppma train` trained."""
    kinds = (module for module in model.modules() if isinstance(module, PolylineBackbone) or _is_timm(module))
    found = next(kinds, None)
    if found is None:
        raise ValueError(f"model: expected a PolylineBackbone or a model that contains one, got {type(model).__name__}")
    return found


def _is_timm(module: nn.Module) -> bool:
    return isinstance(getattr(module, "timm_model", None), TimmModel)


def input_channels(model: nn.Module) -> int:
    """Channels of the images that a model takes."""
    backbone = backbone_in(model)
    return backbone.pretrained_cfg["input_size"][0] if _is_timm(backbone) else backbone.config.in_chans


def check_size(model: nn.Module, size: tuple[int, int], *, dynamic: bool) -> None:
    """Raise a ValueError for a size that cannot be exported; arguments as in `export_program`."""
    backbone = backbone_in(model)
    if min(size) < 1 or max(size) > LARGEST:
        raise ValueError(f"size: expected 1 to {LARGEST} pixels, got {size[0]} x {size[1]}")
    if not dynamic:
        return
    stride = _stride(backbone)
    if _is_timm(backbone):
        return
    if backbone.config.mask in _ONE_GRID:
        raise ValueError(f"dynamic: expected False for mask={backbone.config.mask!r}, which is fixed for one grid")
    if min(size) <= stride:
        raise ValueError(f"size: expected more than {stride} x {stride} for dynamic sizes, got {size[0]} x {size[1]}")


def takes_any_size(model: nn.Module) -> bool:
    """Whether dynamic height and width can be exported; most models of timm take multiples of their stride only."""
    return not _is_timm(backbone_in(model))


def _stride(backbone: PolylineBackbone) -> int:
    return int(backbone.feature_info[-1]["reduction"])


def export_program(
    model: nn.Module, size: tuple[int, int] | None = None, *, dynamic: bool = True
) -> torch.export.ExportedProgram:
    """Capture a model in evaluation mode as a graph, in which attention is an operator of `torch.ops.ppma`.

    Args:
        model: a backbone, or a model that contains one and takes a batch of images; it is put into evaluation mode.
        size: (height, width) of the example image; None takes that of the backbone's `pretrained_cfg`.
        dynamic: make batch, height and width dynamic; for models of timm, the batch alone. Heights and widths must
            then be larger than the stride of the last stage (32; 16 for `ppma_nano`); not for the masks "cross" and
            "hilbert", fixed for one grid.

    Returns:
        A program that takes images (B, in_chans, height, width) and returns the model's output: logits
        (B, num_classes) for a classifier.

    Examples:
        >>> import timm, torch
        >>> program = export_program(timm.create_model("ppma_nano", num_classes=10), (32, 32), dynamic=False)
        >>> program.module()(torch.randn(1, 3, 32, 32)).shape
        torch.Size([1, 10])
    """
    backbone = backbone_in(model)
    height, width = size or backbone.pretrained_cfg["input_size"][1:]
    check_size(model, (height, width), dynamic=dynamic)
    shapes = _dynamic_shapes(backbone) if dynamic else None
    # Two images: torch.export takes a batch of one for a constant.
    image = torch.randn(2 if dynamic else 1, input_channels(model), height, width)
    return torch.export.export(model.eval(), (image,), dynamic_shapes=shapes, strict=False)


def _dynamic_shapes(backbone: Any) -> tuple[dict[int, Any]]:
    batch = {0: torch.export.Dim("batch", min=1, max=LARGEST)}
    if not takes_any_size(backbone):
        return (batch,)
    smallest = _stride(backbone) + 1
    extents = {axis: torch.export.Dim(name, min=smallest, max=LARGEST) for axis, name in ((2, "height"), (3, "width"))}
    return ({**batch, **extents},)


def check_opset(opset: int) -> None:
    """Raise a ValueError for an ONNX opset that lacks an operator."""
    if not OPSET <= opset <= NEWEST_OPSET:
        raise ValueError(f"opset: expected {OPSET} to {NEWEST_OPSET}, got {opset}")


def export_onnx(
    model: nn.Module,
    path: str | Path,
    size: tuple[int, int] | None = None,
    *,
    dynamic: bool = True,
    opset: int = OPSET,
    outputs: Sequence[str] = ("logits",),
) -> None:
    """Write an ONNX file with the input "image"; attention is exported in its dense form.

    Args:
        model: as in `export_program`.
        path: of the file, which includes the weights.
        size: as in `export_program`.
        dynamic: as in `export_program`.
        opset: ONNX opset, at least 20.
        outputs: names of the outputs.
    """
    check_opset(opset)
    program = export_program(model, size, dynamic=dynamic).run_decompositions(
        {**decompositions.table(), torch.ops.aten.adaptive_avg_pool2d.default: _adaptive_average}
    )
    onnx = torch.onnx.export(
        program,
        dynamic_shapes=_dynamic_shapes(backbone_in(model)) if dynamic else None,  # only names the axes here
        input_names=["image"],
        output_names=list(outputs),
        opset_version=opset,
        optimize=False,  # takes minutes for dynamic sizes; runtimes optimise at load time
        verbose=False,
    )
    assert onnx is not None
    write_atomically(Path(path), onnx.model_proto.SerializeToString())


def save_program(program: torch.export.ExportedProgram, path: str | Path) -> None:
    """Like `torch.export.save`, but atomic: an existing file is replaced only by a complete one."""
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    write_atomically(Path(path), buffer.getbuffer())


class StageFeatures(nn.Module):
    """A backbone that returns the features of its stages, (B, C, H, W) each, instead of logits.

    Args:
        backbone: takes the images.
    """

    def __init__(self, backbone: PolylineBackbone) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        """Images (B, in_chans, height, width) to one tensor per stage, finest first."""
        features = self.backbone.forward_intermediates(image, intermediates_only=True)
        assert isinstance(features, list)
        return tuple(features)


def _adaptive_average(x: Tensor, output_size: Sequence[int]) -> Tensor:
    """Adaptive average pooling as two matrix products, also for symbolic sizes; ONNX has no such operator."""
    rows, columns = (_bins(x.shape[axis], bins, x) for axis, bins in ((-2, output_size[0]), (-1, output_size[1])))
    return rows @ x @ columns.mT


def _bins(extent: int, bins: int, like: Tensor) -> Tensor:
    """(bins, extent): row i averages from floor(i n / bins) up to ceil((i + 1) n / bins), n the extent."""
    position = torch.arange(extent, device=like.device)
    index = torch.arange(bins, device=like.device)[:, None]
    inside = (position >= index * extent // bins) & (position < ((index + 1) * extent + bins - 1) // bins)
    inside = inside.to(like.dtype)
    return inside / inside.sum(-1, keepdim=True)


def onnx_differences(model: nn.Module, path: str | Path, sizes: Sequence[tuple[int, int]]) -> list[float]:
    """Compare an ONNX file in onnxruntime with the model, on one random image of each size.

    Returns:
        For each size, the largest difference divided by the largest output.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors only: it warns about every constant it does not fold
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def run(image: Tensor) -> list[Tensor]:
        return [torch.from_numpy(out) for out in session.run(None, {"image": image.numpy()})]

    return _differences(model, run, sizes)


def program_differences(model: nn.Module, path: str | Path, sizes: Sequence[tuple[int, int]]) -> list[float]:
    """Like `onnx_differences`, for a file of `torch.export.save`."""
    return _differences(model, torch.export.load(path).module(), sizes)


@torch.no_grad()
def _differences(model: nn.Module, run: Callable[[Tensor], Any], sizes: Sequence[tuple[int, int]]) -> list[float]:
    differences = []
    for size in sizes:
        image = torch.randn(1, input_channels(model), *size)
        pairs = zip(_tensors(run(image)), _tensors(model(image)), strict=True)
        differences.append(max((ours - eager).abs().max().item() / eager.abs().max().item() for ours, eager in pairs))
    return differences


def _tensors(outputs: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
    return [outputs] if isinstance(outputs, Tensor) else outputs
