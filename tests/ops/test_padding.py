"""Key-padding masks: `valid` in every backend, derivative and graph."""

import functools

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch.func import grad, jacrev, jvp, vmap

import ppma
from ppma.ops import backends, decompositions
from ppma.ops.backends.native import library
from ppma.testing import GRIDS, assert_accurate, outputs_and_gradients, random_log_decay

BACKENDS = ["torch", pytest.param("native", marks=pytest.mark.native)]
KINDS = [
    pytest.param(functools.partial(function, combine=combine), id=f"{name}-{combine}")
    for name, function in (("full", ppma.polyline_attention), ("criss-cross", ppma.criss_cross_attention))
    for combine in ("hadamard", "logit")
]
kinds = pytest.mark.parametrize("function", KINDS)


def inputs(grid, batch=(2, 2), dtype=torch.float32, seed=0, d=5, dv=3):
    """q, k, v, log-decays, and `valid` with a whole row, a whole column and the second image's corner missing."""
    generator = torch.Generator().manual_seed(seed)
    shape = (*batch, *grid)
    q, k, v = (torch.randn(*shape, c, generator=generator, dtype=torch.float64).to(dtype) for c in (d, d, dv))
    decay_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    decays = [random_log_decay(*shape, generator=generator, dtype=decay_dtype) for _ in range(2)]
    valid = torch.rand(*batch[:-1], *grid, generator=generator) < 0.7
    valid[..., -1, :] = False
    valid[..., :, 0] = False
    return (q, k, v, *decays), valid


def tokens(grid):
    return grid[0] * grid[1] + 2 * sum(grid) + 5 + 16


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("grid", "paths"), [*((grid, "2d") for grid in GRIDS), ((3, 5), "v2h"), ((3, 5), "h2v")])
@kinds
def test_accuracy(function, grid, paths, backend):
    tensors, valid = inputs(grid)
    fast, exact = (
        functools.partial(function, paths=paths, valid=valid, backend=name) for name in (backend, "reference")
    )
    assert_accurate(fast, exact, tensors, tokens(grid))


@pytest.mark.native
@pytest.mark.parametrize("isa", library.available() or ["none"])
@pytest.mark.parametrize("grid", [(3, 21), (19, 17), (2, 230)], ids=str)
@kinds
def test_accuracy_several_tiles(function, grid, isa, monkeypatch):
    """More keys than a vector and than a tile, in every instruction set, against float64 of the tested dense form."""
    monkeypatch.setattr(library, "forced_isa", isa)
    tensors, valid = inputs(grid, batch=(1, 1), d=9, dv=18)
    fast, exact = (functools.partial(function, valid=valid, backend=name) for name in ("native", "torch"))
    assert_accurate(fast, exact, tensors, tokens(grid))


def test_reference_full_valid_keys_only():
    """The definition: an attention over the list of valid keys, mask included."""
    (q, k, v, a, b), valid = inputs((4, 3), batch=(1, 1), dtype=torch.float64)
    keep = valid.flatten()
    flat_q, flat_k, flat_v = (t.flatten(0, 3) for t in (q, k, v))
    flat_k, flat_v = flat_k[keep], flat_v[keep]
    weights = (flat_q @ flat_k.mT).softmax(-1) * ppma.polyline_mask(a, b)[0, 0][:, keep]
    out = ppma.polyline_attention(q, k, v, a, b, scale=1.0, valid=valid, backend="reference")
    torch.testing.assert_close(out.flatten(0, 3), weights @ flat_v)


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
@kinds
def test_invalid_keys_never_read(function, backend):
    """NaN and infinity in k and v change not one bit of any result, and have zero gradients themselves."""
    tensors, valid = inputs((5, 6))
    q, k, v, *decays = tensors
    hidden = ~valid[:, None, :, :, None]
    poisoned = (q, k.masked_fill(hidden, torch.nan), v.masked_fill(hidden, torch.inf), *decays)
    run = functools.partial(function, valid=valid, backend=backend)
    for a, b in zip(outputs_and_gradients(run, tensors), outputs_and_gradients(run, poisoned), strict=True):
        assert torch.equal(a, b)
    _, _, grad_k, grad_v, *_ = outputs_and_gradients(run, poisoned)
    for gradient in (grad_k, grad_v):
        assert (gradient.masked_select(hidden) == 0).all()


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
@kinds
def test_no_valid_key(function, backend):
    tensors, valid = inputs((3, 4))
    valid[0] = False
    out, *gradients = outputs_and_gradients(functools.partial(function, valid=valid, backend=backend), tensors)
    assert (out[0] == 0).all()
    assert (out[1] != 0).any()
    assert all((gradient[0] == 0).all() and torch.isfinite(gradient).all() for gradient in gradients)


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
def test_no_reachable_key(backend):
    """The only valid key lies behind a decay of 0: inside the softmax there is nothing left to weigh."""
    (q, k, v, a, b), valid = inputs((1, 3), batch=(1, 1))
    valid[:] = torch.tensor([False, False, True])
    a = torch.tensor([0.0, -1.0, -torch.inf]).expand_as(a)
    run = functools.partial(ppma.polyline_attention, combine="logit", valid=valid, backend=backend)
    out, *gradients = outputs_and_gradients(run, (q, k, v, a, b))
    assert (out[..., :2, :] == 0).all()
    assert torch.equal(out[..., 2, :], v[..., 2, :])
    assert all(torch.isfinite(gradient).all() for gradient in gradients)


