"""Models as files for other runtimes: torch.export programs and ONNX."""

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ppma.atomic import write_atomically
from ppma.models.backbone import PolylineBackbone
from ppma.ops import decompositions

OPSET = 20  # the first that has GELU
NEWEST_OPSET = 23
LARGEST = 8192  # the exporter wants a bound on open sizes
_ONE_GRID = ("cross", "hilbert")  # masks whose scans are laid out for the grid of the example


def backbone_in(model: nn.Module) -> PolylineBackbone:
    """The backbone that a model is, or has inside."""
    found = next((module for module in model.modules() if isinstance(module, PolylineBackbone)), None)
    if found is None:
        raise ValueError(f"model: expected a PolylineBackbone or a model around one, got {type(model).__name__}")
    return found


def check_size(model: nn.Module, size: tuple[int, int], *, dynamic: bool) -> None:
    """Refuse sizes that cannot be exported; arguments as in `export_program`."""
    backbone = backbone_in(model)
    if min(size) < 1 or max(size) > LARGEST:
        raise ValueError(f"size: expected 1 to {LARGEST} pixels, got {size[0]} x {size[1]}")
    if not dynamic:
        return
    stride = _stride(backbone)
    if backbone.config.mask in _ONE_GRID:
        raise ValueError(f"dynamic: expected False for mask={backbone.config.mask!r}, which is made for one grid")
    if min(size) <= stride:
        raise ValueError(f"size: expected more than {stride} x {stride} to leave it open, got {size[0]} x {size[1]}")


def _stride(backbone: PolylineBackbone) -> int:
    return int(backbone.feature_info[-1]["reduction"])


def export_program(
    model: nn.Module, size: tuple[int, int] | None = None, *, dynamic: bool = True
) -> torch.export.ExportedProgram:
    """Capture a model's evaluation as a graph, in which attention is an operator of `torch.ops.ppma`.

    Args:
        model: a backbone, or a model around one that takes a batch of images; is put into evaluation mode.
        size: (height, width) of the example image; that of the backbone's `pretrained_cfg` if None.
        dynamic: leave batch, height and width open. Heights and widths must then be larger than the stride of the last
            stage (32; 16 for `ppma_nano`); the masks "cross" and "hilbert" are made for one grid and refuse.

    Returns:
        A program that takes images (B, in_chans, height, width) and returns what the model does, class scores
        (B, num_classes) for a classifier.
    """
    backbone = backbone_in(model)
    height, width = size or backbone.pretrained_cfg["input_size"][1:]
    check_size(model, (height, width), dynamic=dynamic)
    shapes = (_open_sizes(_stride(backbone) + 1),) if dynamic else None
    # Two images: a batch of one would be taken for a constant.
    image = torch.randn(2 if dynamic else 1, backbone.config.in_chans, height, width)
    return torch.export.export(model.eval(), (image,), dynamic_shapes=shapes, strict=False)


def _open_sizes(smallest: int) -> dict[int, Any]:
    extents = {axis: torch.export.Dim(name, min=smallest, max=LARGEST) for axis, name in ((2, "height"), (3, "width"))}
    return {0: torch.export.Dim("batch", min=1, max=LARGEST), **extents}


def check_opset(opset: int) -> None:
    """Refuse versions that lack an operator."""
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
    """Write an ONNX file with the input "image"; attention becomes its dense form.

    Args:
        model: as in `export_program`.
        path: of the file, which holds the weights too.
        size: as in `export_program`.
        dynamic: as in `export_program`.
        opset: version of the ONNX operators, 20 or later.
        outputs: names of what the model returns.
    """
    check_opset(opset)
    program = export_program(model, size, dynamic=dynamic).run_decompositions(
        {**decompositions.table(), torch.ops.aten.adaptive_avg_pool2d.default: _adaptive_average}
    )
    stride = _stride(backbone_in(model))
    onnx = torch.onnx.export(
        program,
        dynamic_shapes=(_open_sizes(stride + 1),) if dynamic else None,  # only names the axes here
        input_names=["image"],
        output_names=list(outputs),
        opset_version=opset,
        optimize=False,  # minutes for open sizes; runtimes optimise when they load
        verbose=False,
    )
    assert onnx is not None
    write_atomically(Path(path), onnx.model_proto.SerializeToString())


def save_program(program: torch.export.ExportedProgram, path: str | Path) -> None:
    """Write a program as `torch.export.save` does; a file of that name is replaced when the new one is complete."""
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    write_atomically(Path(path), buffer.getbuffer())


class StageFeatures(nn.Module):
    """A backbone that returns the features of its stages, (B, C, H, W) each, instead of class scores.

    Args:
        backbone: takes the images.
    """

    def __init__(self, backbone: PolylineBackbone) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        """Images (B, in_chans, height, width) to one tensor for each stage, finest first."""
        features = self.backbone.forward_intermediates(image, intermediates_only=True)
        assert isinstance(features, list)
        return tuple(features)


def _adaptive_average(x: Tensor, output_size: Sequence[int]) -> Tensor:
    """Adaptive average pooling as two matrix products, which hold for symbolic sizes too: ONNX has no such operator."""
    rows, columns = (_bins(x.shape[axis], bins, x) for axis, bins in ((-2, output_size[0]), (-1, output_size[1])))
    return rows @ x @ columns.mT


def _bins(extent: int, bins: int, like: Tensor) -> Tensor:
    """(bins, extent), whose row i takes the mean from floor(i n / bins) up to ceil((i + 1) n / bins), n the extent."""
    position = torch.arange(extent, device=like.device)
    index = torch.arange(bins, device=like.device)[:, None]
    inside = (position >= index * extent // bins) & (position < ((index + 1) * extent + bins - 1) // bins)
    inside = inside.to(like.dtype)
    return inside / inside.sum(-1, keepdim=True)


def onnx_differences(model: nn.Module, path: str | Path, sizes: Sequence[tuple[int, int]]) -> list[float]:
    """How far an ONNX file's outputs in onnxruntime are from the model's, for one image of each size.

    Returns:
        For each size, the largest difference over the largest output.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # it warns of every constant that it does not fold
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def run(image: Tensor) -> list[Tensor]:
        return [torch.from_numpy(out) for out in session.run(None, {"image": image.numpy()})]

    return _differences(model, run, sizes)


def program_differences(model: nn.Module, path: str | Path, sizes: Sequence[tuple[int, int]]) -> list[float]:
    """The same for a file of `torch.export.save`."""
    return _differences(model, torch.export.load(path).module(), sizes)


@torch.no_grad()
def _differences(model: nn.Module, run: Callable[[Tensor], Any], sizes: Sequence[tuple[int, int]]) -> list[float]:
    differences = []
    for size in sizes:
        image = torch.randn(1, backbone_in(model).config.in_chans, *size)
        pairs = zip(_tensors(run(image)), _tensors(model(image)), strict=True)
        differences.append(max((ours - eager).abs().max().item() / eager.abs().max().item() for ours, eager in pairs))
    return differences


def _tensors(outputs: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
    return [outputs] if isinstance(outputs, Tensor) else outputs
