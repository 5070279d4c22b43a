"""How figures look: colour maps that colour-blind readers can use, panels, the query's box, and files.

Figures are made without pyplot, so they need no display and leave no global state.
"""

import io
import tempfile
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
OUTSIDE = "0.85"  # where there is no value

# Okabe and Ito's colours, which stay apart for every kind of colour vision.
ORANGE, SKY, GREEN, BLUE, VERMILION, PURPLE = "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7"
QUERY_COLOUR = "red"
SMALLEST_BOX = 16  # of a panel's side, the part that a query's box has at least

FORMATS = (".png", ".pdf", ".svg")


def new_figure(width: float, height: float) -> "Figure":
    """A figure of so many inches whose parts keep clear of one another."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="compressed")


def bare(axis: "Axes", title: str = "", *, size: float = 10) -> None:
    """No ticks; a title."""
    axis.set_xticks([])
    axis.set_yticks([])
    if title:
        axis.set_title(title, fontsize=size)


def box(token: tuple[int, int], grid: tuple[int, int], *, scale: tuple[float, float] = (1.0, 1.0)) -> "Rectangle":
    """The frame of a token (row, column) of a grid, wider than the token where that would be too small to see.

    Args:
        token: (i, j).
        grid: (H, W).
        scale: how many pixels (high, wide) a token is.
    """
    from matplotlib.patches import Rectangle

    high, wide = scale
    margin = max(0.0, max(grid) / SMALLEST_BOX - 1) / 2  # in tokens
    corner = ((token[1] - margin) * wide - 0.5, (token[0] - margin) * high - 0.5)
    sides = ((1 + 2 * margin) * wide, (1 + 2 * margin) * high)
    return Rectangle(corner, *sides, fill=False, edgecolor=QUERY_COLOUR, linewidth=1.5)


def heat(
    axis: "Axes",
    values: Tensor,
    title: str,
    *,
    limits: tuple[float, float] = (0.0, 1.0),
    colours: str = WEIGHT_COLOURS,
    query: tuple[int, int] | None = None,
) -> "AxesImage":
    """Draw values (H, W) on a colour scale between the limits; NaN is grey."""
    from matplotlib import colormaps

    shades = colormaps[colours].with_extremes(bad=OUTSIDE)
    image = axis.imshow(values.numpy(), vmin=limits[0], vmax=limits[1], cmap=shades, interpolation="nearest")
    if query is not None:
        axis.add_patch(box(query, (values.shape[0], values.shape[1])))
    bare(axis, title)
    return image


def picture(axis: "Axes", image: Tensor, title: str) -> "AxesImage":
    """Draw an image (3, height, width) with values in [0, 1]."""
    drawn = axis.imshow(image.permute(1, 2, 0).numpy(), vmin=0, vmax=1, interpolation="nearest")
    bare(axis, title)
    return drawn


def rendered(figure: "Figure", *, dpi: int = 100) -> Image.Image:
    """The figure as an RGB image."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi)
    return Image.open(buffer).convert("RGB")


def save(figure: "Figure", path: Path, *, dpi: int = 110) -> None:
    """Write a figure; the ending of the path says how."""
    check_format(path, FORMATS)
    ending = path.suffix.lower()
    # Without a date and a version in it, the same figure is the same file.
    metadata: dict[str, Any] = {".png": {"Software": None}, ".pdf": {"CreationDate": None}, ".svg": {"Date": None}}
    buffer = io.BytesIO()
    figure.savefig(buffer, format=ending[1:], dpi=dpi, bbox_inches="tight", metadata=metadata[ending])
    write(path, buffer)


def write(path: Path, content: io.BytesIO) -> None:
    """Write a whole file, or say why not."""
    try:
        write_atomically(path, content.getbuffer())
    except OSError as error:
        raise ValueError(f"out: expected a file that can be written, got {path}: {error.strerror}") from None


def check_format(path: Path, formats: tuple[str, ...]) -> None:
    """A file that is to be written must have one of these endings."""
    if path.suffix.lower() not in formats:
        raise ValueError(f"out: expected a file that ends in {', '.join(formats)}, got {path}")


def check_out(path: Path, formats: tuple[str, ...]) -> None:
    """Before any work: the file has one of these endings and can be written."""
    check_format(path, formats)
    if path.is_dir():
        raise ValueError(f"out: expected a file, got the folder {path}")
    if not path.parent.is_dir():
        raise ValueError(f"out: expected a file in a folder that exists, got {path}")
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ValueError(f"out: expected a folder to write in, got {path.parent}: {error.strerror}") from None
