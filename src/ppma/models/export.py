"""Backbones as files for other runtimes: torch.export programs and ONNX."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ppma.models.backbone import PolylineBackbone
from ppma.ops import decompositions

OPSET = 20  # the first that has GELU
_LARGEST = 8192  # the exporter wants a bound on open sizes
_ONE_GRID = ("cross", "hilbert")  # masks whose scans are laid out for the grid of the example


def export_program(
    model: PolylineBackbone, size: tuple[int, int] | None = None, *, dynamic: bool = True
) -> torch.export.ExportedProgram:
    """Capture a backbone's evaluation as a graph, in which attention is an operator of `torch.ops.ppma`.

    Args:
        model: is put into evaluation mode.
        size: (height, width) of the example image; that of the model's `pretrained_cfg` if None.
        dynamic: leave batch, height and width open. Heights and widths must then be larger than the stride of the last
            stage (32; 16 for `ppma_nano`); the masks "cross" and "hilbert" are made for one grid and refuse.

    Returns:
        A program that takes images (B, in_chans, height, width) and returns class scores (B, num_classes).
    """
    height, width = size or model.pretrained_cfg["input_size"][1:]
    stride = int(model.feature_info[-1]["reduction"])
    shapes = None
    if dynamic:
        if model.config.mask in _ONE_GRID:
            raise ValueError(f"dynamic: expected False for mask={model.config.mask!r}, which is made for one grid")
        if min(height, width) <= stride:
            raise ValueError(f"size: expected more than {stride} x {stride} to leave it open, got {height} x {width}")
        shapes = (_open_sizes(stride + 1),)
    # Two images: a batch of one would be taken for a constant.
    image = torch.randn(2 if dynamic else 1, model.config.in_chans, height, width)
    return torch.export.export(model.eval(), (image,), dynamic_shapes=shapes, strict=False)


def _open_sizes(smallest: int) -> dict[int, Any]:
    extents = {axis: torch.export.Dim(name, min=smallest, max=_LARGEST) for axis, name in ((2, "height"), (3, "width"))}
    return {0: torch.export.Dim("batch", min=1, max=_LARGEST), **extents}


def export_onnx(
    model: PolylineBackbone,
    path: str | Path,
    size: tuple[int, int] | None = None,
    *,
    dynamic: bool = True,
    opset: int = OPSET,
) -> None:
    """Write an ONNX file with the input "image" and the output "logits"; attention becomes its dense form.

    Args:
        model: as in `export_program`.
        path: of the file, which holds the weights too.
        size: as in `export_program`.
        dynamic: as in `export_program`.
        opset: version of the ONNX operators, 20 or later.
    """
    if opset < OPSET:
        raise ValueError(f"opset: expected at least {OPSET}, got {opset}")
    program = export_program(model, size, dynamic=dynamic).run_decompositions(decompositions.table())
    stride = int(model.feature_info[-1]["reduction"])
    onnx = torch.onnx.export(
        program,
        dynamic_shapes=(_open_sizes(stride + 1),) if dynamic else None,  # only names the axes here
        input_names=["image"],
        output_names=["logits"],
        opset_version=opset,
        optimize=False,  # minutes for open sizes; runtimes optimise when they load
        verbose=False,
    )
    assert onnx is not None
    onnx.save(path)


def onnx_differences(model: PolylineBackbone, path: str | Path, sizes: Sequence[tuple[int, int]]) -> list[float]:
    """How far an ONNX file's outputs in onnxruntime are from the model's, for one image of each size.

    Returns:
        For each size, the largest difference over the largest output.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # it warns of every constant that it does not fold
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def run(image: Tensor) -> Tensor:
        return torch.from_numpy(session.run(None, {"image": image.numpy()})[0])

    return _differences(model, run, sizes)


def program_differences(model: PolylineBackbone, path: str | Path, sizes: Sequence[tuple[int, int]]) -> list[float]:
    """The same for a file of `torch.export.save`."""
    return _differences(model, torch.export.load(path).module(), sizes)


@torch.no_grad()
def _differences(
    model: PolylineBackbone, run: Callable[[Tensor], Tensor], sizes: Sequence[tuple[int, int]]
) -> list[float]:
    differences = []
    for size in sizes:
        image = torch.randn(1, model.config.in_chans, *size)
        expected = model(image)
        differences.append(((run(image) - expected).abs().max() / expected.abs().max()).item())
    return differences
