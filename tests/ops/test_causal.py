"""Mamba2's mask: three forms that agree, and how the polyline mask generalises it."""

import functools

import pytest
import torch
from torch.func import grad, jvp, vmap

import ppma
from ppma.ops import causal, reference
from ppma.testing import assert_accurate, random_log_decay

FORMS = ["recurrent", "attention", "chunkwise"]
forms = pytest.mark.parametrize("form", FORMS)
LENGTHS = [1, 2, 5, 13]


def inputs(n, batch=(2,), dtype=torch.float32, d=3, dv=2):
    generator = torch.Generator().manual_seed(n)
    q, k, v = (torch.randn(*batch, n, c, generator=generator, dtype=torch.float64).to(dtype) for c in (d, d, dv))
    decay_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    return q, k, v, random_log_decay(*batch, n, generator=generator, dtype=decay_dtype)


@pytest.fixture(autouse=True)
def _short_chunks(monkeypatch):
    monkeypatch.setattr(causal, "CHUNK", 4)


@pytest.mark.parametrize("n", LENGTHS)
def test_mask_definition(n):
    (*_, log_decay) = inputs(n, dtype=torch.float64)
    expected = torch.zeros(2, n, n, dtype=torch.float64)
    for i in range(n):
        for j in range(i + 1):
            expected[:, i, j] = log_decay[:, j + 1 : i + 1].exp().prod(-1)
    torch.testing.assert_close(ppma.causal_mask(log_decay), expected)
    torch.testing.assert_close(ppma.causal_mask(log_decay, log=True).exp(), expected)


@pytest.mark.parametrize("n", LENGTHS)
def test_mask_symmetric(n):
    """A line of the polyline mask is the causal mask and its transpose, with one diagonal."""
    (*_, log_decay) = inputs(n, dtype=torch.float64)
    mask = ppma.causal_mask(log_decay)
    symmetric = mask + mask.mT - torch.eye(n, dtype=torch.float64)
    torch.testing.assert_close(ppma.polyline_mask_nd([log_decay], paths="forward"), symmetric)


def test_mask_polyline():
    """V2H is the product of the symmetric masks of columns and rows, each made of two causal ones."""
    _, _, x, log_alpha = inputs(5, batch=(4,), dtype=torch.float64)
    log_beta = inputs(4, batch=(5,), dtype=torch.float64)[3].mT

    def both_ways(x, log_decay):
        forward = ppma.causal_scan(x, log_decay)
        shifted = torch.cat([log_decay[..., :1], log_decay[..., 1:].flip(-1)], -1)
        return forward + ppma.causal_scan(x.flip(-2), shifted).flip(-2) - x

    columns = both_ways(x.transpose(0, 1), log_beta.mT).transpose(0, 1)
    expected = ppma.polyline_scan(x, log_alpha, log_beta, paths="v2h")
    torch.testing.assert_close(both_ways(columns, log_alpha), expected)


def test_scan_quadrant():
    """Causal rows, then causal columns: H2V with the keys above and to the left of the query, as 2DMamba scans."""
    _, _, x, log_alpha = inputs(5, batch=(4,), dtype=torch.float64)
    log_beta = inputs(4, batch=(5,), dtype=torch.float64)[3].mT
    rows = ppma.causal_scan(x, log_alpha)
    actual = ppma.causal_scan(rows.transpose(0, 1), log_beta.mT).transpose(0, 1)
    i, j = torch.tensor(reference.tokens(4, 5)).unbind(-1)
    quadrant = (i[:, None] >= i) & (j[:, None] >= j)
    mask = ppma.polyline_mask(log_alpha, log_beta, paths="h2v") * quadrant
    torch.testing.assert_close(actual.flatten(0, 1), mask @ x.flatten(0, 1))


@forms
@pytest.mark.parametrize("n", LENGTHS)
def test_attention_accuracy(n, form):
    def exact(q, k, v, log_decay):
        mask = reference.line_matrix(log_decay.exp()).tril()
        return (q @ k.mT * mask) @ v

    assert_accurate(functools.partial(ppma.causal_attention, form=form), exact, inputs(n), roundings=2 * n + 3 + 8)


