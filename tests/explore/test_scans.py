"""Distances of neighbouring tokens along scans, worked out by hand on a 4 x 4 grid."""

import pytest
import torch

from ppma.explore import scans
from ppma.masks import curves

# Positions along a Hilbert curve of 4 x 4, as drawn in textbooks; ours may be a rotation or reflection of it.
HILBERT = torch.tensor([[0, 3, 4, 5], [1, 2, 7, 6], [14, 13, 8, 9], [15, 12, 11, 10]])


def test_neighbour_distances_row_scan():
    found = scans.neighbour_distances(curves.row_major(4, 4), (4, 4))
    assert found.horizontal.tolist() == [[1] * 3] * 4
    assert found.vertical.tolist() == [[4] * 4] * 3
    assert found.all().double().mean() == 2.5


def test_neighbour_distances_column_scan_rectangle():
    found = scans.neighbour_distances(curves.column_major(3, 5), (3, 5))
    assert found.horizontal.tolist() == [[3] * 4] * 3
    assert found.vertical.tolist() == [[1] * 5] * 2


def test_neighbour_distances_hilbert_scan():
    expected = torch.cat((HILBERT.diff(dim=0).flatten(), HILBERT.diff(dim=1).flatten())).abs()
    assert sorted(expected.tolist())[-4:] == [5, 5, 11, 13]
    found = scans.neighbour_distances(curves.hilbert(4, 4), (4, 4))
    assert sorted(found.all().tolist()) == sorted(expected.tolist())


@pytest.mark.parametrize("grid", [(1, 1), (1, 5), (4, 1), (4, 4), (3, 6)])
def test_scans_figure_colours_are_distances(grid):
    figure = scans.scans_figure(grid)
    panels = figure.axes[:5]
    expected = [scans.neighbour_distances(order, grid) for order in scans.scan_orders(grid).values()]
    expected.append(scans.polyline_distances(grid))
    for axis, distances in zip(panels, expected, strict=True):
        (edges,) = axis.collections
        assert edges.get_array().tolist() == distances.all().tolist()
        for (start, end), distance in zip(edges.get_segments(), edges.get_array(), strict=True):
            assert abs(start - end).sum() == 1
            assert distance >= 1
    assert panels[-1].get_title().startswith("polyline paths\n")
    if grid == (4, 4):
        assert panels[0].get_title() == "row scan\nmean 2.5, largest 4"
        assert panels[2].get_title().endswith("largest 13")
        assert panels[4].get_title() == "polyline paths\nmean 1, largest 1"
