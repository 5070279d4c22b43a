"""The dense forms for exporters compute what the operators compute, all outputs and layouts included."""

import pytest
import torch

from ppma.ops import decompositions
from ppma.testing import GRIDS, random_log_decay


def inputs(grid, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, *grid, 3, d, generator=generator, dtype=dtype).movedim(-2, 1) for d in (4, 4, 5))
    decays = [random_log_decay(2, 3, *grid, generator=generator, dtype=torch.float64) for _ in range(2)]
    return q, k, v, *decays


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("paths", ["v2h", "h2v", "2d"])
@pytest.mark.parametrize("combine", ["hadamard", "logit"])
@pytest.mark.parametrize("name", ["polyline_attention", "criss_cross_attention"])
def test_dense_operators(name, combine, paths, grid):
    operator = getattr(torch.ops.ppma, name).default
    arguments = (*inputs(grid), combine, paths, 0.3, "torch")
    expected, dense = operator(*arguments), decompositions.table()[operator](*arguments)
    if name == "criss_cross_attention":
        expected, dense = [expected], [dense]
    for ours, theirs in zip(dense, expected, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs)
    assert dense[0].movedim(1, -2).is_contiguous()


@pytest.mark.parametrize("paths", ["v2h", "h2v", "2d"])
@pytest.mark.parametrize("grid", GRIDS)
def test_dense_linear_attention(grid, paths):
    operator = torch.ops.ppma.linear_attention.default
    arguments = (*inputs(grid), paths, "torch")
    dense = decompositions.table()[operator](*arguments)
    torch.testing.assert_close(dense, operator(*arguments))
    assert dense.movedim(1, -2).is_contiguous()


@pytest.mark.parametrize("name", ["polyline_attention", "criss_cross_attention"])
def test_dense_half_precision(name):
    operator = getattr(torch.ops.ppma, name).default
    q, k, v, log_alpha, log_beta = inputs((4, 6), torch.bfloat16)
    arguments = (q, k, v, log_alpha.float(), log_beta.float(), "logit", "2d", 0.3, "torch")
    expected, dense = operator(*arguments), decompositions.table()[operator](*arguments)
    if name == "polyline_attention":
        expected, dense = expected[0], dense[0]
    assert dense.dtype == torch.bfloat16
    # both round the same float32 numbers once, which may differ in their last bits
    torch.testing.assert_close(dense, expected, rtol=torch.finfo(torch.bfloat16).eps, atol=1e-6)


def test_table_captured_graph():
    class Attend(torch.nn.Module):
        def forward(self, q, k, v, log_alpha, log_beta):
            full, _, _ = torch.ops.ppma.polyline_attention(q, k, v, log_alpha, log_beta, "hadamard", "2d", 0.3, "auto")
            return full + torch.ops.ppma.criss_cross_attention(
                q, k, full, log_alpha, log_beta, "logit", "2d", 0.3, "auto"
            )

    height, width = torch.export.Dim("height", min=2), torch.export.Dim("width", min=2)
    shapes = {2: height, 3: width}
    arguments = inputs((4, 6))
    program = torch.export.export(Attend(), arguments, dynamic_shapes=(shapes,) * 5)
    plain = program.run_decompositions(decompositions.table())
    assert not [node for node in plain.graph.nodes if "ppma" in str(node.target)]
    other = inputs((5, 3))
    torch.testing.assert_close(plain.module()(*other), Attend()(*other))
