"""The explorer's images and text as functions of the user's choices; the page itself is in `app`."""

from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw
from torch import Tensor

from ppma.explore import style
from ppma.explore.attention import query_figure, token_size
from ppma.explore.capture import AttentionRecord, capture_image, find_record
from ppma.explore.gallery import edge_decays
from ppma.explore.query import WhatIf, query_panels
from ppma.explore.subject import Subject

PICTURE_SIDE = 480  # pixels of the clickable image
FRAME = 3  # pixels, width of the frame around the query
PANEL_DPI = 130
CACHE_SIZE = 4  # images


@dataclass(frozen=True)
class CapturedImage:
    """An image and the attention records of a model for it.

    Attributes:
        shown: (3, size, size) in [0, 1].
        records: one per attention layer.
    """

    shown: Tensor
    records: list[AttentionRecord]


@dataclass(frozen=True)
class Choice:
    """The user's choices; indices are 0-based.

    Attributes:
        place: position of the query in the image, (y, x), each in [0, 1).
        stage: stage of the model.
        block: block of the stage.
        head: attention head; None for the mean over the heads.
        mask: as in `WhatIf`.
        formulation: as in `WhatIf`.
        strength: as in `WhatIf`.
        edges: use decays set from the image's edges instead of the model's.
    """

    place: tuple[float, float] = (0.5, 0.5)
    stage: int = 0
    block: int = 0
    head: int | None = None
    mask: str | None = None
    formulation: str | None = None
    strength: float = 1.0
    edges: bool = False


def capture_prepared(subject: Subject, prepared: Tensor) -> CapturedImage:
    """Run the model on a prepared image (3, size, size)."""
    return CapturedImage(subject.shown(prepared), capture_image(subject.model, prepared))


class CaptureCache:
    """A least-recently-used cache of captured images, shared by all visitors.

    One captured image takes up to a hundred megabytes.

    Args:
        subject: the model.
    """

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self._of_bytes = lru_cache(CACHE_SIZE)(self._capture)

    def __call__(self, prepared: Tensor) -> CapturedImage:
        """The captured image for a prepared image (3, size, size)."""
        return self._of_bytes(prepared.numpy().tobytes(), tuple(prepared.shape))

    def _capture(self, values: bytes, shape: tuple[int, ...]) -> CapturedImage:
        return capture_prepared(self.subject, torch.frombuffer(bytearray(values), dtype=torch.float32).view(shape))


def query_at(place: tuple[float, float], grid: tuple[int, int]) -> tuple[int, int]:
    """The token at a position of the image, clamped to the grid."""
    row, column = (min(max(int(part * extent), 0), extent - 1) for part, extent in zip(place, grid, strict=True))
    return row, column


def changed_record(captured: CapturedImage, choice: Choice) -> AttentionRecord:
    """The chosen attention with the chosen changes."""
    record = find_record(captured.records, choice.stage, choice.block)
    edges = edge_decays(F.adaptive_avg_pool2d(captured.shown, record.grid)) if choice.edges else None
    return WhatIf(choice.mask, choice.formulation, edges, choice.strength)(record)


def panels_image(captured: CapturedImage, choice: Choice) -> Image.Image:
    """Render the six panels."""
    record = changed_record(captured, choice)
    query = query_at(choice.place, record.grid)
    panels = query_panels(record, query, head=choice.head)
    return style.render(query_figure(captured.shown, panels, query, columns=3), dpi=PANEL_DPI)


def clickable_image(captured: CapturedImage, choice: Choice) -> Image.Image:
    """The enlarged image with a frame around the query."""
    grid = find_record(captured.records, choice.stage, choice.block).grid
    pixels = (captured.shown.permute(1, 2, 0) * 255).round().byte().numpy()
    picture = Image.fromarray(pixels).resize((PICTURE_SIDE, PICTURE_SIDE), Image.Resampling.NEAREST)
    high, wide = token_size(captured.shown, grid)
    factor = PICTURE_SIDE / captured.shown.shape[1], PICTURE_SIDE / captured.shown.shape[2]
    row, column = query_at(choice.place, grid)
    corner = (column * wide * factor[1], row * high * factor[0])
    far = (corner[0] + wide * factor[1] - 1, corner[1] + high * factor[0] - 1)
    frame = (corner[0] - FRAME, corner[1] - FRAME, far[0] + FRAME, far[1] + FRAME)
    ImageDraw.Draw(picture).rectangle(frame, outline=style.QUERY_COLOUR, width=FRAME)
    return picture


def describe(subject: Subject, captured: CapturedImage, choice: Choice) -> str:
    """Describe what is shown in one line."""
    record = find_record(captured.records, choice.stage, choice.block)
    row, column = query_at(choice.place, record.grid)
    head = "mean over the heads" if choice.head is None else f"head {choice.head + 1}"
    kind = record.kind.replace("_", "-")
    line = (
        f"Token ({row + 1}, {column + 1}) of {record.grid[0]} x {record.grid[1]}; {subject.name}, "
        f"stage {choice.stage + 1}, block {choice.block + 1} ({kind} attention), {head}."
    )
    if choice.edges:
        return line + " Decays are set from the image's edges, not learned."
    return line if subject.trained else line + " The weights are random, not learned."
