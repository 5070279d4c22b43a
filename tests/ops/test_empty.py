"""Empty batches give empty results and gradients, as PyTorch's own operators do; empty grids are refused."""

import functools

import pytest
import torch

import ppma
from ppma.ops import depthwise, rotary

BACKENDS = ["reference", "torch", "auto", pytest.param("native", marks=pytest.mark.native)]
ATTENTIONS = {
    "attention-hadamard": functools.partial(ppma.polyline_attention, combine="hadamard"),
    "attention-logit": functools.partial(ppma.polyline_attention, combine="logit"),
    "criss-cross-hadamard": functools.partial(ppma.criss_cross_attention, combine="hadamard"),
    "criss-cross-logit": functools.partial(ppma.criss_cross_attention, combine="logit"),
    "linear": ppma.linear_attention,
    "decomposed": ppma.decomposed_attention,
}


def leaves(*shapes):
    return [torch.zeros(shape).requires_grad_() for shape in shapes]


def assert_empty(out, tensors):
    """The output is empty; gradients have the shapes of their tensors and are 0 where these are not empty."""
    assert out.numel() == 0
    grads = torch.autograd.grad(out.sum(), tensors)
    for grad, tensor in zip(grads, tensors, strict=True):
        assert grad.shape == tensor.shape
        assert not grad.any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("paths", ["v2h", "2d"])
@pytest.mark.parametrize("batch", [(0, 2), (2, 0), (0, 0), (0,), (3, 0, 2)], ids=str)
@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention_empty_batch(name, batch, paths, backend):
    grid = (3, 4)
    tensors = leaves((*batch, *grid, 5), (*batch, *grid, 5), (*batch, *grid, 6), (*batch, *grid), (*batch, *grid))
    out = ATTENTIONS[name](*tensors, paths=paths, backend=backend)
    assert out.shape == (*batch, *grid, 6)
    assert_empty(out, tensors)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention_empty_batch_broadcast_decays(name, backend):
    tensors = leaves((0, 2, 3, 4, 5), (0, 2, 3, 4, 5), (0, 2, 3, 4, 6), (3, 4), (1, 2, 3, 4))
    assert_empty(ATTENTIONS[name](*tensors, backend=backend), tensors)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("paths", ["forward", "reverse", "both"])
@pytest.mark.parametrize("batch", [(0, 2), (2, 0), (0,)], ids=str)
@pytest.mark.parametrize("grid", [(5,), (3, 4), (2, 3, 4)], ids=str)
def test_scan_empty_batch(grid, batch, paths, backend):
    tensors = leaves((*batch, *grid, 3), *((*batch, *grid) for _ in grid))
    out = ppma.polyline_scan_nd(tensors[0], tensors[1:], paths=paths, backend=backend)
    assert out.shape == tensors[0].shape
    assert_empty(out, tensors)


@pytest.mark.native
@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("name", ["attention-hadamard", "attention-logit", "criss-cross-logit", "linear"])
def test_empty_batch_on_several_threads(name, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        tensors = leaves(*((0, 2, 3, 4, 5),) * 3, *((0, 2, 3, 4),) * 2)
        assert_empty(ATTENTIONS[name](*tensors, backend="native"), tensors)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("with_base", [False, True])
@pytest.mark.parametrize("size", [3, 5])
def test_depthwise_empty_batch(size, with_base, gelu):
    x, weight, bias, base = leaves((0, 3, 4, 8), (8, 1, size, size), (8,), (0, 3, 4, 8))
    tensors = [x, weight, bias, *([base] if with_base else [])]
    assert_empty(depthwise.depthwise_conv(*tensors, gelu=gelu), tensors)


def test_rotary_empty_batch():
    (packed,) = leaves((0, 12, 3 * 2 * 4))
    angles = torch.zeros(12, 2)
    q, k, v = rotary.rotary_split(packed, 2, angles, angles)
    assert q.shape == k.shape == v.shape == (0, 12, 2, 4)
    assert_empty(torch.cat([q, k, v]), [packed])


@pytest.mark.parametrize("backend", ["torch", pytest.param("native", marks=pytest.mark.native)])
@pytest.mark.parametrize("shape", [(1, 0, 4, 5), (1, 3, 0, 5), (1, 3, 4, 0)], ids=str)
@pytest.mark.parametrize("name", ATTENTIONS)
def test_functions_empty_grid_or_channels(name, shape, backend):
    q, decay = torch.zeros(shape), torch.zeros(shape[:-1])
    with pytest.raises(ValueError, match="at least one"):
        ATTENTIONS[name](q, q, q, decay, decay, backend=backend)


@pytest.mark.native
@pytest.mark.parametrize("shape", [(1, 2, 0, 4, 5), (1, 2, 3, 0, 5), (1, 2, 3, 4, 0)], ids=str)
def test_native_operators_empty_grid_or_channels(shape):
    """Called as `torch.ops.ppma.*`, where no argument was checked before; a kernel would divide by zero."""
    x, decay = torch.zeros(shape), torch.zeros(shape[:-1])
    calls = [
        lambda: torch.ops.ppma.polyline_scan(x, [decay, decay], "both", "native"),
        lambda: torch.ops.ppma.polyline_scan_backward(x, x, [decay, decay], "both", "native"),
        lambda: torch.ops.ppma.polyline_attention(x, x, x, decay, decay, "logit", "2d", 1.0, "native"),
        lambda: torch.ops.ppma.criss_cross_attention_backward(x, x, x, x, decay, decay, "logit", "2d", 1.0, "native"),
        lambda: torch.ops.ppma.linear_attention(x, x, x, decay, decay, "2d", "native"),
        lambda: torch.ops.ppma.linear_attention_backward(x, x, x, x, decay, decay, "2d", "native"),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="at least one token and channel"):
            call()
