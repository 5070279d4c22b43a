"""The operators under the transforms of `torch.func`, in forward mode and differentiated twice."""

import functools

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import ppma
from ppma.testing import random_log_decay

OPERATORS = {
    "scan": lambda q, k, v, a, b, **options: ppma.polyline_scan(v, a, b, **options),
    "scan_nd": lambda q, k, v, a, b, **options: ppma.polyline_scan_nd(v, [b, a], **options),
    "full": ppma.polyline_attention,
    "full_logit": functools.partial(ppma.polyline_attention, combine="logit"),
    "full_v2h": functools.partial(ppma.polyline_attention, combine="logit", paths="v2h"),
    "criss_cross": ppma.criss_cross_attention,
    "criss_cross_logit": functools.partial(ppma.criss_cross_attention, combine="logit"),
    "linear": ppma.linear_attention,
    "decomposed": ppma.decomposed_attention,
}
operators = pytest.mark.parametrize("operator", OPERATORS)


def inputs(*batch, grid=(3, 2), dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(*batch, *grid, c, generator=generator, dtype=dtype) for c in (2, 2, 3)]
    decays = [-2 * torch.rand(*batch, *grid, generator=generator, dtype=dtype) for _ in range(2)]
    return (*values, *decays)


def functions(operator):
    """The operator and its reference, each to a scalar that is not linear in the output."""
    return (lambda *t, b=backend: OPERATORS[operator](*t, backend=b).sin().sum() for backend in ("torch", "reference"))


def every_input(function):
    return functools.partial(function, argnums=(0, 1, 2, 3, 4))


def assert_same(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11)


@operators
@pytest.mark.parametrize("transform", [grad, jacrev])
def test_reverse_transforms(operator, transform):
    fast, exact = functions(operator)
    assert_same(every_input(transform)(fast)(*inputs(2)), every_input(transform)(exact)(*inputs(2)))


@operators
def test_vjp_native(operator):
    """In float32 on the native kernels: the same numbers as autograd gives."""
    tensors = [t.requires_grad_() for t in inputs(2, dtype=torch.float32)]
    out = OPERATORS[operator](*tensors, backend="native")
    expected = torch.autograd.grad(out, tensors, torch.ones_like(out), materialize_grads=True)
    plain = [t.detach() for t in tensors]
    function = functools.partial(OPERATORS[operator], backend="native")
    assert all(map(torch.equal, vjp(function, *plain)[1](torch.ones_like(out)), expected))


@operators
def test_vmap_of_grad(operator):
    fast, _ = functions(operator)
    tensors = inputs(3, 2)
    looped = [every_input(grad)(fast)(*(t[i] for t in tensors)) for i in range(3)]
    expected = tuple(torch.stack(parts) for parts in zip(*looped, strict=True))
    assert_same(vmap(every_input(grad)(fast))(*tensors), expected)
    shared = vmap(grad(fast), in_dims=(0, None, None, 0, None))(
        tensors[0], *(t[0] for t in tensors[1:3]), tensors[3], tensors[4][0]
    )
    assert_same(shared[1], grad(fast)(tensors[0][1], tensors[1][0], tensors[2][0], tensors[3][1], tensors[4][0]))


@operators
def test_jvp(operator):
    fast, exact = functions(operator)
    tensors, tangents = inputs(2), tuple(torch.ones_like(t) for t in inputs(2))
    assert_same(jvp(fast, tensors, tangents), jvp(exact, tensors, tangents))
    some = (*tensors[:4], tensors[4].detach())
    moved = jvp(lambda b: fast(*some[:4], b), (some[4],), (tangents[4],))
    assert_same(moved, jvp(lambda b: exact(*some[:4], b), (some[4],), (tangents[4],)))


@operators
def test_forward_ad(operator):
    fast, exact = functions(operator)
    results = []
    for function in (fast, exact):
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(t, torch.cos(t)) for t in inputs(2)]
            results.append(forward_ad.unpack_dual(function(*duals)).tangent)
    assert results[0] is not None
    assert_same(*results)


@operators
def test_second_derivatives(operator):
    tensors = [t.requires_grad_() for t in inputs(1, grid=(2, 2))]
    assert torch.autograd.gradgradcheck(functools.partial(OPERATORS[operator], backend="torch"), tensors)


@pytest.mark.parametrize("operator", ["full_logit", "criss_cross", "linear", "scan"])
@pytest.mark.parametrize(
    "transform", [hessian, lambda f: jacfwd(grad(f)), lambda f: grad(lambda x: grad(f)(x).sin().sum())]
)
def test_nested_transforms(operator, transform):
    fast, exact = functions(operator)
    q, k, v, a, b = inputs(grid=(2, 2))
    assert_same(transform(lambda a: fast(q, k, v, a, b))(a), transform(lambda a: exact(q, k, v, a, b))(a))
    assert_same(transform(lambda v: fast(q, k, v, a, b))(v), transform(lambda v: exact(q, k, v, a, b))(v))


@operators
def test_forward_mode_at_decays_0_and_1(operator):
    """No NaN where a decay is exactly 0 or 1, and the tangent of a finite difference."""
    generator = torch.Generator().manual_seed(3)
    q, k, v, *_ = inputs(2)
    a, b = (random_log_decay(2, 3, 2, generator=generator, dtype=torch.float64) for _ in range(2))
    fast, _ = functions(operator)
    direction = torch.randn(v.shape, generator=generator, dtype=torch.float64)
    _, tangent = jvp(lambda v: fast(q, k, v, a, b), (v,), (direction,))
    step = 1e-6
    difference = fast(q, k, v + step * direction, a, b) - fast(q, k, v - step * direction, a, b)
    torch.testing.assert_close(tangent, difference / (2 * step), rtol=1e-7, atol=1e-8)


def test_second_derivative_of_the_bare_operator_raises():
    q, k, v, a, b = (t.requires_grad_() for t in inputs(1, 1))
    out, *_ = torch.ops.ppma.polyline_attention(q, k, v, a, b, "hadamard", "2d", 1.0, "torch")
    (first,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivatives are not available"):
        first.sum().backward()
