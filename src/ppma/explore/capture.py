"""Capture the inputs of a model's masked attention layers with forward hooks."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ppma.layers.attention import FORMULATIONS, AttentionInputs, PolylineAttention
from ppma.layers.retrofit import RetrofitAttention
from ppma.masks import StructuredMask
from ppma.ops.options import Combine

MaskedAttention = PolylineAttention | RetrofitAttention


@dataclass(frozen=True)
class AttentionRecord:
    """Inputs of one masked attention for a batch of images.

    Attributes:
        name: module name, such as "stages.0.blocks.1.attn".
        kind: "full", "criss_cross", "linear" or "decomposed".
        combine: "hadamard" or "logit".
        q: (B, heads, H, W, d), rotated (RoPE); (B, heads, 1, prefix + H*W, d) with prefix tokens.
        k: same shape as q, rotated.
        mask: structured mask over the same tokens.
        grid: (H, W).
        prefix: number of tokens before the grid, such as class tokens.
        mask_name: name of the mask in `ppma.masks.KINDS`.
    """

    name: str
    kind: str
    combine: Combine
    q: Tensor
    k: Tensor
    mask: StructuredMask
    grid: tuple[int, int]
    prefix: int = 0
    mask_name: str = "2d"

    @property
    def heads(self) -> int:
        """Number of attention heads."""
        return self.q.shape[1]


def _record(name: str, module: MaskedAttention, inputs: AttentionInputs) -> AttentionRecord:
    if isinstance(module, RetrofitAttention):
        combine = module.combine
    else:
        combine = FORMULATIONS[module.formulation].combine
    return AttentionRecord(
        name=name,
        kind=module.kind,
        combine=combine,
        q=inputs.q,
        k=inputs.k,
        mask=inputs.mask,
        grid=inputs.grid,
        prefix=inputs.prefix,
        mask_name=module.mask,
    )


@contextmanager
def capture(model: nn.Module) -> Iterator[list[AttentionRecord]]:
    """Record every masked attention that runs inside the context, in order.

    A hook reads the input of each `PolylineAttention` or `RetrofitAttention` and repeats its projections. The model
    itself is unchanged: its outputs are bit-identical inside and outside the context.

    Args:
        model: any module that contains `PolylineAttention`, or a ViT of timm after `ppma.retrofit`.

    Yields:
        A list that grows as the model runs.

    Examples:
        >>> import timm, torch, ppma
        >>> from ppma.explore import capture
        >>> model = timm.create_model("ppma_nano").eval()
        >>> with capture(model) as records:
        ...     _ = model(torch.randn(1, 3, 32, 32))
        >>> records[0].name, records[0].kind, records[0].grid
        ('stages.0.blocks.0.attn', 'criss_cross', (16, 16))
    """
    records: list[AttentionRecord] = []

    def hook(name: str) -> Any:
        def record(module: MaskedAttention, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            with torch.no_grad():
                records.append(_record(name, module, module.inputs(*args, **kwargs)))

        return record

    handles = [
        module.register_forward_pre_hook(hook(name), with_kwargs=True)
        for name, module in model.named_modules()
        if isinstance(module, MaskedAttention)
    ]
    try:
        yield records
    finally:
        for handle in handles:
            handle.remove()


def capture_image(model: nn.Module, image: Tensor) -> list[AttentionRecord]:
    """Run a model in evaluation mode on one image and record every masked attention.

    Args:
        model: any module that contains `PolylineAttention`, or a ViT of timm after `ppma.retrofit`.
        image: (3, height, width), normalised.

    Examples:
        >>> import timm, torch
        >>> from ppma.explore import capture_image
        >>> records = capture_image(timm.create_model("ppma_nano"), torch.randn(3, 32, 32))
        >>> records[-1].name, records[-1].kind, records[-1].grid
        ('stages.3.blocks.0.attn', 'full', (2, 2))
    """
    was_training = model.training
    try:
        with capture(model.eval()) as records, torch.no_grad():
            model(image[None])
    finally:
        model.train(was_training)
    if not records:
        raise ValueError(
            f"model: expected masked attention (PolylineAttention, or a ViT after ppma.retrofit) in "
            f"{type(model).__name__}, found none"
        )
    return records


def find_record(records: list[AttentionRecord], stage: int, block: int) -> AttentionRecord:
    """The record of one block of a backbone, or of a plain ViT, which has one stage.

    Args:
        records: from `capture` or `capture_image`.
        stage: 0-based.
        block: 0-based within the stage.
    """
    name = f"stages.{stage}.blocks.{block}.attn"
    for record in records:
        if record.name.endswith(name) or (stage == 0 and record.name == f"blocks.{block}.attn"):
            return record
    names = ", ".join(record.name for record in records)
    raise ValueError(f"stage, block: expected an attention of the model ({names}), got {name}")
