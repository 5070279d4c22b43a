"""Every backend against the reference: outputs and all gradients, over grids, paths, dtypes and hard decays."""

import functools
import importlib

import pytest
import torch

import ppma
from ppma.testing import GRIDS, assert_accurate, outputs_and_gradients, random_log_decay

BACKENDS = ["torch", pytest.param("native", marks=pytest.mark.native)]
PATHS = ["v2h", "h2v", "2d"]


def attention_inputs(grid, dtype=torch.float32, heads=2, d=5, dv=3, batch=(2,), seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (*batch, heads, *grid)
    q, k = (torch.randn(*shape, d, generator=generator).to(dtype) for _ in range(2))
    v = torch.randn(*shape, dv, generator=generator).to(dtype)
    decay_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    log_alpha, log_beta = (random_log_decay(*shape, generator=generator, dtype=decay_dtype) for _ in range(2))
    return q, k, v, log_alpha, log_beta


def roundings(grid, d):
    """Dot product of d, softmax over all tokens, two lines of decays, the products with v: one rounding each."""
    return d + grid[0] * grid[1] + 2 * sum(grid) + 16


ATTENTIONS = [
    pytest.param(ppma.polyline_attention, {"combine": "hadamard"}, id="full-hadamard"),
    pytest.param(ppma.polyline_attention, {"combine": "logit"}, id="full-logit"),
    pytest.param(ppma.criss_cross_attention, {"combine": "hadamard"}, id="criss-cross-hadamard"),
    pytest.param(ppma.criss_cross_attention, {"combine": "logit"}, id="criss-cross-logit"),
    pytest.param(ppma.linear_attention, {}, id="linear"),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("paths", PATHS)
@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize(("function", "options"), ATTENTIONS)
def test_attention_accuracy(function, options, grid, paths, backend):
    fast = functools.partial(function, paths=paths, backend=backend, **options)
    exact = functools.partial(function, paths=paths, backend="reference", **options)
    assert_accurate(fast, exact, attention_inputs(grid), roundings(grid, 5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("function", "options"), ATTENTIONS)
def test_attention_half_precision(function, options, dtype):
    """Computed in float32, so only reading the inputs and writing the result round to half precision."""
    inputs = attention_inputs((3, 4), dtype)
    exact = functools.partial(function, backend="reference", **options)
    assert_accurate(functools.partial(function, **options), exact, inputs, roundings=4)


@pytest.mark.parametrize(("function", "options"), ATTENTIONS)
@pytest.mark.parametrize("paths", PATHS)
def test_attention_torch_float64(function, options, paths):
    inputs = attention_inputs((4, 5), torch.float64)
    for fast, exact in zip(
        outputs_and_gradients(functools.partial(function, paths=paths, backend="torch", **options), inputs),
        outputs_and_gradients(functools.partial(function, paths=paths, backend="reference", **options), inputs),
        strict=True,
    ):
        torch.testing.assert_close(fast, exact, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("paths", PATHS)
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_scan_accuracy(grid, paths, backend):
    _, _, x, log_alpha, log_beta = attention_inputs(grid)
    fast = functools.partial(ppma.polyline_scan, paths=paths, backend=backend)
    exact = functools.partial(ppma.polyline_scan, paths=paths, backend="reference")
    assert_accurate(fast, exact, (x, log_alpha, log_beta), roundings=2 * sum(grid) + 8)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("paths", ["forward", "reverse", "both"])
@pytest.mark.parametrize("grid", [(6,), (3, 4), (2, 3, 4), (2, 3, 1, 3)], ids=str)
def test_nd_scan_accuracy(grid, paths, backend):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, *grid, 3, generator=generator)
    log_decays = [random_log_decay(2, *grid, generator=generator) for _ in grid]

    def run(backend):
        return lambda x, *decays: ppma.polyline_scan_nd(x, decays, paths=paths, backend=backend)

    assert_accurate(run(backend), run("reference"), (x, *log_decays), roundings=2 * sum(grid) + 8)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("function", "options"), ATTENTIONS)
def test_attention_any_strides(function, options, backend):
    grid, heads, d = (4, 6), 2, 8
    generator = torch.Generator().manual_seed(3)
    packed = torch.randn(2, *grid, 3, heads, d, generator=generator)
    q, k, v = packed.movedim(3, 0).movedim(-2, 2).unbind(0)
    log_alpha = random_log_decay(heads, *reversed(grid), generator=generator).mT
    log_beta = random_log_decay(1, 1, *grid, generator=generator).expand(2, heads, *grid)
    given = outputs_and_gradients_of_views(function, options, backend, (q, k, v, log_alpha, log_beta))
    copied = outputs_and_gradients(
        functools.partial(function, backend=backend, **options),
        [t.contiguous() for t in (q, k, v, log_alpha.expand(2, heads, *grid), log_beta)],
    )
    for a, b in zip(given[:4], copied[:4], strict=True):
        torch.testing.assert_close(a, b)


def outputs_and_gradients_of_views(function, options, backend, views):
    """As `outputs_and_gradients`, but without the clone that would make the inputs contiguous."""
    leaves = [view.detach().requires_grad_() for view in views]
    out = function(*leaves, backend=backend, **options)
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return [out.detach(), *torch.autograd.grad(out, leaves, cotangent.to(out))]


@pytest.mark.parametrize("backend", BACKENDS)
def test_edges_outside_grid(backend):
    """alpha[:, 0] and beta[0, :] may hold anything, and their gradient is 0."""
    q, k, v, log_alpha, log_beta = attention_inputs((4, 5))
    poisoned = log_alpha.clone(), log_beta.clone()
    poisoned[0][..., :, 0] = torch.nan
    poisoned[1][..., 0, :] = torch.inf
    calls = [
        *(functools.partial(p.values[0], q, k, v, **p.values[1]) for p in ATTENTIONS),
        functools.partial(ppma.polyline_scan, v),
    ]
    for call in calls:
        call = functools.partial(call, backend=backend)
        clean = outputs_and_gradients(call, (log_alpha, log_beta))
        dirty = outputs_and_gradients(call, poisoned)
        for a, b in zip(clean, dirty, strict=True):
            assert torch.equal(a, b)
        assert (clean[1][..., :, 0] == 0).all()
        assert (clean[2][..., 0, :] == 0).all()


def test_mask_edges_outside_grid():
    _, _, _, log_alpha, log_beta = attention_inputs((4, 5))
    clean = outputs_and_gradients(ppma.polyline_mask, (log_alpha, log_beta))
    log_alpha[..., :, 0] = torch.nan
    log_beta[..., 0, :] = torch.inf
    for a, b in zip(clean, outputs_and_gradients(ppma.polyline_mask, (log_alpha, log_beta)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("combine", ["hadamard", "logit"])
@pytest.mark.parametrize("function", [ppma.polyline_attention, ppma.criss_cross_attention])
def test_large_scores_strong_decays(function, combine, backend):
    """Scores around +-140 against log masks down to -200: a shared maximum for mask and score would underflow."""
    q, k, v, _, _ = attention_inputs((4, 5), d=4)
    q, k = 12 * q, 12 * k
    log_alpha, log_beta = (torch.full((2, 2, 4, 5), -25.0) for _ in range(2))
    fast = functools.partial(function, combine=combine, backend=backend)
    exact = functools.partial(function, combine=combine, backend="reference")
    assert_accurate(fast, exact, (q, k, v, log_alpha, log_beta), roundings((4, 5), 4))


def test_attention_several_tiles(monkeypatch):
    """Tiles of single rows and heads give what one tile gives."""
    module = importlib.import_module("ppma.ops.backends.pytorch.attention")
    inputs = attention_inputs((5, 4), torch.float64)
    for combine in ("hadamard", "logit"):
        call = functools.partial(ppma.polyline_attention, combine=combine, backend="torch")
        whole = outputs_and_gradients(call, inputs)
        with monkeypatch.context() as patch:
            patch.setattr(module, "TILE_SCORES", 2 * 4 * 20)
            tiled = outputs_and_gradients(call, inputs)
        for a, b in zip(whole, tiled, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


def test_linear_attention_several_chunks(monkeypatch):
    module = importlib.import_module("ppma.ops.backends.pytorch.linear")
    inputs = attention_inputs((5, 4), torch.float64)
    call = functools.partial(ppma.linear_attention, backend="torch")
    whole = outputs_and_gradients(call, inputs)
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 1)
    for a, b in zip(whole, outputs_and_gradients(call, inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("length", [56, 256, 4096])
@pytest.mark.parametrize("strength", [1e-6, 1e-2, 1.0])
def test_mask_accuracy_long_lines(length, strength):
    """Within 2e-6 relative of float64, for every entry that float32 can hold."""
    generator = torch.Generator().manual_seed(length)
    log_decay = -strength * torch.rand(1, length, generator=generator)
    log_decay[0, torch.randint(1, length, (3,), generator=generator)] = -torch.inf
    zero = torch.zeros_like(log_decay)
    mask = ppma.polyline_mask(log_decay, zero, paths="v2h")
    exact = ppma.polyline_mask(log_decay.double(), zero.double(), paths="v2h")
    normal = exact > torch.finfo(torch.float32).tiny
    assert (mask[normal].double() / exact[normal] - 1).abs().max() < 2e-6
    assert (mask[exact == 0] == 0).all()
    log_mask, exact_log = (
        ppma.polyline_mask(decay, torch.zeros_like(decay), paths="v2h", log=True)
        for decay in (log_decay, log_decay.double())
    )
    assert torch.equal(log_mask.isneginf(), exact_log.isneginf())
    torch.testing.assert_close(log_mask.double(), exact_log, rtol=2e-7, atol=0)
