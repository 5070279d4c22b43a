"""Selectivity of a model: the correlation of its decays with image gradients.

The paper argues that trained decays are large in homogeneous regions and small across edges. The measure is, for each
attention layer and head, the Pearson correlation of 1 - decay with the image gradient across the same edge of the token
grid.
"""

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from ppma.explore import style
from ppma.explore.capture import AttentionRecord, capture_image
from ppma.explore.query import decays
from ppma.explore.subject import Subject
from ppma.masks import PolylineMask, PrefixedMask
from ppma.progress import track

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_CONSTANT = 1e-6  # standard deviation of decays, below which they do not depend on the image


@dataclass(frozen=True)
class Selectivity:
    """Correlation of 1 - decay with the image gradient for one head of one layer.

    Attributes:
        model: name of the model.
        layer: module name, such as "stages.0.blocks.1.attn".
        kind: "full" or "criss_cross".
        head: 1-based.
        horizontal: correlation of 1 - alpha with the horizontal gradient; NaN where undefined.
        vertical: correlation of 1 - beta with the vertical gradient; NaN where undefined.
        both: correlation over the edges of both directions; NaN where undefined.
        decay: mean decay; NaN for a grid of one token.
    """

    model: str
    layer: str
    kind: str
    head: int
    horizontal: float
    vertical: float
    both: float
    decay: float


