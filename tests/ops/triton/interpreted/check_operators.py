"""The kernels as PyTorch operators: fake kernels, autograd, compile, autocast, vmap, and what is refused."""

import functools

import pytest
import torch
from triton_cases import DEVICE, attention_inputs

import ppma
from ppma.ops import torch_ops  # noqa: F401  (defines torch.ops.ppma)
from ppma.ops.options import ND_PATHS

SOFTMAX = ("hadamard", "2d", 0.35, "triton")
CALLS = {
    "scan": (torch.ops.ppma.polyline_scan.default, lambda q, k, v, a, b: (v, [b, a], ND_PATHS["2d"], "triton")),
    "attention": (torch.ops.ppma.polyline_attention.default, lambda *tensors: (*tensors, *SOFTMAX)),
    "logit": (torch.ops.ppma.polyline_attention.default, lambda *tensors: (*tensors, "logit", *SOFTMAX[1:])),
    "criss_cross": (torch.ops.ppma.criss_cross_attention.default, lambda *tensors: (*tensors, *SOFTMAX)),
    "linear": (torch.ops.ppma.linear_attention.default, lambda *tensors: (*tensors, "2d", "triton")),
}


@pytest.mark.parametrize("name", CALLS)
def test_opcheck(name):
    operator, arguments = CALLS[name]
    inputs = [tensor.detach().requires_grad_() for tensor in attention_inputs((2, 3))]
    torch.library.opcheck(
        operator, arguments(*inputs), test_utils=("test_schema", "test_faketensor", "test_autograd_registration")
    )


def test_compiled():
    function = functools.partial(ppma.polyline_attention, backend="triton")
    inputs = [tensor.detach().requires_grad_() for tensor in attention_inputs((2, 3))]
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    out, expected = compiled(*inputs), function(*inputs)
    torch.testing.assert_close(out, expected)
    grads = torch.autograd.grad(out.sum(), inputs)
    for grad, reference in zip(grads, torch.autograd.grad(expected.sum(), inputs), strict=True):
        torch.testing.assert_close(grad, reference)


def test_autocast_takes_values_to_half_and_leaves_decays():
    inputs = attention_inputs((2, 3))
    with torch.autocast(DEVICE, torch.bfloat16):
        out = ppma.polyline_attention(*inputs, backend="triton")
    halves = [tensor.bfloat16() for tensor in inputs[:3]]
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, ppma.polyline_attention(*halves, *inputs[3:], backend="triton"))


def test_vmap():
    inputs = attention_inputs((2, 3), batch=2)
    function = functools.partial(ppma.polyline_attention, backend="triton")
    torch.testing.assert_close(torch.vmap(function)(*inputs), function(*inputs))


def test_layout_of_results():
    """Outputs and gradients lie in memory as (B, H, W, heads, channels)."""
    inputs = [tensor.detach().requires_grad_() for tensor in attention_inputs((2, 3), heads=2)]
    out = ppma.criss_cross_attention(*inputs, backend="triton")
    grads = torch.autograd.grad(out.sum(), inputs[:3])
    assert all(tensor.movedim(1, -2).is_contiguous() for tensor in (out, *grads))


def test_nan_in_a_log_decay_shows():
    q, k, v, log_alpha, log_beta = attention_inputs((2, 3))
    log_alpha[..., 0, 2] = torch.nan
    for function in (ppma.polyline_attention, ppma.criss_cross_attention, ppma.linear_attention):
        assert function(q, k, v, log_alpha, log_beta, backend="triton").isnan().any()


@pytest.mark.parametrize("function", [ppma.polyline_attention, ppma.criss_cross_attention, ppma.linear_attention])
def test_heads_too_wide_are_left_to_torch_in_both_passes(function):
    """What the forward pass of one backend saved is nothing for the backward pass of another."""
    inputs = attention_inputs((2, 3), d=130)
    with pytest.raises(ppma.BackendUnavailableError, match="up to 128 channels, not 130"):
        backward_of(function, inputs)


def backward_of(function, inputs):
    """The Triton backward pass alone, with what the torch backend saved."""
    grad = torch.ones_like(inputs[2])
    if function is ppma.linear_attention:
        return torch.ops.ppma.linear_attention_backward(grad, *inputs, "2d", "triton")
    if function is ppma.criss_cross_attention:
        return torch.ops.ppma.criss_cross_attention_backward(grad, *inputs, *SOFTMAX)
    saved = torch.ops.ppma.polyline_attention(*inputs, *SOFTMAX[:-1], "torch")
    return torch.ops.ppma.polyline_attention_backward(grad, *inputs, *saved, *SOFTMAX)


@pytest.mark.skipif(DEVICE != "cpu", reason="`ppma doctor --gpu` has tensors of that size")
def test_offsets_beyond_32_bits(tmp_path):
    """Rows 2^30 elements apart, in a file that takes no room."""
    q, k, v, log_alpha, log_beta = attention_inputs((3, 2), torch.float16)
    storage = torch.from_file(str(tmp_path / "sparse"), shared=True, size=2**31 + 2**10, dtype=torch.float16)
    far = storage.as_strided(v.shape, (0, 0, 2**30, v.shape[-1], 1)).copy_(v)
    for function in (ppma.polyline_attention, ppma.criss_cross_attention):
        expected = function(q, k, v, log_alpha, log_beta, backend="triton")
        assert function(q, k, far, log_alpha, log_beta, backend="triton").equal(expected)
    scanned = ppma.polyline_scan(far, log_alpha, log_beta, backend="triton")
    assert scanned.equal(ppma.polyline_scan(v, log_alpha, log_beta, backend="triton"))


def test_refusals():
    inputs = attention_inputs((2, 3), torch.float64)
    with pytest.raises(ppma.BackendUnavailableError, match="float16, bfloat16 and float32"):
        ppma.polyline_attention(*inputs, backend="triton")
    for function in (ppma.polyline_attention, ppma.criss_cross_attention, ppma.linear_attention):
        with pytest.raises(ppma.BackendUnavailableError, match="up to 128 channels, not 130"):
            function(*attention_inputs((2, 3), d=130), backend="triton")
