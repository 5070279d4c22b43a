"""What the explorer shows, as functions of what the user chose; the page itself is in `app`."""

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

PICTURE_SIDE = 480  # pixels of the image that one clicks
FRAME = 3  # pixels of the query's frame, around the token
PANEL_DPI = 130
LOOKS = 4  # kept in memory


@dataclass(frozen=True)
class Look:
    """An image as a model saw it.

    Attributes:
        shown: (3, size, size) in [0, 1].
        records: of all its attentions.
    """

    shown: Tensor
    records: list[AttentionRecord]


@dataclass(frozen=True)
class Choice:
    """What the user chose to see; counts start at 0.

    Attributes:
        place: of the query in the image, (down, right), each in [0, 1).
        stage: of the model.
        block: of the stage.
        head: None for the mean over the heads.
        mask: see `WhatIf`, like `formulation` and `strength`.
        edges: take decays from the image's edges instead of the model.
    """

    place: tuple[float, float] = (0.5, 0.5)
    stage: int = 0
    block: int = 0
    head: int | None = None
    mask: str | None = None
    formulation: str | None = None
    strength: float = 1.0
    edges: bool = False


def look(subject: Subject, prepared: Tensor) -> Look:
    """Let the model see a prepared image (3, size, size)."""
    return Look(subject.shown(prepared), capture_image(subject.model, prepared))


class Looks:
    """What a model saw in the images that were asked for last; an older one it is shown again.

    A look has up to a hundred megabytes. So many are kept, however many visitors the page has.

    Args:
        subject: the model.
    """

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self._of_bytes = lru_cache(LOOKS)(self._look)

    def __call__(self, prepared: Tensor) -> Look:
        """The look at a prepared image (3, size, size)."""
        return self._of_bytes(prepared.numpy().tobytes(), tuple(prepared.shape))

    def _look(self, values: bytes, shape: tuple[int, ...]) -> Look:
        return look(self.subject, torch.frombuffer(bytearray(values), dtype=torch.float32).view(shape))


def query_at(place: tuple[float, float], grid: tuple[int, int]) -> tuple[int, int]:
    """The token at a place of the image, the nearest one for places outside."""
    row, column = (min(max(int(part * extent), 0), extent - 1) for part, extent in zip(place, grid, strict=True))
    return row, column


def changed_record(seen: Look, choice: Choice) -> AttentionRecord:
    """The chosen attention with all what-ifs."""
    record = find_record(seen.records, choice.stage, choice.block)
    edges = edge_decays(F.adaptive_avg_pool2d(seen.shown, record.grid)) if choice.edges else None
    return WhatIf(choice.mask, choice.formulation, edges, choice.strength)(record)


def panels_image(seen: Look, choice: Choice) -> Image.Image:
    """The six panels."""
    record = changed_record(seen, choice)
    query = query_at(choice.place, record.grid)
    panels = query_panels(record, query, head=choice.head)
    return style.rendered(query_figure(seen.shown, panels, query, columns=3), dpi=PANEL_DPI)


def clickable_image(seen: Look, choice: Choice) -> Image.Image:
    """The image, enlarged, with the query's box."""
    grid = find_record(seen.records, choice.stage, choice.block).grid
    pixels = (seen.shown.permute(1, 2, 0) * 255).round().byte().numpy()
    picture = Image.fromarray(pixels).resize((PICTURE_SIDE, PICTURE_SIDE), Image.Resampling.NEAREST)
    high, wide = token_size(seen.shown, grid)
    factor = PICTURE_SIDE / seen.shown.shape[1], PICTURE_SIDE / seen.shown.shape[2]
    row, column = query_at(choice.place, grid)
    corner = (column * wide * factor[1], row * high * factor[0])
    far = (corner[0] + wide * factor[1] - 1, corner[1] + high * factor[0] - 1)
    frame = (corner[0] - FRAME, corner[1] - FRAME, far[0] + FRAME, far[1] + FRAME)
    ImageDraw.Draw(picture).rectangle(frame, outline=style.QUERY_COLOUR, width=FRAME)
    return picture


def describe(subject: Subject, seen: Look, choice: Choice) -> str:
    """One line on what is shown."""
    record = find_record(seen.records, choice.stage, choice.block)
    row, column = query_at(choice.place, record.grid)
    head = "mean over the heads" if choice.head is None else f"head {choice.head + 1}"
    kind = record.kind.replace("_", "-")
    line = (
        f"Token ({row + 1}, {column + 1}) of {record.grid[0]} x {record.grid[1]}; {subject.name}, "
        f"stage {choice.stage + 1}, block {choice.block + 1} ({kind} attention), {head}."
    )
    if choice.edges:
        return line + " The decays are set from the image's edges, not learned."
    return line if subject.trained else line + " Weights are random: nothing here was learned."
