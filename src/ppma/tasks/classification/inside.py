"""A look inside a trained classifier: its decays, masks and attention for single images."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ppma.ops import criss_cross_attention, polyline_attention, polyline_mask

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_OPERATORS = {torch.ops.ppma.attention: polyline_attention, torch.ops.ppma.criss_cross: criss_cross_attention}


@dataclass(frozen=True)
class AttentionCall:
    """What one attention of a model computed for one image.

    Attributes:
        log_alpha: (heads, H, W).
        log_beta: (heads, H, W).
        mask: (H*W, H*W), paths averaged, mean over the heads.
        weights: (H*W, H*W), what each token takes from each token, mean over the heads.
    """

    log_alpha: Tensor
    log_beta: Tensor
    mask: Tensor
    weights: Tensor

    @property
    def grid(self) -> tuple[int, int]:
        """(H, W)."""
        return self.log_alpha.shape[-2], self.log_alpha.shape[-1]


class _Recorder(TorchDispatchMode):
    """Keeps the arguments of every masked attention that runs inside the context."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in _OPERATORS:
            self.calls.append((func.overloadpacket, args))
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def attention_calls(model: nn.Module, image: Tensor) -> list[AttentionCall]:
    """Every attention of a model with a polyline mask, in order, for one image (3, height, width).

    The result of an attention is linear in v, so with the unit vectors in place of v it gives its own weights.
    """
    model.eval()
    with _Recorder() as recorder:
        model(image[None])
    calls = []
    for operator, (q, k, _, log_alpha, log_beta, combine, paths, scale, *_) in recorder.calls:
        tokens = q.shape[-3] * q.shape[-2]
        units = torch.eye(tokens).view(*q.shape[-3:-1], tokens).expand(*q.shape[:-1], tokens)
        weights = _OPERATORS[operator](
            q.float(), k.float(), units.contiguous(), log_alpha, log_beta, combine=combine, paths=paths, scale=scale
        )
        mask = polyline_mask(log_alpha, log_beta, paths=paths) / (2 if paths == "2d" else 1)
        calls.append(
            AttentionCall(log_alpha[0], log_beta[0], mask[0].mean(0), weights[0].mean(0).reshape(tokens, tokens))
        )
    return calls


def look_figure(model: nn.Module, images: Sequence[Tensor], titles: Sequence[str]) -> "Figure":
    """Decays, mask and attention of the first and the last grid, one image (3, height, width) a row."""
    from matplotlib.figure import Figure

    names = ("decay alpha", "decay beta", "mask of the query", "attention of the query", "last full attention")
    figure = Figure(figsize=(12, 2.1 * len(images)), layout="constrained")
    axes = figure.subplots(len(images), 1 + len(names), squeeze=False)
    for row, image, title in zip(axes, images, titles, strict=True):
        calls = attention_calls(model, image)
        first = calls[0]
        last = next(call for call in reversed(calls) if min(call.grid) >= 4)
        query = _brightest(image, first.grid)
        panels = [
            image.mean(0),
            first.log_alpha.mean(0).exp(),
            first.log_beta.mean(0).exp(),
            first.mask[query].view(first.grid),
            first.weights[query].view(first.grid),
            last.weights[_brightest(image, last.grid)].view(last.grid),
        ]
        for axis, panel, name in zip(row, panels, (title, *names), strict=True):
            axis.imshow(panel.numpy(), cmap="gray" if axis is row[0] else "viridis")
            axis.set_title(name, fontsize=8)
            axis.set_xticks([])
            axis.set_yticks([])
        for axis, grid in ((row[3], first.grid), (row[4], first.grid), (row[5], last.grid)):
            axis.plot(*reversed(divmod(_brightest(image, grid), grid[1])), marker="s", color="red", fillstyle="none")
    return figure


def _brightest(image: Tensor, grid: tuple[int, int]) -> int:
    """The raster index of the token with the brightest pixels."""
    return int(nn.functional.adaptive_avg_pool2d(image.mean(0)[None], grid).argmax())


def confusion_figure(labels: Tensor, predicted: Tensor, classes: Sequence[str]) -> "Figure":
    """How often each class was taken for each; labels and predictions (N,)."""
    from matplotlib.figure import Figure

    counts = torch.bincount(labels * len(classes) + predicted, minlength=len(classes) ** 2).view(len(classes), -1)
    figure = Figure(figsize=(5, 4.6), layout="constrained")
    axis = figure.subplots()
    axis.imshow(counts.numpy(), cmap="Blues")
    for i, row in enumerate(counts.tolist()):
        for j, count in enumerate(row):
            if count:
                axis.text(j, i, str(count), ha="center", va="center", color="white" if i == j else "black")
    axis.set_xticks(range(len(classes)), classes)
    axis.set_yticks(range(len(classes)), classes)
    axis.set_xlabel("predicted")
    axis.set_ylabel("true")
    return figure
