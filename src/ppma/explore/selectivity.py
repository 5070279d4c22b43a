"""Selectivity of a model: the correlation of its decays with image gradients.

The paper argues that trained decays are large in homogeneous regions and small across edges. The measure is, for each
attention layer and head, the Pearson correlation of 1 - decay with the image gradient across the same edge of the token
grid.
"""

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

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
    """Correlation of 1 - decay with the image gradient for one head of one layer, averaged over images.

    Attributes:
        layer: module name, such as "stages.0.blocks.1.attn".
        kind: "full" or "criss_cross".
        head: 1-based.
        horizontal: 1 - alpha with the horizontal gradient; NaN where undefined.
        vertical: 1 - beta with the vertical gradient; NaN where undefined.
        both: all edges, each direction centred on its own mean; NaN where undefined.
        decay: mean decay.
    """

    layer: str
    kind: str
    head: int
    horizontal: float
    vertical: float
    both: float
    decay: float


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


def correlation(x: Tensor, y: Tensor) -> float:
    """The Pearson correlation of two tensors of equal size; NaN if either is constant or has fewer than two elements.

    Examples:
        >>> import torch
        >>> from ppma.explore.selectivity import correlation
        >>> round(correlation(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2.0, 4.0, 6.0])), 6)
        1.0
    """
    return _cosine(_centred(x), _centred(y))


def _centred(values: Tensor) -> Tensor:
    flat = values.flatten().double()
    return flat - flat.mean() if len(flat) else flat


def _cosine(x: Tensor, y: Tensor) -> float:
    lengths = x.norm(), y.norm()
    if len(x) < 2 or min(lengths) <= _CONSTANT * len(x) ** 0.5:
        return float("nan")
    return (x @ y / (lengths[0] * lengths[1])).clamp(-1, 1).item()


def record_selectivity(record: AttentionRecord, image: Tensor) -> list[Selectivity]:
    """The selectivity of each head of one layer for one image.

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
    found = []
    for head in range(record.heads):
        drops = 1 - alpha[head, :, 1:], 1 - beta[head, 1:, :]
        # Centred by direction: a difference of the mean alpha and the mean beta is not selectivity.
        both = (torch.cat([_centred(part) for part in parts]) for parts in (drops, (across, down)))
        inside = torch.cat([part.flatten() for part in drops])
        found.append(
            Selectivity(
                record.name,
                record.kind,
                head + 1,
                correlation(drops[0], across),
                correlation(drops[1], down),
                _cosine(*both),
                1 - inside.double().mean().item() if inside.numel() else float("nan"),
            )
        )
    return found


def selectivity(subject: Subject, images: Sequence[Image.Image]) -> list[Selectivity]:
    """Measure every layer and head of a model, averaged over images.

    Args:
        subject: from `ppma.explore.subject.open_subject`.
        images: at least one.

    Returns:
        One entry per layer and head, in the order of the layers. An average leaves out images without a defined
        correlation (constant decays or a uniform image) and is NaN if there is no other.

    Examples:
        >>> from ppma.explore import images, selectivity, subject
        >>> model = subject.from_name("ppma_nano")
        >>> rows = selectivity.selectivity(model, [images.find_image("shapes")])
        >>> rows[0].layer, rows[0].head, rows[0].both  # decays of a new model are constant
        ('stages.0.blocks.0.attn', 1, nan)
    """
    by_image = []
    for image in track(images, "selectivity"):
        prepared = subject.prepare(image)
        shown = subject.shown(prepared)
        by_image.append(
            [row for record in capture_image(subject.model, prepared) for row in record_selectivity(record, shown)]
        )
    measures = ("horizontal", "vertical", "both", "decay")
    averaged = []
    for rows in zip(*by_image, strict=True):
        means = (_mean([getattr(row, name) for row in rows]) for name in measures)
        averaged.append(Selectivity(rows[0].layer, rows[0].kind, rows[0].head, *means))
    return averaged


def _mean(values: list[float]) -> float:
    defined = [value for value in values if value == value]
    return sum(defined) / len(defined) if defined else float("nan")


def selectivity_figure(rows: Sequence[Selectivity], title: str) -> "Figure":
    """Draw the correlation of all edges by layer and head; undefined values are grey.

    Args:
        rows: from `selectivity`.
        title: such as the model's name.
    """
    layers = list(dict.fromkeys(row.layer for row in rows))
    heads = max(row.head for row in rows)
    values = torch.full((len(layers), heads), torch.nan)
    for row in rows:
        values[layers.index(row.layer), row.head - 1] = row.both
    figure = style.new_figure(2.6 + 0.55 * heads, 1.4 + 0.32 * len(layers))
    axis = figure.subplots()
    drawn = style.heatmap(axis, values, title, limits=(-1.0, 1.0), colours=style.SIGNED_COLOURS)
    axis.set_aspect("auto")
    axis.set_yticks(range(len(layers)), [_layer_label(name) for name in layers], fontsize=8)
    axis.set_xticks(range(heads), [str(head + 1) for head in range(heads)], fontsize=8)
    axis.set_xlabel("head", fontsize=9)
    for i, line in enumerate(values.tolist()):
        for j, value in enumerate(line):
            if value == value:  # not NaN
                axis.text(j, i, f"{value:.2f}", ha="center", va="center", fontsize=7)
    figure.colorbar(drawn, ax=axis, label="correlation of 1 - decay\nwith the image gradient")
    return figure


def _layer_label(name: str) -> str:
    """Format stages.0.blocks.1.attn as "stage 1, block 2"; other names are kept."""
    parts = name.split(".")
    if len(parts) == 5 and (parts[0], parts[2]) == ("stages", "blocks"):
        return f"stage {int(parts[1]) + 1}, block {int(parts[3]) + 1}"
    return name


def selectivity_csv(rows: Sequence[Selectivity]) -> str:
    """The table as CSV; undefined values are empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [*asdict(rows[0])], lineterminator="\n")
    writer.writeheader()
    writer.writerows([{key: "" if value != value else value for key, value in asdict(row).items()} for row in rows])
    return text.getvalue()


def selectivity_json(rows: Sequence[Selectivity]) -> str:
    """The table as a JSON list of objects; undefined values are null."""
    cleaned = [{key: None if value != value else value for key, value in asdict(row).items()} for row in rows]
    return json.dumps(cleaned, indent=2) + "\n"


def selectivity_summary(rows: Sequence[Selectivity]) -> str:
    """One line per layer: the mean over the heads."""
    lines = []
    for layer in dict.fromkeys(row.layer for row in rows):
        heads = [row for row in rows if row.layer == layer]
        both, decay = (_mean([getattr(row, name) for row in heads]) for name in ("both", "decay"))
        told = f"{both:+.3f}" if both == both else "undefined (constant)"
        lines.append(f"{_layer_label(layer)}: correlation {told}, mean decay {decay:.3f}, {len(heads)} heads")
    return "\n".join(lines)
