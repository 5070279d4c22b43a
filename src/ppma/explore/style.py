"""Shared drawing code: colour-blind safe colours, panels, the query's box, saving figures.

Figures do not use pyplot, so they need no display and have no global state.
"""

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image
from torch import Tensor

from ppma.atomic import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage
    from matplotlib.patches import Rectangle

DECAY_COLOURS = "cividis"
WEIGHT_COLOURS = "viridis"
SIGNED_COLOURS = "PuOr"
OUTSIDE = "0.85"  # colour of NaN

# The Okabe-Ito palette, distinguishable with colour vision deficiency.
ORANGE, SKY, GREEN, BLUE, VERMILION, PURPLE = "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7"
QUERY_COLOUR = "red"
SMALLEST_BOX = 16  # a token's box has at least 1/16 of a panel's side

FORMATS = (".png", ".pdf", ".svg")


def new_figure(width: float, height: float) -> "Figure":
    """A figure with automatic layout; width and height in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="compressed")


def hide_ticks(axis: "Axes", title: str = "", *, size: float = 10) -> None:
    """Remove the ticks and set a title."""
    axis.set_xticks([])
    axis.set_yticks([])
    if title:
        axis.set_title(title, fontsize=size)


def grid_axis(axis: "Axes", grid: tuple[int, int], title: str = "") -> None:
    """Prepare an axis for a grid (H, W): tokens at integer positions, rows downwards, no ticks."""
    axis.set_xlim(-0.6, grid[1] - 0.4)
    axis.set_ylim(grid[0] - 0.4, -0.6)
    axis.set_aspect("equal")
    hide_ticks(axis, title)


def token_box(token: tuple[int, int], grid: tuple[int, int], *, scale: tuple[float, float] = (1.0, 1.0)) -> "Rectangle":
    """A frame around a token, enlarged if the token would be too small to see.

    Args:
        token: (i, j).
        grid: (H, W).
        scale: (height, width) of a token in pixels.
    """
    from matplotlib.patches import Rectangle

    high, wide = scale
    margin = max(0.0, max(grid) / SMALLEST_BOX - 1) / 2  # in tokens
    corner = ((token[1] - margin) * wide - 0.5, (token[0] - margin) * high - 0.5)
    sides = ((1 + 2 * margin) * wide, (1 + 2 * margin) * high)
    return Rectangle(corner, *sides, fill=False, edgecolor=QUERY_COLOUR, linewidth=1.5)


def heatmap(
    axis: "Axes",
    values: Tensor,
    title: str,
    *,
    limits: tuple[float, float] = (0.0, 1.0),
    colours: str = WEIGHT_COLOURS,
    query: tuple[int, int] | None = None,
) -> "AxesImage":
    """Draw values (H, W) as a heatmap; NaN is grey."""
    from matplotlib import colormaps

    shades = colormaps[colours].with_extremes(bad=OUTSIDE)
    image = axis.imshow(values.numpy(), vmin=limits[0], vmax=limits[1], cmap=shades, interpolation="nearest")
    if query is not None:
        axis.add_patch(token_box(query, (values.shape[0], values.shape[1])))
    hide_ticks(axis, title)
    return image


def show_image(axis: "Axes", image: Tensor, title: str) -> "AxesImage":
    """Draw an image (3, height, width) with values in [0, 1]."""
    drawn = axis.imshow(image.permute(1, 2, 0).numpy(), vmin=0, vmax=1, interpolation="nearest")
    hide_ticks(axis, title)
    return drawn


def write_numbers(axis: "Axes", values: Tensor, *, size: float = 8, dark_below: float | None = None) -> None:
    """Write each value (H, W) that is not NaN into its cell.

    Args:
        axis: with a heatmap of the values.
        values: (H, W).
        size: font size.
        dark_below: cells with smaller values are dark and get white text.
    """
    for i, row in enumerate(values.tolist()):
        for j, value in enumerate(row):
            if value == value:
                colour = "w" if dark_below is not None and value < dark_below else "k"
                axis.text(j, i, f"{value:.2f}", ha="center", va="center", fontsize=size, color=colour)


def render(figure: "Figure", *, dpi: int = 100) -> Image.Image:
    """Render a figure to an RGB image."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi)
    return Image.open(buffer).convert("RGB")


def save(figure: "Figure", path: Path, *, dpi: int = 110) -> None:
    """Write a figure; the suffix selects the format."""
    ending = path.suffix.lower()
    # Without dates and versions, files are reproducible.
    metadata: dict[str, Any] = {".png": {"Software": None}, ".pdf": {"CreationDate": None}, ".svg": {"Date": None}}
    buffer = io.BytesIO()
    figure.savefig(buffer, format=ending[1:], dpi=dpi, bbox_inches="tight", metadata=metadata[ending])
    write(path, buffer)


def write(path: Path, content: io.BytesIO) -> None:
    """Write a file; a failure is a ValueError for the user."""
    try:
        write_atomically(path, content.getbuffer())
    except OSError as error:
        raise ValueError(f"out: expected a file that can be written, got {path}: {error.strerror}") from None