@dataclass(frozen=True)
class Moments:
    """Sums over edges, from which correlations follow; sums of several images and directions add up.

    Attributes:
        count: number of edges.
        total: sum of 1 - decay.
        xx: sum of squares of 1 - decay, centred.
        yy: sum of squares of the gradient, centred.
        xy: sum of products of both, centred.
    """

    count: int = 0
    total: float = 0.0
    xx: float = 0.0
    yy: float = 0.0
    xy: float = 0.0

    def __add__(self, other: "Moments") -> "Moments":
        return Moments(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def correlation(self) -> float:
        """The Pearson correlation; NaN if decays or gradients are constant."""
        if min(self.xx, self.yy) <= _CONSTANT**2 * self.count:
            return float("nan")
        return max(-1.0, min(1.0, self.xy / (self.xx * self.yy) ** 0.5))


def moments(drop: Tensor, gradient: Tensor) -> Moments:
    """The moments of the edges of one direction in one image, centred on their own means.

    Args:
        drop: 1 - decay of each edge.
        gradient: the image gradient across each edge, same shape.

    Examples:
        >>> import torch
        >>> from ppma.explore.selectivity import moments
        >>> round(moments(torch.tensor([0.1, 0.2, 0.3]), torch.tensor([2.0, 4.0, 6.0])).correlation(), 6)
        1.0
    """
    if not drop.numel():
        return Moments()
    total = drop.double().sum().item()
    x, y = (values.flatten().double() - values.double().mean() for values in (drop, gradient))
    return Moments(len(x), total, (x @ x).item(), (y @ y).item(), (x @ y).item())


def edge_gradients(image: Tensor, grid: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Absolute differences of neighbouring tokens' colours, averaged over the channels.

    Args:
        image: (channels, height, width).
        grid: (H, W) tokens, each the mean of its pixels.

    Returns:
        Horizontal (H, W - 1) and vertical (H - 1, W) gradients.
    """
    tokens = F.adaptive_avg_pool2d(image, grid)
    return tokens.diff(dim=2).abs().mean(0), tokens.diff(dim=1).abs().mean(0)


def record_moments(record: AttentionRecord, image: Tensor) -> list[tuple[Moments, Moments]]:
    """The moments of the horizontal and the vertical edges, for each head of one layer.

    Args:
        record: from `capture_image`; its mask must be a polyline mask.
        image: (3, height, width), the image that the model saw.
    """
    mask = record.mask.mask if isinstance(record.mask, PrefixedMask) else record.mask
    if not isinstance(mask, PolylineMask):
        raise ValueError(f"mask: expected a polyline mask in {record.name}, got {type(mask).__name__}")
    across, down = edge_gradients(image, record.grid)
    shape = (record.q.shape[0], record.heads, *record.grid)
    alpha, beta = (decay.detach().exp().expand(shape)[0] for decay in decays(mask))
    return [(moments(1 - a[:, 1:], across), moments(1 - b[1:], down)) for a, b in zip(alpha, beta, strict=True)]


def selectivity(subject: Subject, images: Sequence[Image.Image]) -> list[Selectivity]:
    """Measure every layer and head of a model over all edges of all images.

    Decays and gradients are centred for each image and direction, so a difference between images or between the mean
    alpha and the mean beta does not count.

    Args:
        subject: from `ppma.explore.subject.open_subject`.
        images: at least one.

    Returns:
        One entry per layer and head, in the order of the layers.

    Examples:
        >>> from ppma.explore import images, selectivity, subject
        >>> model = subject.from_name("ppma_nano")
        >>> rows = selectivity.selectivity(model, [images.find_image("shapes")])
        >>> rows[0].layer, rows[0].head, rows[0].both  # decays of a new model are constant
        ('stages.0.blocks.0.attn', 1, nan)
    """
    heads: list[tuple[str, str, str, int]] = []
    sums: list[tuple[Moments, Moments]] = []
    for image in track(images, f"selectivity of {subject.name}"):
        prepared = subject.prepare(image)
        records = capture_image(subject.model, prepared)
        found = [pair for record in records for pair in record_moments(record, subject.shown(prepared))]
        heads = [
            (subject.name, record.name, record.kind, head + 1) for record in records for head in range(record.heads)
        ]
        sums = [(a + c, b + d) for (a, b), (c, d) in zip(sums, found, strict=True)] if sums else found
    return [summarise(*head, *pair) for head, pair in zip(heads, sums, strict=True)]


def summarise(model: str, layer: str, kind: str, head: int, horizontal: Moments, vertical: Moments) -> Selectivity:
    """The correlations of one head."""
    both = horizontal + vertical
    decay = 1 - both.total / both.count if both.count else float("nan")
    across, down, all_edges = (part.correlation() for part in (horizontal, vertical, both))
    return Selectivity(model, layer, kind, head, across, down, all_edges, decay)


def _mean(values: list[float]) -> float:
    defined = [value for value in values if value == value]
    return sum(defined) / len(defined) if defined else float("nan")


def selectivity_figure(rows: Sequence[Selectivity]) -> "Figure":
    """Draw the correlation of all edges by layer and head, one panel per model; undefined values are grey.

    Args:
        rows: from `selectivity`, of one or more models with the same layers.
    """
    models, layers = (list(dict.fromkeys(getattr(row, name) for row in rows)) for name in ("model", "layer"))
    heads = max(row.head for row in rows)
    figure = style.new_figure(2.4 + (0.4 + 0.55 * heads) * len(models), 1.4 + 0.32 * len(layers))
    axes = figure.subplots(1, len(models), squeeze=False, sharey=True)[0]
    for axis, model in zip(axes, models, strict=True):
        values = torch.full((len(layers), heads), torch.nan)
        for row in rows:
            if row.model == model:
                values[layers.index(row.layer), row.head - 1] = row.both
        drawn = style.heatmap(axis, values, model, limits=(-1.0, 1.0), colours=style.SIGNED_COLOURS)
        axis.set_aspect("auto")
        axis.set_xticks(range(heads), [str(head + 1) for head in range(heads)], fontsize=8)
        axis.set_xlabel("head", fontsize=9)
        style.write_numbers(axis, values, size=7)
    axes[0].set_yticks(range(len(layers)), [_layer_label(name) for name in layers], fontsize=8)
    figure.colorbar(drawn, ax=list(axes), label="correlation of 1 - decay\nwith the image gradient")
    return figure


def _layer_label(name: str) -> str:
    """Format stages.0.blocks.1.attn as "stage 1, block 2"; other names are kept."""
    parts = name.split(".")
    if len(parts) == 5 and (parts[0], parts[2]) == ("stages", "blocks"):
        return f"stage {int(parts[1]) + 1}, block {int(parts[3]) + 1}"
    return name


def _records(rows: Sequence[Selectivity], missing: object) -> list[dict[str, Any]]:
    return [{key: missing if value != value else value for key, value in asdict(row).items()} for row in rows]


def selectivity_csv(rows: Sequence[Selectivity]) -> str:
    """The table as CSV; undefined values are empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [*asdict(rows[0])], lineterminator="\n")
    writer.writeheader()
    writer.writerows(_records(rows, ""))
    return text.getvalue()


def selectivity_json(rows: Sequence[Selectivity]) -> str:
    """The table as a JSON list of objects; undefined values are null."""
    return json.dumps(_records(rows, None), indent=2) + "\n"


def selectivity_summary(rows: Sequence[Selectivity]) -> str:
    """One line per layer: the mean over the heads."""
    lines = []
    for model, layer in dict.fromkeys((row.model, row.layer) for row in rows):
        heads = [row for row in rows if (row.model, row.layer) == (model, layer)]
        both, decay = (_mean([getattr(row, name) for row in heads]) for name in ("both", "decay"))
        described = f"{both:+.3f}" if both == both else "undefined (constant)"
        lines.append(
            f"{model}, {_layer_label(layer)}: correlation {described}, mean decay {decay:.3f}, {len(heads)} heads"
        )
    return "\n".join(lines)