@pytest.mark.parametrize("backend", BACKENDS)
@kinds
def test_all_valid(function, backend):
    tensors, valid = inputs((4, 5))
    plain = outputs_and_gradients(functools.partial(function, backend=backend), tensors)
    padded = functools.partial(function, valid=torch.ones_like(valid), backend=backend)
    assert all(map(torch.equal, plain, outputs_and_gradients(padded, tensors)))


@pytest.mark.parametrize("backend", BACKENDS)
@kinds
def test_padding_is_cropping(function, backend):
    """Padding at the bottom and at the right, whose decays lie on no path between valid tokens."""
    tensors, valid = inputs((5, 6), dtype=torch.float32)
    valid[:] = False
    valid[:, :3, :4] = True
    padded = function(*tensors, valid=valid, backend=backend)[:, :, :3, :4]
    cropped = function(*(t[:, :, :3, :4] for t in tensors), backend=backend)
    torch.testing.assert_close(padded, cropped)


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
@kinds
def test_empty_batch(function, backend):
    tensors, valid = inputs((3, 4))
    run = functools.partial(function, valid=valid[:0], backend=backend)
    out, *gradients = outputs_and_gradients(run, [t[:0] for t in tensors])
    assert out.shape == (0, 2, 3, 4, 3)
    assert all(gradient.numel() == 0 for gradient in gradients)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@kinds
def test_half_precision(function, dtype):
    tensors, valid = inputs((3, 4), dtype=dtype)
    exact = functools.partial(function, valid=valid, backend="reference")
    assert_accurate(functools.partial(function, valid=valid), exact, tensors, roundings=4)


