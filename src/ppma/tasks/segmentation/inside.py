"""A trained segmentation model from inside: what it finds in an image, and its decays, mask and attention."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from PIL import Image

from ppma.data.drawing import colour_of
from ppma.data.preprocessing import image_tensor
from ppma.explore import capture, query_panels, style
from ppma.explore.attention import decay_limits, token_size
from ppma.explore.query import QueryPanels
from ppma.explore.subject import Subject
from ppma.models import Checkpoint
from ppma.ops import checks
from ppma.tasks.dense.overlay import Colour, paint_classes, painted_colours
from ppma.tasks.segmentation.config import ScoringConfig
from ppma.tasks.segmentation.model import MainScores
from ppma.tasks.segmentation.scoring import probabilities
from ppma.tasks.segmentation.weights import load_segmenter

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SMALLEST = -3.0  # log10 of the smallest weight that is drawn
_MOST_CLASSES = 4  # in the legend


def segmenter_subject(backbone: Subject, path: str | Path) -> Subject:
    """The whole model of the weights whose backbone is given, for the explorer to show its prediction."""
    model, config, classes = load_segmenter(path)
    return replace(backbone, model=MainScores(model).eval(), classes=classes, colours=tuple(_colours(config, classes)))


def look_figure(
    path: str | Path | Checkpoint, image: Image.Image, wanted: str | None = None, *, width: float = style.PAGE
) -> "Figure":
    """Draw the classes of an image, and decays, mask and attention of a query on the finest grid.

    The query is the token with the highest probability of a class, the head the one whose mask reaches furthest from
    there. Mask and attention are drawn relative to their maximum, on a logarithmic scale.

    Args:
        path: weights of a segmentation model, see `load_segmenter`.
        image: RGB.
        wanted: name of the query's class; None for the largest one that is not background.
        width: of the figure, in inches.
    """
    model, config, classes = load_segmenter(path)
    if wanted is not None:
        checks.one_of("wanted", wanted, classes)
    with torch.inference_mode(), capture(model) as records:
        scores = probabilities(model, image_tensor(image), config.data, config.test)
    labels, first, painted = scores.argmax(0), records[0], _colours(config, classes)
    counts = labels.flatten().bincount(minlength=len(classes))
    found = [index for index in counts.argsort(descending=True).tolist() if counts[index] and painted[index]]
    asked = classes.index(wanted) if wanted is not None else found[0] if found else int(counts.argmax())
    place = int(F.adaptive_avg_pool2d(scores[asked][None], first.grid).argmax())
    query = place // first.grid[1], place % first.grid[1]
    panels = max((query_panels(first, query, head=head) for head in range(first.heads)), key=_reach)

    figure = style.new_figure(width, 0.56 * width)
    upper, lower = figure.subplots(2, 3)
    pixels = image_tensor(image)
    style.show_image(upper[0], pixels, "image and query")
    upper[0].add_patch(style.token_box(query, first.grid, scale=token_size(pixels, first.grid)))
    limits = decay_limits([panels])
    style.heatmap(upper[1], panels.alpha, "decay α (horizontal)", limits=limits, colours=style.DECAY_COLOURS)
    drawn = style.heatmap(upper[2], panels.beta, "decay β (vertical)", limits=limits, colours=style.DECAY_COLOURS)
    style.colour_bar(figure, drawn, upper[2])
    style.show_image(lower[0], image_tensor(paint_classes(image, labels, painted)), "prediction")
    _legend(lower[0], [(classes[index], painted[index]) for index in found[:_MOST_CLASSES]])
    for axis, values, title in (
        (lower[1], panels.mask, "mask of the query"),
        (lower[2], panels.masked_attention, "attention with the mask"),
    ):
        shown = (values / values.max()).clamp(min=10**_SMALLEST).log10()
        drawn = style.heatmap(axis, shown, title, limits=(_SMALLEST, 0.0), query=query)
    style.colour_bar(figure, drawn, lower[2], "log10, 0 at the maximum")
    return figure


def _colours(config: ScoringConfig, classes: tuple[str, ...]) -> list[Colour | None]:
    palette = config.data.layout.palette or [colour_of(index) for index in range(len(classes))]
    return painted_colours(classes, palette)


def _legend(axis: "Axes", rows: Sequence[tuple[str, Colour | None]]) -> None:
    from matplotlib.patches import Patch

    patches = [Patch(facecolor=f"#{bytes(colour).hex()}", label=name) for name, colour in rows if colour]
    if patches:
        axis.legend(handles=patches, fontsize=style.SMALL, loc="lower right", framealpha=0.8, handlelength=1)


def _reach(panels: QueryPanels) -> float:
    return panels.mask.sum().item()
