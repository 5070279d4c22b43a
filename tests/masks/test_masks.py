"""The masks of the ablation: their blocks, their dense form, and both attentions with any of them."""

import itertools

import pytest
import torch

import ppma
from ppma import masks
from ppma.masks import curves
from ppma.testing import GRIDS, random_log_decay


def build(name, grid, heads=2, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    log_alpha, log_beta = (random_log_decay(heads, *grid, generator=generator, dtype=dtype) for _ in range(2))
    if name == "none":
        return masks.none(grid)
    if name == "rmt":
        return masks.rmt(masks.rmt_log_decay(heads, 4).to(dtype), grid)
    kind = masks.KINDS[name]
    return kind.build(log_alpha, log_alpha if kind.learned == 1 else log_beta)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("name", masks.KINDS)
def test_rows_and_columns_blocks_of_dense(name, grid):
    H, W = grid
    mask = build(name, grid)
    dense = mask.dense().unflatten(-1, grid).unflatten(-3, grid)
    for i in range(H):
        torch.testing.assert_close(mask.rows()[..., i, :, :], dense[..., i, :, i, :])
    for j in range(W):
        torch.testing.assert_close(mask.columns()[..., j, :, :], dense[..., :, j, :, j])


@pytest.mark.parametrize("combine", ["hadamard", "logit"])
@pytest.mark.parametrize("name", masks.KINDS)
def test_mask_against_general_form(name, combine):
    grid = (4, 5)
    mask = build(name, grid)
    q, k, v = torch.randn(3, 3, 2, *grid, 4, dtype=torch.float64)
    for method in ("attention", "criss_cross"):
        fused = getattr(mask, method)(q, k, v, combine=combine)
        general = getattr(masks.StructuredMask, method)(mask, q, k, v, combine=combine)
        torch.testing.assert_close(fused, general)
    fused = mask.decomposed(q.exp(), k.exp(), v, combine=combine)
    torch.testing.assert_close(fused, masks.StructuredMask.decomposed(mask, q.exp(), k.exp(), v, combine=combine))


@pytest.mark.parametrize("combine", ["hadamard", "logit"])
@pytest.mark.parametrize("method", ["attention", "criss_cross"])
@pytest.mark.parametrize("name", ["2d", "hilbert"])
def test_valid_against_general_form(name, method, combine):
    """Rows without valid keys, and NaN at invalid ones."""
    mask, (q, k, v) = build(name, (4, 5)), torch.randn(3, 3, 2, 4, 5, 4, dtype=torch.float64)
    valid = torch.rand(3, 4, 5, generator=torch.Generator().manual_seed(0)) < 0.5
    valid[1], valid[2, 2] = False, False
    k = k.masked_fill(~valid[:, None, ..., None], torch.nan)
    fused = getattr(mask, method)(q, k, v, combine=combine, valid=valid)
    general = getattr(masks.StructuredMask, method)(mask, q, k, v, combine=combine, valid=valid)
    assert (fused[1] == 0).all()
    torch.testing.assert_close(fused, general)


@pytest.mark.parametrize("name", ["cross", "hilbert"])
def test_scan_criss_cross_gradients(name):
    grid = (3, 4)
    generator = torch.Generator().manual_seed(0)
    log_decays = [random_log_decay(2, *grid, generator=generator).requires_grad_() for _ in range(2)]
    q, k, v = torch.randn(3, 2, *grid, 4)
    mask = masks.KINDS[name].build(*log_decays)
    for combine in ("hadamard", "logit"):
        mask.criss_cross(q, k, v, combine=combine).sum().backward()
    for log_decay in log_decays:
        assert torch.isfinite(log_decay.grad).all()
        assert (log_decay.grad != 0).any()


@pytest.mark.parametrize("combine", ["hadamard", "logit"])
@pytest.mark.parametrize("method", ["attention", "decomposed"])
@pytest.mark.parametrize("name", ["cross", "hilbert"])
def test_scan_gradients_against_general_form(name, method, combine):
    """With decays of 0 and 1 along the scans."""
    generator = torch.Generator().manual_seed(0)
    grid, dtype = (3, 4), torch.float64
    log_decays = [random_log_decay(2, *grid, generator=generator, dtype=dtype).requires_grad_() for _ in range(2)]
    tensors = [torch.rand(2, *grid, 4, dtype=dtype, generator=generator).requires_grad_() for _ in range(3)]
    upstream = torch.randn(2, *grid, 4, dtype=dtype, generator=generator)
    gradients = []
    for owner in (masks.ScanMask, masks.StructuredMask):
        out = getattr(owner, method)(masks.KINDS[name].build(*log_decays), *tensors, combine=combine)
        gradients.append(torch.autograd.grad(out, [*tensors, *log_decays], upstream))
    assert all((gradient != 0).any() for gradient in gradients[0])
    torch.testing.assert_close(*gradients)


def test_none_all_ones():
    assert (build("none", (3, 4)).dense() == 0).all()


def test_rmt_manhattan_distance():
    H, W, heads, span = 3, 5, 4, 6
    dense = masks.rmt(masks.rmt_log_decay(heads, span), (H, W)).dense()[0].view(heads, H, W, H, W)
    i, j = torch.arange(H), torch.arange(W)
    distance = (i[:, None, None, None] - i[:, None]).abs() + (j[:, None, None] - j).abs()
    for head in range(heads):
        gamma = 1 - 2.0 ** -(2 + span * head / heads)
        torch.testing.assert_close(dense[head], distance * torch.tensor(gamma).log())


@pytest.mark.parametrize(("name", "order"), [("cross", curves.row_major), ("hilbert", curves.hilbert)])
def test_scan_mask_product(name, order):
    grid = (3, 4)
    generator = torch.Generator().manual_seed(0)
    log_alpha, log_beta = (random_log_decay(*grid, generator=generator, dtype=torch.float64) for _ in range(2))
    dense = masks.KINDS[name].build(log_alpha, log_beta).dense()[0]
    visit = order(*grid)
    along = log_alpha.flatten()[list(visit)]
    for a in range(12):
        for b in range(12):
            expected = along[min(a, b) + 1 : max(a, b) + 1].sum()
            torch.testing.assert_close(dense[visit[a], visit[b]], expected)


def test_scan_mask_second_path():
    grid = (3, 4)
    log_alpha, log_beta = -torch.rand(2, *grid, dtype=torch.float64)
    for name in ("cross", "hilbert"):
        build = masks.KINDS[name].build
        second = build(log_alpha, log_beta).dense()[1].view(*grid, *grid)
        first = build(log_beta.mT, log_alpha.mT).dense()[0].view(*grid[::-1], *grid[::-1])
        torch.testing.assert_close(second, first.permute(1, 0, 3, 2))


@pytest.mark.parametrize("height", range(1, 12))
def test_hilbert_curve_neighbours(height):
    for width in range(1, 12):
        order = curves.hilbert(height, width)
        assert sorted(order) == list(range(height * width))
        steps = [(abs(a // width - b // width), abs(a % width - b % width)) for a, b in itertools.pairwise(order)]
        assert sum(step not in ((0, 1), (1, 0)) for step in steps) <= 1
        assert all(max(step) == 1 for step in steps)


def test_shared_polyline_mask():
    log_alpha = -torch.rand(3, 4)
    shared = masks.polyline_2d(log_alpha, log_alpha)
    torch.testing.assert_close(shared.dense().exp().sum(0), ppma.polyline_mask(log_alpha, log_alpha))


def test_attention_unknown_combine():
    q, k, v = torch.randn(3, 2, 3, 4, 4)
    with pytest.raises(ValueError, match="combine: expected one of 'hadamard', 'logit', got 'sum'"):
        build("cross", (3, 4), dtype=torch.float32).attention(q, k, v, combine="sum")
