"""Figures of the polyline paths between two tokens, and between all pairs of a small grid."""

import itertools
from typing import TYPE_CHECKING

from ppma.explore import style
from ppma.explore.query import check_query
from ppma.ops import checks, reference
from ppma.ops.options import Path

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Token = tuple[int, int]
LONGEST_SIDE = 10_000  # tokens in a row or column
LINES: dict[Path, tuple[str, str]] = {"v2h": (style.BLUE, "-"), "h2v": (style.VERMILION, "--")}


def path_points(query: tuple[int, ...], key: tuple[int, ...], *, reverse: bool = False) -> list[tuple[int, ...]]:
    """The corners of a polyline path from the key to the query on a grid of any dimension, both included.

    Args:
        query: one index per axis.
        key: one index per axis.
        reverse: follow the last axis first instead of the first axis; in 2D, H2V instead of V2H.

    Examples:
        >>> from ppma.explore.paths import path_points
        >>> path_points((0, 0, 0), (2, 3, 4))
        [(2, 3, 4), (0, 3, 4), (0, 0, 4), (0, 0, 0)]
    """
    axes = range(len(query))
    points = [tuple(key)]
    for axis in reversed(axes) if reverse else axes:
        points.append((*points[-1][:axis], query[axis], *points[-1][axis + 1 :]))
    return points


def path_tokens(query: Token, key: Token, path: Path) -> list[Token]:
    """The tokens on the path from the key to the query, both included, in order."""
    checks.one_of("path", path, tuple(LINES))
    for token in (query, key):
        check_query(token, (LONGEST_SIDE, LONGEST_SIDE))
    walked = [key]
    for (i, j), (k, l) in itertools.pairwise(path_points(query, key, reverse=path == "h2v")):
        down, right = (k > i) - (k < i), (l > j) - (l < j)
        walked += [(i + step * down, j + step * right) for step in range(1, abs(k - i) + abs(l - j) + 1)]
    return walked


def _draw_path(axis: "Axes", query: Token, key: Token, path: Path, *, width: float) -> None:
    colour, dash = LINES[path]
    rows, columns = zip(*path_tokens(query, key, path), strict=True)
    axis.plot(columns, rows, dash, color=colour, linewidth=width, label=path.upper(), solid_capstyle="round")


def _draw_tokens(axis: "Axes", grid: tuple[int, int], query: Token, key: Token, *, size: float) -> None:
    tokens = reference.tokens(*grid)
    axis.scatter([j for _, j in tokens], [i for i, _ in tokens], s=size, color="0.75", zorder=1)
    axis.scatter([key[1]], [key[0]], s=2.5 * size, color=style.GREEN, zorder=3, label="key", marker="s")
    axis.scatter([query[1]], [query[0]], s=2.5 * size, color=style.QUERY_COLOUR, zorder=4, label="query")
    style.grid_axis(axis, grid)


def path_figure(query: Token, key: Token, grid: tuple[int, int] = (6, 8)) -> "Figure":
    """Draw both paths from a key to a query.

    Args:
        query: (i, j).
        key: (k, l).
        grid: (H, W).
    """
    for token in (query, key):
        check_query(token, grid)
    side = min(0.45, style.PAGE / max(grid))
    figure = style.new_figure(max(2.6, side * grid[1]), side * grid[0] + 0.4)
    axis = figure.subplots()
    for path in LINES:
        _draw_path(axis, query, key, path, width=2)
    _draw_tokens(axis, grid, query, key, size=28)
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=style.SMALL, columnspacing=1.2)
    return figure


def path_gallery(side: int = 3, path: Path = "v2h") -> "Figure":
    """Draw the paths between all pairs of tokens, one small grid per entry of the mask: queries down, keys across."""
    if not 1 <= side <= 4:
        raise ValueError(f"side: expected 1 to 4 (there are side^4 paths), got {side}")
    tokens = reference.tokens(side, side)
    n = len(tokens)
    figure = style.new_figure(min(style.PAGE, 0.6 + 0.5 * n), min(style.PAGE, 0.6 + 0.5 * n))
    axes = figure.subplots(n, n, squeeze=False)
    for row, query in zip(axes, tokens, strict=True):
        for axis, key in zip(row, tokens, strict=True):
            _draw_path(axis, query, key, path, width=1.3)
            _draw_tokens(axis, (side, side), query, key, size=2.5)
        row[0].set_ylabel(f"({query[0] + 1},{query[1] + 1})", fontsize=style.SMALL)
    for axis, key in zip(axes[0], tokens, strict=True):
        axis.set_title(f"({key[0] + 1},{key[1] + 1})", fontsize=style.SMALL, pad=3)
    figure.supxlabel(f"key (square); {path.upper()} paths", fontsize=style.FONT)
    figure.supylabel("query (dot)", fontsize=style.FONT)
    return figure


def path_figure_3d(query: tuple[int, int, int], key: tuple[int, int, int], grid: tuple[int, int, int]) -> "Figure":
    """Draw both 3D paths from a key to a query: along the first axis first, and along the last axis first.

    Args:
        query: (depth, row, column).
        key: (depth, row, column).
        grid: (D, H, W).
    """
    import mpl_toolkits.mplot3d  # noqa: F401  # registers the projection

    figure = style.new_figure(3.6, 3.5)
    axis = figure.add_subplot(projection="3d", computed_zorder=False)
    D, H, W = grid
    depths, rows, columns = zip(*[(d, i, j) for d in range(D) for i in range(H) for j in range(W)], strict=True)
    axis.scatter(columns, depths, rows, s=6, color="0.75", depthshade=False, zorder=1)
    labels = ("depth, then rows, then columns", "columns, then rows, then depth")
    for reverse, (colour, dash), label in zip((False, True), LINES.values(), labels, strict=True):
        depth, row, column = zip(*path_points(query, key, reverse=reverse), strict=True)
        axis.plot(column, depth, row, dash, color=colour, linewidth=2, label=label, zorder=2)
    for token, colour, name, marker in ((key, style.GREEN, "key", "s"), (query, style.QUERY_COLOUR, "query", "o")):
        axis.scatter(
            [token[2]],
            [token[0]],
            [token[1]],
            s=40,
            color=colour,
            label=name,
            marker=marker,
            depthshade=False,
            zorder=3,
        )
    axis.set_zlim(H - 0.5, -0.5)
    for name, label, extent in (("x", "column", W), ("y", "depth", D), ("z", "row", H)):
        getattr(axis, f"set_{name}label")(label, fontsize=style.FONT, labelpad=-6)
        getattr(axis, f"set_{name}ticks")(range(extent), [str(index + 1) for index in range(extent)])
        axis.tick_params(name, labelsize=style.SMALL, pad=-2)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=style.SMALL)
    return figure
