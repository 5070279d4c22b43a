"""Figures of a trained segmentation model: what it finds in an image, and how its mask and attention get there."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

from ppma.data.drawing import colour_of
from ppma.data.preprocessing import image_tensor
from ppma.explore import capture, query_panels, style
from ppma.explore.attention import decay_limits
from ppma.explore.query import QueryPanels
from ppma.models import Checkpoint
from ppma.ops import checks
from ppma.tasks.dense.overlay import draw_classes
from ppma.tasks.segmentation.scoring import probabilities
from ppma.tasks.segmentation.weights import load_segmenter

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SMALLEST = -3.0  # log10 of the smallest weight that is drawn


def look_figure(path: str | Path | Checkpoint, image: Image.Image, wanted: str) -> "Figure":
    """Draw the classes of an image, and decays, mask and attention of a query on the finest grid.

    The query is the token with the highest probability of a class, the head the one whose mask reaches furthest from
    there. Mask and attention are drawn relative to their maximum, on a logarithmic scale.

    Args:
        path: weights of a segmentation model, see `load_segmenter`.
        image: RGB.
        wanted: name of the query's class.
    """
    model, config, classes = load_segmenter(path)
    checks.one_of("wanted", wanted, classes)
    with torch.inference_mode(), capture(model) as records:
        scores = probabilities(model, image_tensor(image), config.data, config.test)
    first = records[0]
    place = int(F.adaptive_avg_pool2d(scores[classes.index(wanted)][None], first.grid).argmax())
    query = place // first.grid[1], place % first.grid[1]
    panels = max((query_panels(first, query, head=head) for head in range(first.heads)), key=_reach)

    figure = style.new_figure(12, 2.6)
    axes = figure.subplots(1, 5, gridspec_kw={"width_ratios": [1.35, 1, 1, 1, 1]})
    colours = config.data.layout.palette or [colour_of(index) for index in range(len(classes))]
    axes[0].imshow(np.asarray(draw_classes(image, scores.argmax(0), classes, colours)))
    style.hide_ticks(axes[0], "classes", size=9)
    limits = decay_limits([panels])
    style.heatmap(axes[1], panels.alpha, "decay α (horizontal)", limits=limits, colours=style.DECAY_COLOURS)
    drawn = style.heatmap(axes[2], panels.beta, "decay β (vertical)", limits=limits, colours=style.DECAY_COLOURS)
    figure.colorbar(drawn, ax=axes[2], shrink=0.75)
    for axis, values, title in (
        (axes[3], panels.mask, "mask of the query, log10"),
        (axes[4], panels.masked_attention, "masked attention, log10"),
    ):
        shown = (values / values.max()).clamp(min=10**_SMALLEST).log10()
        drawn = style.heatmap(axis, shown, title, limits=(_SMALLEST, 0.0), query=query)
    figure.colorbar(drawn, ax=axes[4], shrink=0.75)
    return figure


def _reach(panels: QueryPanels) -> float:
    return panels.mask.sum().item()
