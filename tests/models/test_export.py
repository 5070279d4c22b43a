"""Compiled, exported and ONNX models compute what the eager model computes."""

import onnx
import pytest
import timm
import torch

from ppma.models import CONFIGS, BackboneConfig, PolylineBackbone
from ppma.models.export import OPSET, export_onnx, export_program, onnx_differences

# One block of each kind: quick enough for the ordinary suite. The published models take minutes together.
SMALL = BackboneConfig(
    depths=(1, 1),
    dims=(32, 64),
    heads=(2, 2),
    kinds=("criss_cross", "full"),
    ffn_ratios=(2.0, 2.0),
    layer_scale=(None, 0.5),
    fixed_decay_spans=(4.0, 6.0),
    head_width=64,
    num_classes=10,
)
QUICK = {
    "paper": SMALL,
    "release": SMALL.replace(formulation="release"),
    "rmt": SMALL.replace(mask="rmt", formulation="release"),
}
CASES = [
    *(pytest.param(config, id=name) for name, config in QUICK.items()),
    *(pytest.param(config, id=name, marks=pytest.mark.slow) for name, config in CONFIGS.items()),
]
SIZES = [(64, 96), (70, 45)]


def build(config):
    """A model whose outputs are of the order of 1."""
    torch.manual_seed(0)
    model = PolylineBackbone(config).eval()
    if model.config.num_classes:
        torch.nn.init.normal_(model.head.fc.weight)
    return model


def tolerance(expected):
    # different orders of summation in float32, through tens of layers
    return 1e-5 * max(1.0, expected.abs().max().item())


@pytest.mark.parametrize("config", CASES)
def test_compile_fullgraph(config):
    model = build(config.replace(drop_path_rate=0.0)).train()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    image = torch.randn(2, 3, 40, 56)
    runs = []
    for function in (compiled, model):
        model.zero_grad()
        out = function(image)
        out.square().mean().backward()
        runs.append([out.detach(), *(parameter.grad.clone() for parameter in model.parameters())])
    scale = max(gradient.abs().max() for gradient in runs[1][1:])
    assert (runs[0][0] - runs[1][0]).abs().max() < tolerance(runs[1][0])
    assert all((a - b).abs().max() < 1e-5 * scale for a, b in zip(runs[0][1:], runs[1][1:], strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ppma_nano", "rmt_tiny"])
def test_compile_inductor(name):
    model = build(CONFIGS[name])
    image = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        expected = model(image)
        assert (torch.compile(model, fullgraph=True)(image) - expected).abs().max() < tolerance(expected)


@pytest.mark.parametrize("config", CASES)
@torch.no_grad()
def test_export_program_dynamic(config, tmp_path):
    model = build(config)
    program = export_program(model, SIZES[0])
    torch.export.save(program, tmp_path / "model.pt2")
    again = torch.export.load(tmp_path / "model.pt2").module()
    for batch, size in ((2, SIZES[0]), (1, SIZES[1]), (3, (33, 64))):
        image = torch.randn(batch, 3, *size)
        expected = model(image)
        assert (again(image) - expected).abs().max() < tolerance(expected)


@pytest.mark.parametrize("config", [case for case in CASES if case.id != "release"])
@torch.no_grad()
def test_export_onnx_dynamic(config, tmp_path):
    model, path = build(config), tmp_path / "model.onnx"
    export_onnx(model, path, SIZES[0])
    graph = onnx.load(path)
    assert [opset.version for opset in graph.opset_import if opset.domain == ""] == [OPSET]
    axes = [d.dim_param or d.dim_value for d in graph.graph.input[0].type.tensor_type.shape.dim]
    assert axes == ["batch", 3, "height", "width"]
    # float32 in another order of summation, through tens of layers
    assert max(onnx_differences(model, path, [*SIZES, (224, 224)])) < 1e-5


@torch.no_grad()
def test_export_program_static():
    model = build(QUICK["paper"].replace(mask="hilbert"))
    with pytest.raises(ValueError, match="dynamic: expected False for mask='hilbert'"):
        export_program(model)
    image = torch.randn(1, 3, 40, 48)
    torch.testing.assert_close(export_program(model, (40, 48), dynamic=False).module()(image), model(image))


def test_export_wrong_arguments(tmp_path):
    model = build(QUICK["paper"])
    with pytest.raises(ValueError, match="opset: expected 20 to 23, got 17"):
        export_onnx(model, tmp_path / "model.onnx", opset=17)
    with pytest.raises(ValueError, match="size: expected more than 8 x 8"):
        export_program(model, (64, 8))


@torch.no_grad()
def test_export_program_features():
    model = timm.create_model("ppma_nano", features_only=True, depths=(1, 1, 1, 1)).eval()
    image = torch.randn(1, 3, 48, 64)
    exported = torch.export.export(model, (image,)).module()
    for ours, theirs in zip(exported(image), model(image), strict=True):
        torch.testing.assert_close(ours, theirs)
