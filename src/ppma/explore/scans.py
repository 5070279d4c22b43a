"""Scan orders and the distance of neighbouring tokens along them (the paper's Fig. 2)."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ppma.explore import style
from ppma.masks import curves

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Grid = tuple[int, int]


@dataclass(frozen=True)
class NeighbourDistances:
    """Distances along a scan between tokens that are adjacent on the grid.

    Attributes:
        horizontal: (H, W - 1), between (i, j) and (i, j + 1).
        vertical: (H - 1, W), between (i, j) and (i + 1, j).
    """

    horizontal: Tensor
    vertical: Tensor

    def all(self) -> Tensor:
        """All distances, (2HW - H - W,)."""
        return torch.cat((self.horizontal.flatten(), self.vertical.flatten()))


def neighbour_distances(order: tuple[int, ...], grid: Grid) -> NeighbourDistances:
    """Measure how far a scan separates adjacent tokens.

    Args:
        order: raster indices of the tokens in the order of the scan, such as `ppma.masks.curves.hilbert(H, W)`.
        grid: (H, W).

    Examples:
        >>> from ppma.explore.scans import neighbour_distances
        >>> from ppma.masks import curves
        >>> distances = neighbour_distances(curves.row_major(4, 4), (4, 4))
        >>> distances.horizontal.max().item(), distances.vertical.max().item()
        (1, 4)
    """
    position = torch.empty(len(order), dtype=torch.long)
    position[torch.tensor(order)] = torch.arange(len(order))
    position = position.view(grid)
    return NeighbourDistances(position.diff(dim=1).abs(), position.diff(dim=0).abs())


def polyline_distances(grid: Grid) -> NeighbourDistances:
    """Distances along polyline paths: the Manhattan distance, 1 for all adjacent tokens."""
    H, W = grid
    return NeighbourDistances(torch.ones(H, W - 1, dtype=torch.long), torch.ones(H - 1, W, dtype=torch.long))


def scan_orders(grid: Grid) -> dict[str, tuple[int, ...]]:
    """The scans of the paper's ablation: both scans of the cross scan, and the Hilbert scan with its transpose."""
    H, W = grid
    return {
        "row scan": curves.row_major(H, W),
        "column scan": curves.column_major(H, W),
        "Hilbert scan": curves.hilbert(H, W),
        "Hilbert, transposed": curves.transposed(curves.hilbert(W, H), H, W),
    }


def scans_figure(grid: Grid = (8, 8), *, width: float = style.PAGE) -> "Figure":
    """Draw each scan, and each edge of the grid in the colour of its distance along the scan; polyline paths last.

    Args:
        grid: (H, W).
        width: of the figure, in inches.
    """
    orders = scan_orders(grid)
    distances = {name: neighbour_distances(order, grid) for name, order in orders.items()}
    distances["polyline paths"] = polyline_distances(grid)
    largest = max([int(d.all().max()) for d in distances.values() if d.all().numel()], default=1)
    columns = style.columns_of(len(distances), width / 1.25)  # titles are long
    rows = -(-len(distances) // columns)
    figure = style.new_figure(width, rows * (width / columns * grid[0] / grid[1] + 0.3))
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for axis in axes[len(distances) :]:
        axis.set_axis_off()
    for axis, (name, found) in zip(axes, distances.items(), strict=False):
        drawn = _draw_edges(axis, grid, found, largest)
        if name in orders:
            down, across = zip(*(divmod(token, grid[1]) for token in orders[name]), strict=True)
            axis.plot(across, down, color=style.VERMILION, linewidth=0.9, zorder=3)
        style.grid_axis(axis, grid, f"{name}\n{_summary(found)}", size=style.SMALL)
    style.colour_bar(figure, drawn, axes, "distance along the scan", aspect=18 * rows)
    return figure


def _summary(found: NeighbourDistances) -> str:
    if not found.all().numel():
        return "one token"
    return f"mean {found.all().double().mean():.3g}, largest {found.all().max()}"


def _draw_edges(axis, grid: Grid, found: NeighbourDistances, largest: int):  # type: ignore[no-untyped-def]
    from matplotlib.collections import LineCollection
    from matplotlib.colors import LogNorm

    H, W = grid
    across = [((j, i), (j + 1, i)) for i in range(H) for j in range(W - 1)]
    down = [((j, i), (j, i + 1)) for i in range(H - 1) for j in range(W)]
    norm = LogNorm(1, max(largest, 2))
    edges = LineCollection([*across, *down], cmap=style.WEIGHT_COLOURS, norm=norm, linewidths=3, zorder=2)
    edges.set_array(found.all().numpy())
    return axis.add_collection(edges)
