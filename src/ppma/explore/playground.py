"""The playground's computations: masks and scan steps for decays edited by hand on a small grid."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ppma.explore import style
from ppma.explore.query import check_query
from ppma.ops import checks, polyline_mask

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Token = tuple[int, int]
LARGEST = 8  # rows or columns
PRESETS = ("even", "wall", "random")


def preset_decays(preset: str, grid: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Initial decays alpha and beta, (H, W) each in float64.

    Args:
        preset: "even" (0.9 everywhere), "wall" (a vertical and a horizontal edge with gaps) or "random".
        grid: (H, W).
    """
    checks.one_of("preset", preset, PRESETS)
    H, W = grid
    if preset == "random":
        generator = torch.Generator().manual_seed(0)
        alpha, beta = (0.3 + 0.7 * torch.rand(2, H, W, generator=generator, dtype=torch.float64)).unbind(0)
        return alpha.mul(100).round() / 100, beta.mul(100).round() / 100
    alpha, beta = torch.full((2, H, W), 0.9, dtype=torch.float64).unbind(0)
    if preset == "wall":
        alpha[:-1, W // 2] = 0.1
        beta[H // 2, 2:] = 0.3
    return alpha.clone(), beta.clone()


def parse_decays(name: str, rows: Sequence[Sequence[object]]) -> Tensor:
    """Parse a table of decays to (H, W) in float64; a ValueError names the wrong cell."""
    if not rows or not rows[0]:
        raise ValueError(f"{name}: expected a table with at least one cell, got an empty one")
    columns = len(rows[0])
    if max(len(rows), columns) > LARGEST:
        raise ValueError(f"{name}: expected at most {LARGEST} x {LARGEST} cells, got {len(rows)} x {columns}")
    for i, row in enumerate(rows, start=1):
        if len(row) != columns:
            raise ValueError(f"{name}: expected {columns} cells in row {i} as in the first, got {len(row)}")
    values = [[_decay(name, cell, i, j) for j, cell in enumerate(row, start=1)] for i, row in enumerate(rows, start=1)]
    return torch.tensor(values, dtype=torch.float64)


def _decay(name: str, cell: object, row: int, column: int) -> float:
    try:
        value = float(str(cell))
    except ValueError:
        value = float("nan")
    if not 0 <= value <= 1:
        text = str(cell)[:20]
        raise ValueError(f"{name}: expected a number in [0, 1] in row {row}, column {column}, got {text}")
    return value


def query_masks(alpha: Tensor, beta: Tensor, query: Token) -> dict[str, Tensor]:
    """The mask's weights for one query, (H, W) for each path."""
    H, W = alpha.shape
    check_query(query, (H, W))
    token = query[0] * W + query[1]
    return {path: polyline_mask(alpha.log(), beta.log(), paths=path)[token].view(H, W) for path in ("v2h", "h2v", "2d")}


@dataclass(frozen=True)
class ScanStep:
    """One step of a scan.

    Attributes:
        title: description of the step.
        values: (H, W), NaN where not computed yet.
        written: tokens computed by this step.
    """

    title: str
    values: Tensor
    written: tuple[Token, ...]


def scan_steps(x: Tensor, alpha: Tensor, beta: Tensor, path: str) -> list[ScanStep]:
    """The steps of mask times x in O(N): along each axis a forward and a backward recurrence, and their sum minus x.

    V2H scans the columns and then the rows, H2V the rows and then the columns.

    Args:
        x: (H, W).
        alpha: (H, W).
        beta: (H, W).
        path: "v2h" or "h2v".

    Returns:
        All steps; the last one holds the result.
    """
    checks.one_of("path", path, ("v2h", "h2v"))
    H, W = x.shape
    steps = [ScanStep("input x", x.clone(), ())]
    current = x
    for axis in (0, 1) if path == "v2h" else (1, 0):
        decay, words = (beta, ("down", "up", "column")) if axis == 0 else (alpha, ("right", "left", "row"))
        forwards = _recurrence(current, decay, axis, f"{words[0]}: f = decay · previous f + x", steps)
        backwards = _recurrence(current.flip(axis), _behind(decay, axis), axis, f"{words[1]}: g likewise", steps, True)
        current = forwards + backwards.flip(axis) - current
        everywhere = tuple((i, j) for i in range(H) for j in range(W))
        steps.append(ScanStep(f"f + g - x: every {words[2]} is complete", current, everywhere))
    return steps


def _behind(decay: Tensor, axis: int) -> Tensor:
    """The decays in the order of the backward recurrence."""
    return decay.flip(axis).roll(1, axis)


def _recurrence(
    x: Tensor, decay: Tensor, axis: int, title: str, steps: list[ScanStep], flipped: bool = False
) -> Tensor:
    """`f[n] = decay[n] * f[n-1] + x[n]` along an axis, one step for each n (flipped back for display if `flipped`)."""
    f = torch.full_like(x, torch.nan)
    lines, values, edges = f.movedim(axis, 0), x.movedim(axis, 0), decay.movedim(axis, 0)
    extent, across = values.shape
    for n in range(extent):
        lines[n] = values[n] if n == 0 else edges[n] * lines[n - 1] + values[n]
        place = extent - 1 - n if flipped else n
        written = tuple((place, m) if axis == 0 else (m, place) for m in range(across))
        steps.append(ScanStep(title, (f.flip(axis) if flipped else f).clone(), written))
    return f


def masks_figure(masks: dict[str, Tensor], query: Token) -> "Figure":
    """Draw the V2H and H2V masks of one query and their mean, with numbers, on one colour scale."""
    titles = {"v2h": "V2H", "h2v": "H2V", "2d": "2D (mean of both)"}
    figure = style.new_figure(3.1 * len(masks), 3.1)
    axes = figure.subplots(1, len(masks), squeeze=False)[0]
    for axis, (path, values) in zip(axes, masks.items(), strict=True):
        shown = values / 2 if path == "2d" else values
        style.heatmap(axis, shown, titles[path], query=query)
        style.write_numbers(axis, shown, dark_below=0.6)
    return figure


def step_figure(step: ScanStep, largest: float) -> "Figure":
    """Draw one step of a scan with numbers and frames around the tokens it computed.

    Args:
        step: from `scan_steps`.
        largest: upper limit of the colour scale, common to all steps of a scan.
    """
    H, W = step.values.shape
    figure = style.new_figure(0.7 + 0.62 * W, 0.6 + 0.62 * H)
    axis = figure.subplots()
    style.heatmap(axis, step.values, step.title, limits=(0.0, largest))
    style.write_numbers(axis, step.values, dark_below=0.6 * largest)
    for token in step.written:
        axis.add_patch(style.token_box(token, (H, W)))
    return figure
