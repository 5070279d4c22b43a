"""Attention weights of low rank: rows that sum to 1, in every dtype, with and without padding."""

import pytest
import torch

from ppma.layers.factors import FACTORS


@pytest.mark.parametrize("kind", FACTORS)
def test_factors_rows_sum_to_1(kind):
    q, k = 20 * torch.randn(2, 2, 3, 4, 5, 6, dtype=torch.float64)
    valid = torch.rand(2, 4, 5, generator=torch.Generator().manual_seed(0)) < 0.5
    valid[1] = False
    for given, sums in ((None, torch.ones(2)), (valid, torch.tensor([1.0, 0.0]))):
        s1, s2 = (t.flatten(2, 3) for t in FACTORS[kind](q, k.masked_fill(~valid[:, None, ..., None], 9.0), given))
        weights = s1 @ s2.mT
        assert (weights >= 0).all()
        torch.testing.assert_close(weights.sum(-1), sums.double()[:, None, None].expand(2, 3, 20))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", FACTORS)
def test_factors_half_precision(kind, dtype):
    """65,536 tokens: neither factor leaves the range of float16, and all round once."""
    q, k = torch.randn(2, 1, 1, 256, 256, 4).to(dtype)
    exact = FACTORS[kind](q.double(), k.double())
    for ours, theirs in zip(FACTORS[kind](q, k), exact, strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.double(), theirs, rtol=1.01 * torch.finfo(dtype).eps, atol=1e-7)


@pytest.mark.parametrize("kind", FACTORS)
def test_factors_gradients(kind):
    q, k = torch.randn(2, 1, 2, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    valid = torch.tensor([[[True, False, True], [True, True, False]]])
    assert torch.autograd.gradcheck(lambda q, k: FACTORS[kind](q, k, valid), (q, k))
