"""The paper's theorems, algorithm and examples as identities in float64."""

import itertools

import pytest
import torch

import ppma
from ppma.ops import mask, reference
from ppma.testing import GRIDS, random_log_decay


def decays(grid, batch=(), seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [random_log_decay(*batch, *grid, generator=generator, dtype=torch.float64) for _ in range(2)]


def line_blocks(log_alpha, log_beta):
    return reference.line_matrix(log_alpha.exp()), reference.line_matrix(log_beta.exp().mT)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_theorem_1_decomposition(grid):
    """L = LH x LV = LH-hat * LV-hat."""
    log_alpha, log_beta = decays(grid)
    rows, columns = line_blocks(log_alpha, log_beta)
    L = reference.polyline_mask(log_alpha, log_beta, paths="v2h")
    torch.testing.assert_close(reference.horizontal_matrix(rows) @ reference.vertical_matrix(columns), L)
    hats = reference.horizontal_matrix(rows, hat=True) * reference.vertical_matrix(columns, hat=True)
    torch.testing.assert_close(hats, L)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_theorem_2_and_algorithm_1(grid):
    """L x is a product with every column's matrix, then with every row's; the fast form says the same."""
    log_alpha, log_beta = decays(grid)
    x = torch.randn(*grid, 3, dtype=torch.float64)
    L = reference.polyline_mask(log_alpha, log_beta, paths="v2h")
    dense = (L @ x.flatten(0, 1)).view(x.shape)
    torch.testing.assert_close(reference.algorithm1(x, log_alpha, log_beta), dense)
    torch.testing.assert_close(mask.algorithm1(x, log_alpha, log_beta), dense)
    torch.testing.assert_close(ppma.polyline_scan(x, log_alpha, log_beta, paths="v2h"), dense)


@pytest.mark.parametrize("paths", ["v2h", "h2v", "2d"])
def test_theorem_3(paths):
    """((Q K^T) * L) V = Q . (L (K outer V))."""
    grid, d, dv = (4, 5), 3, 2
    log_alpha, log_beta = decays(grid)
    q, k = torch.randn(2, *grid, d, dtype=torch.float64)
    v = torch.randn(*grid, dv, dtype=torch.float64)
    L = reference.polyline_mask(log_alpha, log_beta, paths=paths)
    flat_q, flat_k, flat_v = (t.flatten(0, 1) for t in (q, k, v))
    KV = torch.einsum("nd,nc->ndc", flat_k, flat_v)
    LKV = torch.einsum("mn,ndc->mdc", L, KV)
    right = torch.einsum("md,mdc->mc", flat_q, LKV)
    torch.testing.assert_close(((flat_q @ flat_k.mT) * L) @ flat_v, right)
    torch.testing.assert_close(ppma.linear_attention(q, k, v, log_alpha, log_beta, paths=paths).flatten(0, 1), right)


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("paths", ["v2h", "h2v", "2d"])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_mask_definition(grid, paths, log):
    log_alpha, log_beta = decays(grid, batch=(2,))
    fast = ppma.polyline_mask(log_alpha, log_beta, paths=paths, log=log)
    torch.testing.assert_close(fast, reference.polyline_mask(log_alpha, log_beta, paths=paths, log=log))


def test_mask_transpose_and_diagonal():
    log_alpha, log_beta = decays((4, 5))
    v2h, h2v, both = (ppma.polyline_mask(log_alpha, log_beta, paths=p) for p in ("v2h", "h2v", "2d"))
    assert torch.equal(h2v, v2h.mT)
    assert torch.equal(both, v2h + h2v)
    assert (both.diagonal() == 2).all()


def test_h2v_as_printed():
    """The paper prints alpha_{k,j:l} beta_{i:k,l} for H2V; only beta_{i:k,j} gives the transpose it then states."""
    log_alpha, log_beta = decays((3, 4))
    alpha, beta = log_alpha.exp(), log_beta.exp()
    transpose = ppma.polyline_mask(log_alpha, log_beta, paths="v2h").mT
    differences = 0
    for (u, (i, j)), (v, (k, l)) in itertools.product(enumerate(reference.tokens(3, 4)), repeat=2):
        row = reference.edges_between(alpha[k], j, l).prod()
        printed = row * reference.edges_between(beta[:, l], i, k).prod()
        corrected = row * reference.edges_between(beta[:, j], i, k).prod()
        torch.testing.assert_close(corrected, transpose[u, v])
        differences += not torch.isclose(printed, transpose[u, v])
    assert differences > 0


def test_criss_cross_as_printed():
    """Eq. (11) has SH x SV in both halves; the H2V half only factorises with SV x SH, which is what we compute."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 3, 4, 2, dtype=torch.float64)
    log_alpha, log_beta = -torch.rand(2, 3, 4, dtype=torch.float64)
    printed = reference.criss_cross_attention_as_printed(q, k, v, log_alpha, log_beta, scale=1.0)
    computed = ppma.criss_cross_attention(q, k, v, log_alpha, log_beta, scale=1.0)
    assert (printed - computed).abs().max() > 1e-2
    rows, columns = reference.criss_cross_maps(
        q, k, torch.zeros_like(log_alpha), torch.zeros_like(log_beta), combine="hadamard", scale=1.0
    )
    flat = v.flatten(0, 1)
    L = ppma.polyline_mask(log_alpha, log_beta, paths="v2h")
    v2h = ((rows @ columns) * L) @ flat
    h2v = ((columns @ rows) * L.mT) @ flat
    torch.testing.assert_close((v2h + h2v).view(v.shape), computed)


def test_mask_4x4_example():
    """L[(1,1),(4,4)] = a12 a13 a14 b24 b34 b44, 1-based."""
    alpha, beta = torch.rand(2, 4, 4, dtype=torch.float64)
    L = ppma.polyline_mask(alpha.log(), beta.log(), paths="v2h").view(4, 4, 4, 4)
    expected = alpha[0, 1] * alpha[0, 2] * alpha[0, 3] * beta[1, 3] * beta[2, 3] * beta[3, 3]
    torch.testing.assert_close(L[0, 0, 3, 3], expected)


def test_mask_3x3_example():
    """The matrix of the appendix: row (i, j), column (k, l) holds alpha_{i,j:l} beta_{i:k,l}."""
    alpha, beta = torch.rand(2, 3, 3, dtype=torch.float64)

    def a(i, j, l):
        return alpha[i, min(j, l) + 1 : max(j, l) + 1].prod()

    def b(i, k, l):
        return beta[min(i, k) + 1 : max(i, k) + 1, l].prod()

    tokens = reference.tokens(3, 3)
    printed = torch.stack([torch.stack([a(i, j, l) * b(i, k, l) for k, l in tokens]) for i, j in tokens])
    torch.testing.assert_close(ppma.polyline_mask(alpha.log(), beta.log(), paths="v2h"), printed)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_mask_swapped_axes(grid):
    H, W = grid
    log_alpha, log_beta = decays(grid)
    mask_hw = ppma.polyline_mask(log_alpha, log_beta, paths="v2h").view(H, W, H, W)
    mask_wh = ppma.polyline_mask(log_beta.mT, log_alpha.mT, paths="h2v").view(W, H, W, H)
    torch.testing.assert_close(mask_wh.permute(1, 0, 3, 2), mask_hw)
    q, k, v = torch.randn(3, *grid, 4, dtype=torch.float64)
    swapped = [t.transpose(0, 1) for t in (q, k, v)]
    for function in (ppma.polyline_attention, ppma.criss_cross_attention, ppma.linear_attention):
        straight = function(q, k, v, log_alpha, log_beta, paths="v2h")
        turned = function(*swapped, log_beta.mT, log_alpha.mT, paths="h2v")
        torch.testing.assert_close(turned.transpose(0, 1), straight)


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("paths", ["forward", "reverse", "both"])
@pytest.mark.parametrize("grid", [(5,), (3, 4), (2, 3, 3), (2, 2, 3, 2)], ids=str)
def test_nd_mask_definition(grid, paths, log):
    generator = torch.Generator().manual_seed(0)
    log_decays = [random_log_decay(2, *grid, generator=generator, dtype=torch.float64) for _ in grid]
    fast = ppma.polyline_mask_nd(log_decays, paths=paths, log=log)
    torch.testing.assert_close(fast, reference.polyline_mask_nd(log_decays, paths=paths, log=log))


@pytest.mark.parametrize(("paths", "nd_paths"), [("v2h", "forward"), ("h2v", "reverse"), ("2d", "both")])
def test_nd_mask_2d(paths, nd_paths):
    log_alpha, log_beta = decays((3, 4))
    exact = reference.polyline_mask(log_alpha, log_beta, paths=paths)
    torch.testing.assert_close(reference.polyline_mask_nd([log_beta, log_alpha], paths=nd_paths), exact)
    torch.testing.assert_close(ppma.polyline_mask_nd([log_beta, log_alpha], paths=nd_paths), exact)


def test_nd_mask_3d():
    """L3D[(i,j,k),(l,m,n)] = alpha-row(i,j)[k,n] beta-col(i,n)[j,m] gamma-pillar(m,n)[i,l]."""
    alpha, beta, gamma = torch.rand(3, 2, 3, 4, dtype=torch.float64)
    L = ppma.polyline_mask_nd([gamma.log(), beta.log(), alpha.log()], paths="forward").view(2, 3, 4, 2, 3, 4)
    between = reference.edges_between
    for (i, j, k), (l, m, n) in itertools.product(itertools.product(range(2), range(3), range(4)), repeat=2):
        expected = (
            between(alpha[i, j], k, n).prod()
            * between(beta[i, :, n], j, m).prod()
            * between(gamma[:, m, n], i, l).prod()
        )
        torch.testing.assert_close(L[i, j, k, l, m, n], expected)


def test_decomposed_attention_linear():
    log_alpha, log_beta = decays((3, 4))
    s1, s2 = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    v = torch.randn(3, 4, 2, dtype=torch.float64)
    S = s1.flatten(0, 1) @ s2.flatten(0, 1).mT
    expected = (S * ppma.polyline_mask(log_alpha, log_beta)) @ v.flatten(0, 1)
    out = ppma.decomposed_attention(s1, s2, v, log_alpha, log_beta)
    torch.testing.assert_close(out.flatten(0, 1), expected)


def test_full_attention_no_decay():
    q, k, v = torch.randn(3, 2, 4, 5, 8)
    zero = torch.zeros(2, 4, 5)
    plain = torch.nn.functional.scaled_dot_product_attention(*(t.flatten(1, 2) for t in (q, k, v))).view(v.shape)
    for combine in ("hadamard", "logit"):
        out = ppma.polyline_attention(q, k, v, zero, zero, combine=combine, paths="v2h")
        torch.testing.assert_close(out, plain)
