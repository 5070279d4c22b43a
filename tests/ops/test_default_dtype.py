"""The default dtype of torch has no say in what is computed: the same bits under every one."""

import contextlib
import functools

import pytest
import timm
import torch

import ppma
from ppma.ops import depthwise, rotary
from ppma.testing import outputs_and_gradients, random_log_decay

DTYPES = [torch.float16, torch.bfloat16, torch.float64]
BACKENDS = ["torch", "auto", pytest.param("native", marks=pytest.mark.native)]
GENERATOR = torch.Generator().manual_seed(0)
GRID = (3, 5)
VALUES = [torch.randn(2, 2, *GRID, channels, generator=GENERATOR) for channels in (4, 4, 6)]
DECAYS = [random_log_decay(2, 2, *GRID, generator=GENERATOR) for _ in range(2)]
ATTENTION = [*VALUES, *DECAYS]


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def scan_of(axes):
    """x (2, *grid, 6) and a log-decay for each axis."""
    grid = (2, 3, 4)[:axes]
    tensors = [torch.randn(2, *grid, 6, generator=GENERATOR)]
    return tensors + [random_log_decay(2, *grid, generator=GENERATOR) for _ in grid]


def scan(x, *log_decays, backend):
    return ppma.polyline_scan_nd(x, log_decays, backend=backend)


OPERATORS = {
    "attention-hadamard": (functools.partial(ppma.polyline_attention, combine="hadamard"), ATTENTION),
    "attention-logit": (functools.partial(ppma.polyline_attention, combine="logit"), ATTENTION),
    "criss-cross-hadamard": (functools.partial(ppma.criss_cross_attention, combine="hadamard"), ATTENTION),
    "criss-cross-logit": (functools.partial(ppma.criss_cross_attention, combine="logit"), ATTENTION),
    "linear": (ppma.linear_attention, ATTENTION),
    "scan-1d": (scan, scan_of(1)),
    "scan-2d": (scan, scan_of(2)),
    "scan-3d": (scan, scan_of(3)),
}


def assert_same_bits(run, dtype):
    expected = run()
    with default_dtype(dtype):
        results = run()
    for result, wanted in zip(results, expected, strict=True):
        assert result.dtype == wanted.dtype
        assert torch.equal(result, wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", OPERATORS)
def test_operator_under_default_dtype(name, backend, dtype):
    operator, inputs = OPERATORS[name]
    assert_same_bits(lambda: outputs_and_gradients(functools.partial(operator, backend=backend), inputs), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPERATORS)
def test_half_precision_values_under_default_dtype(name, dtype):
    operator, inputs = OPERATORS[name]
    halves = [tensor.bfloat16() if tensor.dim() == inputs[0].dim() else tensor for tensor in inputs]
    assert_same_bits(lambda: outputs_and_gradients(functools.partial(operator, backend="auto"), halves), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gelu", [False, True])
def test_depthwise_under_default_dtype(gelu, dtype):
    x, base = torch.randn(2, 2, 4, 5, 8, generator=GENERATOR)
    inputs = [x, torch.randn(8, 1, 3, 3, generator=GENERATOR), torch.randn(8, generator=GENERATOR), base]
    assert_same_bits(
        lambda: outputs_and_gradients(functools.partial(depthwise.depthwise_conv, gelu=gelu), inputs), dtype
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotary_under_default_dtype(dtype):
    packed = torch.randn(2, 6, 3 * 2 * 8, generator=GENERATOR)
    angles = torch.rand(6, 4, generator=GENERATOR)

    def split(packed):
        return torch.cat(rotary.rotary_split(packed, 2, angles.cos(), angles.sin()))

    assert_same_bits(lambda: outputs_and_gradients(split, [packed]), dtype)


def logits_and_gradients(model, images):
    model.zero_grad()
    logits = model(images)
    logits.square().sum().backward()
    return [logits.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("formulation", ["paper", "release"])
def test_model_under_default_dtype_set_after_construction(formulation, dtype):
    torch.manual_seed(0)
    model = timm.create_model("ppma_nano", num_classes=10, formulation=formulation).eval()
    images = torch.randn(2, 3, 32, 32)
    assert_same_bits(lambda: logits_and_gradients(model, images), dtype)


@pytest.mark.parametrize("formulation", ["paper", "release"])
def test_model_constructed_under_default_dtype_float64(formulation):
    """All of it is float64, and it is the float32 model with the same weights to float32 precision."""
    torch.manual_seed(0)
    with default_dtype(torch.float64):
        wide = timm.create_model("ppma_nano", num_classes=10, formulation=formulation).eval()
        assert {parameter.dtype for parameter in wide.parameters()} == {torch.float64}
        images = torch.randn(2, 3, 32, 32)
        results = logits_and_gradients(wide, images)
    assert {result.dtype for result in results} == {torch.float64}
    single = timm.create_model("ppma_nano", num_classes=10, formulation=formulation).eval()
    single.load_state_dict(wide.state_dict())
    torch.testing.assert_close(single(images.float()), results[0].float(), rtol=1e-3, atol=1e-4)
