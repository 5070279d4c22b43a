"""The factors of the mask as matrices."""

import pytest
import torch

from ppma import testing
from ppma.explore import matrices
from ppma.ops import reference


@pytest.mark.parametrize("grid", testing.GRIDS)
def test_mask_factors_product_is_reference(grid):
    generator = torch.Generator().manual_seed(0)
    decays = [testing.random_log_decay(*grid, generator=generator, dtype=torch.float64) for _ in range(2)]
    horizontal, vertical = matrices.mask_factors(*decays)
    torch.testing.assert_close(horizontal @ vertical, reference.polyline_mask(*decays, paths="v2h"))


def test_mask_factors_2x2():
    alpha = torch.tensor([[0.9, 0.5], [0.9, 0.25]])
    beta = torch.tensor([[0.9, 0.9], [0.2, 0.1]])
    horizontal, vertical = matrices.mask_factors(alpha.log(), beta.log())
    torch.testing.assert_close(
        horizontal, torch.tensor([[1, 0.5, 0, 0], [0.5, 1, 0, 0], [0, 0, 1, 0.25], [0, 0, 0.25, 1]])
    )
    torch.testing.assert_close(vertical, torch.tensor([[1, 0, 0.2, 0], [0, 1, 0, 0.1], [0.2, 0, 1, 0], [0, 0.1, 0, 1]]))


def test_factors_figure_values():
    log_alpha, log_beta = -torch.rand(2, 2, 3, generator=torch.Generator().manual_seed(0))
    horizontal, vertical = matrices.mask_factors(log_alpha, log_beta)
    axes = [axis for axis in matrices.factors_figure(log_alpha, log_beta).axes if axis.images]
    for axis, expected in zip(axes, (horizontal @ vertical, horizontal, vertical), strict=True):
        drawn = torch.as_tensor(axis.images[0].get_array().filled(0))  # zeros are drawn as missing
        torch.testing.assert_close(drawn, expected)
        assert len(axis.lines) == 2  # between the two rows of the grid, both ways
