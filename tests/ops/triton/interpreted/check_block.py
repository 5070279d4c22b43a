"""The operations of a block around the attention: rotary split, decay head and depthwise convolution."""

import functools
import math

import pytest
import torch
from triton_cases import DEVICE, HALF

import ppma
from ppma.ops import backends, depthwise, rotary
from ppma.ops.backends import pytorch
from ppma.ops.decay_head import decay_head, tapped_decay_head
from ppma.testing import assert_accurate, outputs_and_gradients


def packed_inputs(tokens, heads, d, dtype=torch.float32, batch=2):
    generator = torch.Generator().manual_seed(0)
    packed = torch.randn(batch, tokens, 3 * heads * d, generator=generator).to(DEVICE, dtype)
    angles = 3 * torch.randn(tokens, d // 2, generator=generator).to(DEVICE)
    return packed, angles.cos(), angles.sin()


def split(packed, cos, sin, heads, backend, overwrite=False):
    """All three results in one, so that each has its part of a random gradient."""
    return torch.cat(rotary.rotary_split(packed, heads, cos, sin, overwrite=overwrite, backend=backend), -1)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize(("tokens", "heads", "d"), [(1, 1, 2), (35, 3, 6), (130, 2, 16), (7, 5, 32)])
def test_rotary_accuracy(tokens, heads, d, dtype):
    """One tile and several, channels that fill a tile and that do not."""
    packed, cos, sin = packed_inputs(tokens, heads, d, dtype)
    fast = functools.partial(split, cos=cos, sin=sin, heads=heads, backend="triton")
    exact = functools.partial(split, cos=cos.double(), sin=sin.double(), heads=heads, backend="torch")
    assert_accurate(fast, exact, [packed], 8)


def test_rotary_strides():
    """Packed values and gradients of any strides."""
    packed, cos, sin = packed_inputs(6, 2, 8)
    strided = packed.mT.contiguous().mT
    assert strided.stride(-1) != 1
    cos, sin = cos.mT.contiguous().mT, sin.mT.contiguous().mT
    q, k, v = rotary.rotary_split(strided.requires_grad_(), 2, cos, sin, backend="triton")
    for one, other in zip((q, k, v), rotary.rotary_split(packed, 2, cos, sin, backend="torch"), strict=True):
        torch.testing.assert_close(one, other)
    expanded = torch.ones((), device=DEVICE).expand(q.shape)
    transposed = torch.randn(q.transpose(1, 2).shape, device=DEVICE).transpose(1, 2)
    (grad,) = torch.autograd.grad((q, k), strided, (expanded, transposed))  # that of v is absent
    leaf = packed.detach().requires_grad_()
    q, k, _ = rotary.rotary_split(leaf, 2, cos, sin, backend="torch")
    torch.testing.assert_close(grad, *torch.autograd.grad((q, k), leaf, (expanded, transposed)))


def test_rotary_overwrite_in_place():
    packed, cos, sin = packed_inputs(6, 2, 8)
    expected = rotary.rotary_split(packed.clone(), 2, cos, sin, backend="triton")
    kept = packed.clone()
    rotary.rotary_split(packed, 2, cos, sin, backend="triton")
    assert packed.equal(kept)
    q, k, v = rotary.rotary_split(packed, 2, cos, sin, overwrite=True, backend="triton")
    storage = packed.untyped_storage().data_ptr()
    assert all(tensor.untyped_storage().data_ptr() == storage for tensor in (q, k, v))
    assert all(one.equal(other) for one, other in zip((q, k, v), expected, strict=True))


def decay_inputs(tokens, heads, d, outputs, rate, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, tokens, heads * d), (outputs, d), (heads, outputs), *([(heads, outputs)] if rate else [])]
    return [torch.randn(shape, generator=generator).to(DEVICE, dtype) for shape in shapes]


