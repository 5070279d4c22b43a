"""Compiled, exported and ONNX models compute what the eager model computes."""

import onnx
import onnxruntime
import pytest
import timm
import torch

from ppma.layers import PolylineAttention
from ppma.models import CONFIGS, BackboneConfig, PolylineBackbone
from ppma.models import export as exporting
from ppma.models.export import OPSET, export_onnx, export_program, image_inputs, onnx_differences

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
    inputs, shapes = image_inputs(model, SIZES[0])
    export_onnx(model, inputs, path, dynamic_shapes=shapes, input_names=["image"])
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
        export_onnx(model, torch.randn(1, 3, 64, 64), tmp_path / "model.onnx", opset=17)
    with pytest.raises(ValueError, match="size: expected more than 8 x 8"):
        export_program(model, (64, 8))


@torch.no_grad()
def test_export_program_features():
    model = timm.create_model("ppma_nano", features_only=True, depths=(1, 1, 1, 1)).eval()
    image = torch.randn(1, 3, 48, 64)
    exported = torch.export.export(model, (image,)).module()
    for ours, theirs in zip(exported(image), model(image), strict=True):
        torch.testing.assert_close(ours, theirs)


class Tokens(torch.nn.Module):
    """A module of somebody else's, with our attention and two inputs."""

    def __init__(self, **options):
        super().__init__()
        self.attention = PolylineAttention(16, heads=2, **options)

    def forward(self, tokens, bias):
        return self.attention(tokens, grid=(4, 3)) + bias


def run_onnx(path, *inputs):
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [node.name for node in session.get_inputs()]
    feed = {name: tensor.numpy() for name, tensor in zip(names, inputs, strict=True)}
    return [torch.from_numpy(out) for out in session.run(None, feed)]


@pytest.mark.parametrize(
    ("prefix", "options"),
    [
        (0, {}),
        (0, {"kind": "criss_cross", "rope": True, "local_kernel": 3}),
        (0, {"kind": "linear"}),
        (1, {}),
        (1, {"formulation": "release"}),
    ],
)
@torch.no_grad()
def test_export_onnx_own_module(prefix, options, tmp_path):
    torch.manual_seed(0)
    module, inputs = Tokens(**options).eval(), (torch.randn(2, prefix + 12, 16), torch.randn(16))
    export_onnx(module, inputs, tmp_path / "model.onnx")
    (out,) = run_onnx(tmp_path / "model.onnx", *inputs)
    torch.testing.assert_close(out, module(*inputs))


@torch.no_grad()
def test_register_torch_onnx(tmp_path):
    """torch.onnx.export itself, called by the user, with a dynamic batch."""
    exporting.register()
    exporting.register()  # once is enough, twice does no harm
    module, inputs = Tokens().eval(), (torch.randn(2, 13, 16), torch.randn(16))
    shapes = ({0: torch.export.Dim("batch", min=1, max=64)}, None)
    path = tmp_path / "model.onnx"
    torch.onnx.export(module, inputs, path, dynamic_shapes=shapes, dynamo=True, optimize=False, verbose=False)
    more = (torch.randn(5, 13, 16), inputs[1])
    torch.testing.assert_close(run_onnx(path, *more)[0], module(*more))


def test_export_dynamic_old_torch(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.8.0+cpu")
    with pytest.raises(ValueError, match=r"dynamic: expected torch 2.9 or newer for dynamic sizes, got 2.8.0\+cpu"):
        export_program(build(QUICK["paper"]), (64, 64))


@torch.no_grad()
def test_openvino(tmp_path):
    openvino = pytest.importorskip("openvino")
    model, image = build(QUICK["paper"]), torch.randn(1, 3, 48, 64)
    export_onnx(model, image, tmp_path / "model.onnx")
    compiled = openvino.Core().compile_model(tmp_path / "model.onnx", "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    out, expected = torch.from_numpy(compiled(image.numpy())[0]), model(image)
    assert (out - expected).abs().max() < tolerance(expected)