@pytest.mark.parametrize("backend", BACKENDS)
@kinds
def test_any_strides(function, backend):
    tensors, valid = inputs((4, 3))
    strided = [t.transpose(-1, -2).contiguous().transpose(-1, -2) for t in tensors]
    run = functools.partial(function, backend=backend)
    other = functools.partial(run, valid=valid.mT.contiguous().mT)
    for a, b in zip(
        outputs_and_gradients(other, strided),
        outputs_and_gradients(functools.partial(run, valid=valid), tensors),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
@pytest.mark.parametrize(("batch", "given"), [((), ()), ((2,), ()), ((3, 2), (1,)), ((3, 2), ()), ((2, 3, 2), (3,))])
def test_batch_axes(batch, given, backend):
    tensors, _ = inputs((2, 3), batch=(*batch, 1))
    tensors = [t.squeeze(len(batch)) for t in tensors]
    valid = torch.rand(*given, 2, 3, generator=torch.Generator().manual_seed(1)) < 0.5
    out = ppma.polyline_attention(*tensors, valid=valid, backend=backend)
    whole = [t.reshape(-1, 1, *t.shape[len(batch) :]) for t in tensors]
    each = valid[..., None, :, :].expand(*(batch or (1,)), 2, 3).reshape(-1, 2, 3)
    expected = ppma.polyline_attention(*whole, valid=each, backend="reference")
    torch.testing.assert_close(out, expected.reshape(out.shape))


@pytest.mark.parametrize(
    "wrong",
    [torch.ones(2, 3, 4), torch.ones(2, 4, 3, dtype=torch.bool), torch.ones(5, 3, 4, dtype=torch.bool), [True],
     torch.ones(4, dtype=torch.bool), torch.ones(2, 2, 3, 4, dtype=torch.bool)],
    ids=["float", "swapped", "batch", "list", "one-axis", "heads"],
)  # fmt: skip
@pytest.mark.parametrize("function", [ppma.polyline_attention, ppma.criss_cross_attention])
def test_wrong_argument(function, wrong):
    tensors, _ = inputs((3, 4))
    with pytest.raises(ValueError, match=r"^valid: expected torch.bool of shape \(2, 3, 4\) on cpu .* got "):
        function(*tensors, valid=wrong)


def test_backend_without_padding(monkeypatch):
    """A backend that takes no `valid` is not asked; chosen explicitly, it says so."""

    def old(q, k, v, log_alpha, log_beta, options):
        raise AssertionError("asked")

    tensors, valid = inputs((2, 3))
    monkeypatch.setattr("ppma.ops.backends.native.polyline_attention", old)
    ppma.polyline_attention(*tensors, valid=valid)
    with pytest.raises(backends.BackendUnavailableError, match="takes no key-padding mask"):
        ppma.polyline_attention(*tensors, valid=valid, backend="native")


def scalar(function, valid, backend):
    return lambda *tensors: function(*tensors, valid=valid, backend=backend).sin().sum()


@kinds
def test_transforms(function):
    """Second derivatives, forward mode and vmap, with `valid` mapped and not."""
    tensors, valid = inputs((2, 3), batch=(2, 1), dtype=torch.float64)
    tensors = (*tensors[:3], *(torch.where(t.isinf(), -1.0, t) for t in tensors[3:]))
    every = tuple(range(5))
    fast, exact = (scalar(function, valid, name) for name in ("torch", "reference"))
    close = functools.partial(torch.testing.assert_close, rtol=1e-9, atol=1e-11)
    close(grad(fast, every)(*tensors), grad(exact, every)(*tensors))
    tangents = tuple(torch.randn_like(t) for t in tensors)
    expected = jvp(exact, tensors, tangents)
    close(jvp(fast, tensors, tangents), expected)
    second = [jacrev(grad(f, 0), every)(*tensors) for f in (fast, exact)]
    close(*second)
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(t, g) for t, g in zip(tensors, tangents, strict=True)]
        close(forward_ad.unpack_dual(fast(*duals)).tangent, expected[1])
    run = functools.partial(function, backend="torch")
    stacked = [torch.stack([t, t.flip(0)]) for t in tensors]
    looped = torch.stack([run(*(t[i] for t in stacked), valid=valid) for i in range(2)])
    close(vmap(lambda *t: run(*t, valid=valid))(*stacked), looped)
    both = torch.stack([valid, ~valid])
    looped = torch.stack([run(*(t[i] for t in stacked), valid=both[i]) for i in range(2)])
    close(vmap(lambda m, *t: run(*t, valid=m))(both, *stacked), looped)
    mapped = vmap(lambda m, *t: grad(scalar(function, m, "torch"), every)(*t))(both, *stacked)
    for i in range(2):
        close(
            tuple(t[i] for t in mapped), grad(scalar(function, both[i], "reference"), every)(*(t[i] for t in stacked))
        )


@kinds
def test_compile_and_export(function):
    tensors, valid = inputs((3, 4))

    class Module(torch.nn.Module):
        def forward(self, valid, *tensors):
            return function(*tensors, valid=valid)

    leaves = [t.clone().requires_grad_() for t in tensors]
    compiled = torch.compile(Module(), fullgraph=True, backend="aot_eager")(valid, *leaves)
    expected = function(*leaves, valid=valid)
    torch.testing.assert_close(compiled, expected)
    for a, b in zip(*(torch.autograd.grad(o.sin().sum(), leaves) for o in (compiled, expected)), strict=True):
        torch.testing.assert_close(a, b)
    program = torch.export.export(Module(), (valid, *tensors))
    torch.testing.assert_close(program.module()(valid, *tensors), expected)
    dense = program.run_decompositions(decompositions.table())
    assert not any("ppma" in str(node.target) for node in dense.graph.nodes)
    torch.testing.assert_close(dense.module()(valid, *tensors), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_opcheck(backend):
    tensors, valid = inputs((2, 3))
    leaves = [t.clone().requires_grad_() for t in tensors]
    options = ("logit", "2d", 0.5, backend, valid)
    torch.library.opcheck(torch.ops.ppma.polyline_attention.default, (*leaves, *options))
    torch.library.opcheck(torch.ops.ppma.criss_cross_attention.default, (*leaves, *options))