@forms
@pytest.mark.parametrize("n", LENGTHS)
def test_scan_accuracy(n, form):
    def exact(x, log_decay):
        return reference.line_matrix(log_decay.exp()).tril() @ x

    _, _, x, log_decay = inputs(n)
    assert_accurate(functools.partial(ppma.causal_scan, form=form), exact, (x, log_decay), roundings=2 * n + 8)


@forms
def test_gradcheck(form):
    q, k, v, log_decay = (t.requires_grad_() for t in inputs(6, dtype=torch.float64))
    log_decay = torch.rand(2, 6, dtype=torch.float64, requires_grad=True)
    function = functools.partial(ppma.causal_attention, form=form)

    def run(q, k, v, raw):
        return function(q, k, v, -raw)

    assert torch.autograd.gradcheck(run, (q, k, v, log_decay))
    assert torch.autograd.gradgradcheck(run, (q, k, v, log_decay))


@forms
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(form, dtype):
    tensors = inputs(9, dtype=dtype)
    exact = functools.partial(ppma.causal_attention, form="attention")
    assert_accurate(functools.partial(ppma.causal_attention, form=form), exact, tensors, roundings=4)


@forms
def test_outside_edge_any_strides_and_batches(form):
    """The first log-decay is never read; batch axes broadcast and may be empty; strides do not matter."""
    q, k, v, log_decay = inputs(7, batch=(3, 2), dtype=torch.float64)
    run = functools.partial(ppma.causal_attention, form=form)
    expected = run(q, k, v, log_decay)
    outside = torch.cat([torch.full_like(log_decay[..., :1], -torch.inf), log_decay[..., 1:]], -1)
    torch.testing.assert_close(run(q, k, v, outside), expected)
    strided = [t.mT.contiguous().mT for t in (q, k, v)]
    torch.testing.assert_close(run(*strided, log_decay), expected)
    torch.testing.assert_close(run(q, k[:1], v, log_decay), run(q, k[:1].expand_as(k), v, log_decay))
    assert run(q[:0], k[:0], v[:0], log_decay[:0]).shape == (0, 2, 7, 2)


@forms
def test_transforms_and_compile(form):
    tensors = inputs(6, dtype=torch.float64)
    run = functools.partial(ppma.causal_attention, form=form)
    torch.testing.assert_close(vmap(run)(*tensors), run(*tensors))

    def loss(*t, function=run):
        return function(*t).sin().sum()

    exact = functools.partial(loss, function=functools.partial(ppma.causal_attention, form="attention"))
    every = (0, 1, 2, 3)
    torch.testing.assert_close(grad(loss, every)(*tensors), grad(exact, every)(*tensors))
    tangents = tuple(torch.randn_like(t) for t in tensors)
    torch.testing.assert_close(jvp(loss, tensors, tangents), jvp(exact, tensors, tangents))
    compiled = torch.compile(run, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(*tensors), run(*tensors))


def test_autocast():
    tensors = inputs(9)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = ppma.causal_attention(*tensors)
    assert torch.equal(out, ppma.causal_attention(*tensors))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"form": "chunkwize"}, r"^form: expected one of .* did you mean 'chunkwise'\?"),
        ({"k": torch.zeros(2, 6, 4)}, r"^k: expected 3 channels like q, got shape"),
        ({"q": torch.zeros(2, 5, 3)}, r"^q: expected shape \(..., 6, channels\) on the grid of the log-decays, got"),
        ({"log_decay": torch.zeros(2, 6).half()}, r"^log_decay: expected log-decays in float32 or float64"),
        ({"log_decay": torch.zeros(3, 6)}, r"^batch axes: expected shapes that broadcast, got"),
    ],
)
def test_wrong_argument(change, message):
    arguments = dict(zip(("q", "k", "v", "log_decay"), inputs(6), strict=True)) | change
    with pytest.raises(ValueError, match=message):
        ppma.causal_attention(**arguments)
