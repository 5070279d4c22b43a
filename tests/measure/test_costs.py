"""The growth that the documentation shows is counted, and is what the paper says."""

import itertools

import pytest
import torch

from ppma.measure import costs
from ppma.ops import backends, reference
from ppma.ops.options import AttentionOptions

NAIVE, DECOMPOSED, ALGORITHM_1, SCAN = costs.METHODS


def test_methods_agree():
    log_alpha, log_beta = -torch.rand(2, 5, 6, dtype=torch.float64)
    x = torch.rand(5, 6, 2, dtype=torch.float64)
    expected = NAIVE.run(x, log_alpha, log_beta)
    for method in costs.METHODS[1:]:
        torch.testing.assert_close(method.run(x, log_alpha, log_beta), expected)


def test_naive_count_sum_of_path_lengths():
    side = 5
    tokens = reference.tokens(side, side)
    distances = sum(abs(i - k) + abs(j - l) for (i, j), (k, l) in itertools.product(tokens, repeat=2))
    joining_and_applying = 2 * side**4  # row part times column part, and mask times x
    assert costs.count(NAIVE, side) == distances + joining_and_applying


@pytest.mark.parametrize(
    ("method", "power", "sides"),
    [(NAIVE, 2.5, (6, 12)), (DECOMPOSED, 2.0, (16, 32)), (ALGORITHM_1, 1.5, (16, 32)), (SCAN, 1.0, (16, 32))],
    ids=lambda value: getattr(value, "name", None),
)
def test_count_exponents(method, power, sides):
    counts = tuple(costs.count(method, side) for side in sides)
    # Lower-order terms still show at these sizes: the paths' mean length is (side - 1/side) * 2/3, for one.
    assert abs(costs.exponent(sides, counts) - power) < 0.15


def test_attention_no_n_by_n_tensor():
    """A 48 x 48 grid has 5.3 M scores for each head; the tiles must stay below that."""
    side, d = 48, 8
    q, k, v = torch.randn(3, 1, 8, side, side, d)
    log_alpha, log_beta = -torch.rand(2, 1, 8, side, side)
    for combine in ("hadamard", "logit"):
        options = AttentionOptions(combine, "2d", 1.0)
        with costs.CountMultiplications() as counter:
            out, stats, first = backends.pytorch.polyline_attention(q, k, v, log_alpha, log_beta, options)
            backends.pytorch.polyline_attention_backward(
                torch.ones_like(out), q, k, v, log_alpha, log_beta, out, stats, first, options
            )
        assert counter.largest <= 1 << 24 < 8 * (side * side) ** 2


def test_linear_attention_no_n_by_d_by_dv_tensor():
    side, d = 64, 64
    q, k, v = torch.randn(3, 1, 2, side, side, d)
    log_alpha, log_beta = -torch.rand(2, 1, 2, side, side)
    with costs.CountMultiplications() as counter:
        backends.pytorch.linear_attention(q, k, v, log_alpha, log_beta, "2d")
    assert counter.largest <= 1 << 24 < 2 * side * side * d * d
