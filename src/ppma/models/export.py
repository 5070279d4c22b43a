"""Export to other runtimes: torch.export programs and ONNX."""

import functools
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ppma.atomic import write_atomically
from ppma.models.backbone import PolylineBackbone
from ppma.models.timm_features import TimmFeatures
from ppma.models.timm_models import TimmModel
from ppma.ops import decompositions

OPSET = 20  # the first that has GELU
NEWEST_OPSET = 23
LARGEST = 8192  # the exporter needs an upper bound of dynamic sizes
DYNAMIC_TORCH = (2, 9)  # torch.export of 2.6 and 2.8 fails for dynamic heights and widths
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
    if _torch_version() < DYNAMIC_TORCH:
        needed = ".".join(map(str, DYNAMIC_TORCH))
        raise ValueError(f"dynamic: expected torch {needed} or newer for dynamic sizes, got {torch.__version__}")
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


def _torch_version() -> tuple[int, ...]:
    return tuple(int(part) for part in torch.__version__.split(".")[:2])


def _stride(backbone: PolylineBackbone) -> int:
    return int(backbone.feature_info[-1]["reduction"])


def image_inputs(
    model: nn.Module, size: tuple[int, int] | None = None, *, dynamic: bool = True
) -> tuple[tuple[Tensor], tuple[dict[int, Any]] | None]:
    """Example images for a model with a backbone, and `dynamic_shapes` as torch.export takes them.

    Args:
        model: a backbone, or a model that contains one and takes a batch of images.
        size: (height, width) of the example images; None takes that of the backbone's `pretrained_cfg`.
        dynamic: make batch, height and width dynamic; for models of timm, the batch alone. Heights and widths must
            then be larger than the stride of the last stage (32; 16 for `ppma_nano`); not for the masks "cross" and
            "hilbert", fixed for one grid.
    """
    backbone = backbone_in(model)
    height, width = size or backbone.pretrained_cfg["input_size"][1:]
    check_size(model, (height, width), dynamic=dynamic)
    # Two images: torch.export takes a batch of one for a constant.
    image = torch.randn(2 if dynamic else 1, input_channels(model), height, width)
    if not dynamic:
        return (image,), None
    batch = {0: torch.export.Dim("batch", min=1, max=LARGEST)}
    if not takes_any_size(model):
        return (image,), (batch,)
    smallest = _stride(backbone) + 1
    extents = {axis: torch.export.Dim(name, min=smallest, max=LARGEST) for axis, name in ((2, "height"), (3, "width"))}
    return (image,), ({**batch, **extents},)


def export_program(
    model: nn.Module, size: tuple[int, int] | None = None, *, dynamic: bool = True
) -> torch.export.ExportedProgram:
    """Capture a model in evaluation mode as a graph, in which attention is an operator of `torch.ops.ppma`.

    Args:
        model: as in `image_inputs`; it is put into evaluation mode.
        size: as in `image_inputs`.
        dynamic: as in `image_inputs`.

    Returns:
        A program that takes images (B, in_chans, height, width) and returns the model's output: logits
        (B, num_classes) for a classifier.

    Examples:
        >>> import timm, torch
        >>> program = export_program(timm.create_model("ppma_nano", num_classes=10), (32, 32), dynamic=False)
        >>> program.module()(torch.randn(1, 3, 32, 32)).shape
        torch.Size([1, 10])
    """
    inputs, shapes = image_inputs(model, size, dynamic=dynamic)
    return torch.export.export(model.eval(), inputs, dynamic_shapes=shapes, strict=False)


def check_opset(opset: int) -> None:
    """Raise a ValueError for an ONNX opset that lacks an operator."""
    if not OPSET <= opset <= NEWEST_OPSET:
        raise ValueError(f"opset: expected {OPSET} to {NEWEST_OPSET}, got {opset}")


def register() -> None:
    """Let `torch.onnx.export(..., dynamo=True)` export modules with our operators, in their dense form.

    Call it once in a process; `export_onnx` does. The exporter of TorchScript (`dynamo=False`) is not supported.
    """
    from torch.onnx._internal.exporter import _decomp  # torch.onnx has no public way to decompose an operator

    original = _decomp.create_onnx_friendly_decomposition_table
    if getattr(original, "_ppma", False):
        return

    @functools.wraps(original)
    def with_ours(*arguments: Any, **options: Any) -> dict[Any, Callable[..., Any]]:
        ours = {**decompositions.table(), torch.ops.aten.adaptive_avg_pool2d.default: _adaptive_average}
        return {**original(*arguments, **options), **ours}

    with_ours._ppma = True  # type: ignore[attr-defined]
    _decomp.create_onnx_friendly_decomposition_table = with_ours


def export_onnx(
    module: nn.Module,
    inputs: Tensor | tuple[Any, ...],
    path: str | Path,
    *,
    dynamic_shapes: Any = None,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    opset: int = OPSET,
) -> None:
    """Write any module, with or without our operators, to an ONNX file; attention is exported in its dense form.

    Args:
        module: put into evaluation mode.
        inputs: example arguments of its forward pass; a tensor for a single one.
        path: of the file, which includes the weights.
        dynamic_shapes: as in `torch.export.export`; None fixes all shapes. `image_inputs` gives those of our backbones.
        input_names: names of the inputs; those of the arguments if None.
        output_names: names of the outputs.
        opset: ONNX opset, at least 20.

    Examples:
        >>> import tempfile, torch, ppma
        >>> from ppma.layers import PolylineAttention
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     ppma.export_onnx(PolylineAttention(16, heads=2), torch.randn(1, 4, 4, 16), f"{folder}/attention.onnx")
    """
    check_opset(opset)
    register()
    inputs = (inputs,) if isinstance(inputs, Tensor) else inputs
    onnx = torch.onnx.export(
        torch.export.export(module.eval(), inputs, dynamic_shapes=dynamic_shapes, strict=False),
        dynamic_shapes=dynamic_shapes,  # only names the axes here
        input_names=input_names,
        output_names=output_names,
        opset_version=opset,
        dynamo=True,  # not the default before torch 2.9
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

    def __init__(self, backbone: PolylineBackbone | TimmFeatures) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        """Images (B, in_chans, height, width) to one tensor per stage, finest first."""
        if isinstance(self.backbone, TimmFeatures):
            return tuple(self.backbone(image))
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
