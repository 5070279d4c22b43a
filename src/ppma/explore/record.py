"""What the explorer's page needs of one image: the picture, the prediction, and the inputs of every attention layer.

The page computes decays, masks and attention of any query from it. Tensors are float16 in base64; the query vectors are
multiplied by the scale of the attention.
"""

import base64
import io
import re
from typing import Any, TypedDict

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from ppma.explore.capture import AttentionRecord, capture
from ppma.explore.gallery import edge_decays
from ppma.explore.query import decays
from ppma.explore.subject import Subject
from ppma.layers.factors import FACTORS
from ppma.masks import curves

MOST_CLASSES = 5
OPACITY = 115  # of the overlay, of 255


class ImageRecord(TypedDict):
    """The record of one image, as JSON.

    Attributes:
        name: of the image.
        picture: data URL of the image as the model sees it.
        prediction: class names with their probabilities, or with their shares of a segmented image, the largest first;
            empty if the classes are unknown.
        overlay: data URL of the classes of the pixels, transparent; empty if the model does not segment.
        layers: one entry for each masked attention, in order.
        edges: "HxW" -> log-decays `alpha` and `beta`, (H, W), set from the image's edges.
        orders: "HxW" -> the visiting orders of the Hilbert mask's two scans.
    """

    name: str
    picture: str
    prediction: list[tuple[str, float]]
    overlay: str
    layers: list[dict[str, Any]]
    edges: dict[str, dict[str, str]]
    orders: dict[str, list[tuple[int, ...]]]


def image_record(subject: Subject, image: Image.Image, name: str) -> ImageRecord:
    """Run the model on an image, once, and record what the page draws.

    Args:
        subject: the model.
        image: any size, RGB.
        name: of the image.
    """
    prepared = subject.prepare(image)
    with capture(subject.model) as records, torch.no_grad():
        logits = subject.model(prepared[None])
    shown = subject.shown(prepared)
    grids = dict.fromkeys(record.grid for record in records)
    return {
        "name": name,
        "picture": _data_url(_bytes(shown)),
        "prediction": _prediction(logits, subject.classes),
        "overlay": _overlay(logits[0].argmax(0), subject) if subject.colours else "",
        "layers": [_layer(record) for record in records],
        "edges": {_key(grid): _named(edge_decays(F.adaptive_avg_pool2d(shown, grid))) for grid in grids},
        "orders": {
            _key((H, W)): [curves.hilbert(H, W), curves.transposed(curves.hilbert(W, H), H, W)] for H, W in grids
        },
    }


def _key(grid: tuple[int, int]) -> str:
    return f"{grid[0]}x{grid[1]}"


def _half(values: Tensor) -> str:
    return base64.b64encode(values.half().cpu().contiguous().numpy().astype("<f2").tobytes()).decode()


def _named(log_decays: tuple[Tensor, Tensor]) -> dict[str, str]:
    return dict(zip(("alpha", "beta"), map(_half, log_decays), strict=True))


def _bytes(shown: Tensor) -> Tensor:
    return (shown.permute(1, 2, 0) * 255).round().byte()


def _data_url(pixels: Tensor) -> str:
    """Pixels (height, width, 3 or 4), uint8, as a PNG."""
    buffer = io.BytesIO()
    Image.fromarray(pixels.numpy()).save(buffer, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _prediction(logits: Tensor, classes: tuple[str, ...]) -> list[tuple[str, float]]:
    if not classes or logits.shape[:2] != (1, len(classes)):
        return []
    if logits.ndim == 2:
        shares = logits[0].float().softmax(0)
    else:
        labels = logits[0].argmax(0).flatten()
        shares = labels.bincount(minlength=len(classes)) / len(labels)
    most, indices = shares.topk(min(MOST_CLASSES, len(classes)))
    return [(classes[index], round(share, 4)) for share, index in zip(most.tolist(), indices.tolist(), strict=True)]


def _overlay(labels: Tensor, subject: Subject) -> str:
    """Labels (height, width) in the colours of their classes."""
    painted = [(0, 0, 0, 0) if colour is None else (*colour, OPACITY) for colour in subject.colours]
    return _data_url(torch.tensor(painted, dtype=torch.uint8)[labels])


def _layer(record: AttentionRecord) -> dict[str, Any]:
    """The inputs of one attention; low-rank kinds have their factors S1 and S2 in place of q and k."""
    if record.kind in FACTORS:
        q, k = FACTORS[record.kind](record.q, record.k, None)
    else:
        q, k = record.q * record.q.shape[-1] ** -0.5, record.k
    log_decays = [decay.expand(1, record.heads, *record.grid)[0] for decay in decays(record.mask)]
    return {
        "label": _label(record.name),
        "kind": record.kind,
        "mask": record.mask_name,
        "combine": record.combine,
        "grid": record.grid,
        "heads": record.heads,
        "prefix": record.prefix,
        "dim": q.shape[-1],
        "q": _half(q[0].flatten(1, 2)),
        "k": _half(k[0].flatten(1, 2)),
        **_named((log_decays[0], log_decays[1])),
        "open": all(bool((decay == 0).all()) for decay in log_decays),
    }


def _label(name: str) -> str:
    """A readable, 1-based name: "stages.0.blocks.1.attn" is "stage 1, block 2"."""
    parts = re.findall(r"(stage|block)s\.(\d+)", name)
    return ", ".join(f"{word} {int(index) + 1}" for word, index in parts) or name
