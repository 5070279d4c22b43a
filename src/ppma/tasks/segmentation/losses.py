"""Losses of pixels: cross-entropy, focal and dice, with weights of classes."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ppma.data.label_maps import IGNORED


def pixel_loss(
    scores: Tensor,
    labels: Tensor,
    balance: float = 0.0,
    mean: str = "labelled",
    *,
    weights: Tensor | None = None,
    gamma: float = 0.0,
) -> Tensor:
    """Cross-entropy of pixels, or the focal loss, averaged with a weight for each class.

    Args:
        scores: (B, classes, H, W), logits.
        labels: (B, H, W), int64.
        balance: a class with n pixels in the batch has the weight n ** -balance.
        mean: average over the "labelled" pixels, or over "all".
        weights: (classes,), further factors on the weights; None for 1.
        gamma: the cross-entropy of a pixel with probability p of its class has the factor (1 - p) ** gamma.
    """
    pixels = _count(labels, scores.shape[1])
    weight = pixels.clamp(min=1).float() ** -balance
    if weights is not None:
        weight = weight * weights.to(weight)
    if gamma == 0:
        total = F.cross_entropy(scores.float(), labels, weight, ignore_index=IGNORED, reduction="sum")
    else:
        entropy = F.cross_entropy(scores.float(), labels, ignore_index=IGNORED, reduction="none")
        of_pixel = weight[labels.where(labels != IGNORED, 0)]  # the entropy of ignored pixels is 0
        wrong = (-torch.expm1(-entropy)).clamp(min=torch.finfo(entropy.dtype).tiny)  # 0 has no gradient for gamma < 1
        total = (of_pixel * entropy * wrong**gamma).sum()
    average = total / (weight * pixels).sum().clamp(min=torch.finfo(weight.dtype).tiny)  # 0 without labels
    return average * (pixels.sum() / labels.numel()) if mean == "all" else average


def dice_loss(scores: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
    """1 - the Dice coefficient 2 |P G| / (|P| + |G|) of probabilities P and labels G, averaged over classes.

    Pixels of the whole batch count together. Ignored pixels and classes without pixels in the batch are left out.

    Args:
        scores: (B, classes, H, W), logits.
        labels: (B, H, W), int64.
        weights: (classes,), weights of the classes in the average; None for 1.
    """
    classes = scores.shape[1]
    pixels = _count(labels, classes)
    labelled = labels != IGNORED
    probabilities = scores.float().softmax(1).masked_fill(~labelled[:, None], 0)
    target = labels.where(labelled, 0)  # ignored pixels add their 0 to the first class
    own = probabilities.gather(1, target[:, None]).flatten()
    shared = own.new_zeros(classes).index_add(0, target.flatten(), own)
    dice = 2 * shared / (probabilities.sum((0, 2, 3)) + pixels).clamp(min=torch.finfo(own.dtype).tiny)
    weight = (pixels > 0).to(own) if weights is None else (pixels > 0) * weights.to(own)
    return (weight * (1 - dice)).sum() / weight.sum().clamp(min=torch.finfo(own.dtype).tiny)  # 0 without labels


def _count(labels: Tensor, classes: int) -> Tensor:
    """Pixels of each class, (classes,).

    Counted in each row of pixels, then added: `bincount` reads the largest label, so on a GPU the host would wait for
    it, and one counter for all pixels of a class would be contended.
    """
    rows = labels.where(labels != IGNORED, classes).flatten(0, -2)  # (rows, W)
    places = rows + (classes + 1) * torch.arange(len(rows), device=rows.device)[:, None]
    counts = rows.new_zeros(len(rows) * (classes + 1))
    counts.scatter_add_(0, places.flatten(), torch.ones_like(places).flatten())
    return counts.view(len(rows), -1).sum(0)[:classes]
