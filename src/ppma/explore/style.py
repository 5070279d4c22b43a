"""Shared drawing code: colour-blind safe colours, fonts, panels, the query's box, saving figures.

Figures do not use pyplot, so they need no display and have no global state. They are drawn in their printed size, at
most a page wide, in the font sizes of a caption.
"""

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image
from torch import Tensor

from ppma.atomic import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colorbar import Colorbar
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

PAGE = 7.0  # inches: the text width of a page; a column has 3.4
FONT, SMALL = 8, 7  # points: titles and labels; ticks and legends
FORMATS = (".png", ".pdf", ".svg")
# Editable text in PDF instead of Type 3 fonts, which publishers refuse; the same names in every SVG.
_SAVING: dict[Any, Any] = {"pdf.fonttype": 42, "svg.hashsalt": "ppma"}


def new_figure(width: float, height: float) -> "Figure":
    """A figure with automatic layout; width and height in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="compressed")


def columns_of(count: int, width: float) -> int:
    """Columns for a number of panels in a figure of this width: panels of an inch or more, in even rows."""
    most = max(1, min(count, int(width / 1.1)))
    rows = -(-count // most)
    return -(-count // rows)


def colour_bar(
    figure: "Figure", drawn: "AxesImage", axes: "Axes | np.ndarray", label: str = "", **options: Any
) -> "Colorbar":
    """Add a colour bar in the figures' fonts beside one or several panels that share a scale."""
    shared: Any = list(axes) if isinstance(axes, np.ndarray) else axes
    bar = figure.colorbar(drawn, ax=shared, **{"shrink": 0.85, "aspect": 18, "pad": 0.02, **options})
    bar.ax.tick_params(labelsize=SMALL, length=2, pad=2)
    bar.outline.set_linewidth(0.5)
    if label:
        bar.set_label(label, fontsize=FONT)
    return bar


def hide_ticks(axis: "Axes", title: str = "", *, size: float = FONT) -> None:
    """Remove the ticks and set a title."""
    axis.set_xticks([])
    axis.set_yticks([])
    for side in axis.spines.values():
        side.set_linewidth(0.5)
    if title:
        axis.set_title(title, fontsize=size, pad=3)


def grid_axis(axis: "Axes", grid: tuple[int, int], title: str = "", *, size: float = FONT) -> None:
    """Prepare an axis for a grid (H, W): tokens at integer positions, rows downwards, no ticks."""
    axis.set_xlim(-0.6, grid[1] - 0.4)
    axis.set_ylim(grid[0] - 0.4, -0.6)
    axis.set_aspect("equal")
    hide_ticks(axis, title, size=size)


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
    return Rectangle(corner, *sides, fill=False, edgecolor=QUERY_COLOUR, linewidth=1.2)


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


def write_numbers(axis: "Axes", values: Tensor, *, size: float = SMALL, dark_below: float | None = None) -> None:
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


def save(figure: "Figure", path: Path, *, width: float | None = None, dpi: int = 200) -> None:
    """Write a figure; the suffix selects the format.

    Args:
        figure: of any size.
        path: of the file.
        width: in inches, exactly; None for the figure's own, cropped to its content.
        dpi: pixels per inch of .png files, and of images in the others.
    """
    import matplotlib
    from matplotlib.transforms import Bbox

    ending = path.suffix.lower()
    # Without dates and versions, files are reproducible.
    metadata: dict[str, Any] = {".png": {"Software": None}, ".pdf": {"CreationDate": None}, ".svg": {"Date": None}}
    buffer = io.BytesIO()
    with matplotlib.rc_context(_SAVING):
        area: Any = "tight"
        if width is not None:
            figure.set_size_inches(width, figure.get_figheight() * width / figure.get_figwidth())
            figure.draw_without_rendering()
            content = figure.get_tightbbox()
            area = Bbox.from_extents(0, content.y0 - 0.03, width, content.y1 + 0.03)
        figure.savefig(buffer, format=ending[1:], dpi=dpi, bbox_inches=area, pad_inches=0.03, metadata=metadata[ending])
    write(path, buffer)


def write(path: Path, content: io.BytesIO) -> None:
    """Write a file; a failure is a ValueError for the user."""
    try:
        write_atomically(path, content.getbuffer())
    except OSError as error:
        raise ValueError(f"out: expected a file that can be written, got {path}: {error.strerror}") from None
