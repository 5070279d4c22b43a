"""The files of `ppma eval --out`: metrics, classes, confusion matrix, predictions."""

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from ppma.engine.task import Details
from ppma.outputs import csv_bytes, json_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FILES = ("metrics.json", "classes.csv", "confusion.csv", "confusion.png", "predictions.json")
_MOST_NUMBERS = 25  # classes whose matrix has numbers in its cells
_MOST_NAMES = 100  # classes whose matrix has names at its sides


def percent(parts: Tensor, totals: Tensor) -> list[float | None]:
    """Percentages of counts; None where the total is 0.

    Examples:
        >>> import torch
        >>> percent(torch.tensor([1, 0]), torch.tensor([4, 0]))
        [25.0, None]
    """
    pairs = zip(parts.tolist(), totals.tolist(), strict=True)
    return [100 * part / total if total else None for part, total in pairs]


def report_files(measured: dict[str, float], details: Details | None) -> dict[str, bytes]:
    """The contents of files by name, a part of `FILES`.

    Args:
        measured: the metrics.
        details: what else was found.
    """
    rows = details.classes if details else []
    files = {"metrics.json": json_bytes({"metrics": measured, "classes": rows})}
    if details is None:
        return files
    files["classes.csv"] = csv_bytes([*rows[0]], [[*row.values()] for row in rows])
    if details.predictions is not None:
        files["predictions.json"] = json_bytes(details.predictions)
    if details.confusion is not None:
        names = [row["class"] for row in rows]
        counts = zip(names, details.confusion.tolist(), strict=True)
        files["confusion.csv"] = csv_bytes(["true / predicted", *names], [[name, *row] for name, row in counts])
        picture = io.BytesIO()
        confusion_figure(details.confusion, names).savefig(picture, dpi=120)
        files["confusion.png"] = picture.getvalue()
    return files


def confusion_figure(confusion: Tensor, classes: Sequence[str]) -> "Figure":
    """Plot a confusion matrix: colours are shares of the true class, numbers are counts, or percentages of large ones.

    Args:
        confusion: counts [label, prediction], (classes, classes).
        classes: class names.
    """
    from matplotlib.figure import Figure

    size = len(classes)
    side = min(16.0, 2.5 + 0.32 * size)
    figure = Figure(figsize=(side, side), layout="compressed")
    axis = figure.subplots()
    shares = confusion.double() / confusion.sum(1, keepdim=True).clamp(min=1)
    axis.imshow(shares.numpy(), cmap="Blues", vmin=0, vmax=1)
    if size <= _MOST_NUMBERS:
        large = confusion.max() >= 1000
        for i, j in confusion.nonzero().tolist():
            share = shares[i, j].item()
            text = f"{100 * share:.0f}" if large else str(confusion[i, j].item())
            axis.text(j, i, text, ha="center", va="center", fontsize=8, color="white" if share > 0.5 else "black")
        axis.set_title("% of the true class" if large else "counts", fontsize=9)
    if size <= _MOST_NAMES:
        names = [name if len(name) <= 24 else f"{name[:23]}…" for name in classes]
        axis.set_xticks(range(size), names, rotation=90 if max(map(len, names)) > 2 else 0, fontsize=8)
        axis.set_yticks(range(size), names, fontsize=8)
    axis.set_xlabel("predicted")
    axis.set_ylabel("true")
    return figure