def decays(*tensors, softplus, backend):
    return torch.cat(decay_head(*tensors, softplus=softplus, backend=backend))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("tokens", "heads", "d", "outputs", "softplus"),
    [(1, 1, 1, 1, False), (35, 3, 20, 2, False), (9, 2, 16, 2, True), (140, 1, 16, 1, True)],
)
def test_decay_head_accuracy(tokens, heads, d, outputs, softplus, dtype):
    """Parameters stay in float32."""
    x, *parameters = decay_inputs(tokens, heads, d, outputs, softplus, dtype)
    fast, exact = (functools.partial(decays, softplus=softplus, backend=backend) for backend in ("triton", "torch"))
    # Gradients of parameters sum all tokens, logits all channels.
    assert_accurate(fast, exact, [x, *(p.float() for p in parameters)], 2 * tokens * heads + d + 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decay_head_tapped(dtype):
    """What other readers of x send back is part of its gradient; an output that nobody reads is not."""

    def read(x, *parameters, backend):
        tapped, (log_alpha, _) = tapped_decay_head(x, *parameters, softplus=True, backend=backend)
        return torch.cat((log_alpha.mT, tapped.square()), -1)

    x, *parameters = decay_inputs(35, 3, 20, 2, True, dtype)
    fast, exact = (functools.partial(read, backend=backend) for backend in ("triton", "torch"))
    assert_accurate(fast, exact, [x, *(p.float() for p in parameters)], 2 * 35 * 3 + 20 + 16)


def test_decay_head_softplus_small():
    """Far left softplus is exp: no digits are lost in a sum with 1."""
    x, weight, bias, rate = decay_inputs(3, 1, 16, 1, True)
    (found,) = decay_head(0 * x, weight, 0 * bias - 15.0, 0 * rate + 1.0, softplus=True, backend="triton")
    torch.testing.assert_close(found, torch.full_like(found, -math.log1p(math.exp(-15.0))), rtol=1e-6, atol=0.0)


def test_decay_head_nan_kept():
    x, weight, bias = decay_inputs(3, 1, 16, 1, False)
    x[0, 1, 2] = torch.nan
    (found,) = decay_head(x, weight, bias, backend="triton")
    assert found.isnan().sum() == 1


def conv_inputs(shape, kernel, residual=True, bias=True, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    x = 2 * torch.randn(shape, generator=generator)
    weight = torch.randn(shape[-1], 1, kernel, kernel, generator=generator)
    tensors = [x, weight]
    tensors += [torch.randn(shape[-1], generator=generator)] if bias else []
    tensors += [torch.randn(shape, generator=generator)] if residual else []
    return [tensor.to(DEVICE, dtype) for tensor in tensors]


def convolve(*tensors, gelu, bias, backend):
    x, weight, *others = tensors
    given = others.pop(0) if bias else None
    return depthwise.depthwise_conv(x, weight, given, *others, gelu=gelu, backend=backend)


def assert_convolution_accurate(shape, kernel, gelu, residual, bias, dtype=torch.float32):
    fast, exact = (
        functools.partial(convolve, gelu=gelu, bias=bias, backend=backend) for backend in ("triton", "torch")
    )
    inputs = conv_inputs(shape, kernel, residual, bias, dtype)
    # A tap's gradient sums all tokens; an output its taps; GELU and its slope take some 20 operations.
    assert_accurate(fast, exact, inputs, shape[0] * shape[1] * shape[2] + kernel * kernel + 32)


@pytest.mark.parametrize(
    ("shape", "kernel", "gelu", "residual", "bias"),
    [
        ((2, 3, 5, 32), 3, True, False, True),  # of the feed-forward
        ((1, 3, 4, 32), 5, False, True, True),  # of the attention
        ((1, 9, 9, 64), 3, False, False, True),  # several bands and tiles across
        ((1, 3, 1, 5), 5, True, True, False),  # channels that do not fill a block
        ((1, 1, 1, 80), 3, True, True, True),
    ],
)
def test_depthwise_accuracy(shape, kernel, gelu, residual, bias):
    assert_convolution_accurate(shape, kernel, gelu, residual, bias)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("kernel", [3, 5])
def test_depthwise_half_precision(kernel, dtype):
    assert_convolution_accurate((1, 2, 3, 16), kernel, True, False, True, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kernel", [3, 5])
@pytest.mark.parametrize("shape", [(2, 5, 6, 32), (1, 1, 9, 16), (3, 17, 1, 5), (1, 1, 1, 1), (1, 9, 34, 80)], ids=str)
def test_depthwise_every_combination(shape, kernel, bias, residual, gelu, dtype):
    assert_convolution_accurate(shape, kernel, gelu, residual, bias, dtype)


def test_depthwise_strides():
    """A slice of packed values, channels first, and an expanded gradient."""
    _, weight, bias = conv_inputs((1, 1, 1, 16), 3, residual=False)
    packed = torch.randn(1, 2, 3, 48, device=DEVICE)
    first = torch.randn(1, 16, 2, 3, device=DEVICE).movedim(1, -1)
    for x in (packed[..., 16:32], first):
        fast, exact = (
            outputs_and_gradients(functools.partial(depthwise.depthwise_conv, backend=backend), [x, weight, bias])
            for backend in ("triton", "torch")
        )
        for one, other in zip(fast, exact, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    x = packed.requires_grad_()
    grads = [
        torch.autograd.grad(
            depthwise.depthwise_conv(x, torch.ones(48, 1, 3, 3, device=DEVICE), None, backend=b).sum(), x
        )
        for b in ("triton", "torch")
    ]
    torch.testing.assert_close(*grads)


def test_depthwise_only_size_3_and_5():
    x, weight = conv_inputs((1, 3, 3, 4), 7, residual=False, bias=False)
    with pytest.raises(ppma.BackendUnavailableError, match="expected a depthwise kernel of size 3 or 5, got 7"):
        depthwise.depthwise_conv(x, weight, None, backend="triton")


def test_empty_batch():
    x, weight, bias = conv_inputs((0, 3, 4, 16), 3, residual=False)
    out, *grads = outputs_and_gradients(
        functools.partial(depthwise.depthwise_conv, backend="triton"), [x, weight, bias]
    )
    assert out.shape == x.shape
    assert all(not grad.any() for grad in grads)
    packed, cos, sin = packed_inputs(4, 2, 8, batch=0)
    assert split(packed, cos, sin, 2, "triton").shape == (0, 4, 2, 24)


@pytest.mark.parametrize("x_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("residual_dtype", [None, torch.bfloat16, torch.float32])
def test_depthwise_autocast_dtype(x_dtype, residual_dtype):
    """The dtypes of PyTorch, without its copies of the weights."""
    x, weight, bias, residual = conv_inputs((1, 3, 4, 16), 3)
    x, residual = x.to(x_dtype), None if residual_dtype is None else residual.to(residual_dtype)
    with torch.autocast(DEVICE, torch.bfloat16):
        results = [
            depthwise.depthwise_conv(x, weight, bias, residual, gelu=True, backend=backend)
            for backend in ("triton", "torch")
        ]
    assert results[0].dtype == results[1].dtype
    torch.testing.assert_close(results[0].float(), results[1].float(), rtol=0.05, atol=0.3)


def test_composition_where_kernels_cannot_run():
    """Captured graphs, transforms and forward mode."""
    x, weight, bias = conv_inputs((1, 3, 4, 16), 3, residual=False)
    function = functools.partial(depthwise.depthwise_conv, gelu=True, backend="triton")
    assert backends.kernels_serve("triton", "depthwise_conv", x)
    expected = function(x, weight, bias)
    compiled = torch.compile(function, backend="eager", fullgraph=True)(x, weight, bias)
    mapped = torch.vmap(lambda one: function(one[None], weight, bias)[0])(x)
    _, tangent = torch.func.jvp(lambda b: function(x, weight, b), (bias,), (torch.ones_like(bias),))
    torch.testing.assert_close(compiled, expected)
    torch.testing.assert_close(mapped, expected)
    torch.testing.assert_close(tangent, torch.ones_like(expected))


@pytest.mark.parametrize("gelu", [False, True])
def test_without_gradient_nothing_saved(gelu):
    x, weight, bias = conv_inputs((1, 3, 4, 16), 3, residual=False)
    out = depthwise.depthwise_conv(x, weight, bias, gelu=gelu, backend="triton")
    assert out.grad_fn is None
    torch.testing.assert_close(out, pytorch.depthwise_conv(x, weight, bias, None, gelu), rtol=1e-5, atol=1e-4)
