"""What the mask should cost on a GPU: a prediction from compiled kernels and data sheets; nothing here was measured.

A launch takes at least as long as its busiest part: memory, matrix units, instruction issue, special functions. That is
a bound from below, for the kernels with a mask and for the same kernels compiled without one. The rest of a model is
bounded in the same way, operation by operation, as it runs eagerly in bfloat16, with the fused kernels for rotary
embeddings, decay heads and depthwise convolutions, of which the bytes count.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any
from unittest import mock

import timm
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

import ppma.models  # noqa: F401  (registers the models)
from ppma.bench.gpu import cases
from ppma.bench.gpu.work import Work, bytes_of, without_mask, work_of
from ppma.bench.report import Report
from ppma.ops import backends
from ppma.ops.backends import triton as triton_backend
from ppma.ops.backends.triton.launch import Launch, recording
from ppma.ops.options import COMBINES, Combine


@dataclass(frozen=True)
class Gpu:
    """Peak rates, by the second.

    Attributes:
        name: of the data sheet.
        target: of the compiler.
        bandwidth: bytes.
        matrix: half-precision FLOPs of matrix units.
        instructions: of single threads, by four schedulers of a multiprocessor.
        special: special functions of single threads.
    """

    name: str
    target: str
    bandwidth: float
    matrix: float
    instructions: float
    special: float

    def seconds(self, work: Work) -> dict[str, float]:
        """The least time that each part of a launch takes."""
        return {
            "memory": work.bytes / self.bandwidth,
            "matrix": work.matrix / self.matrix,
            "instructions": work.instructions / self.instructions,
            "special functions": work.special / self.special,
        }


# Multiprocessors x lanes x clock.
GPUS = (
    Gpu("A100 SXM 80 GB", "sm_80", 2.039e12, 312e12, 108 * 128 * 1.41e9, 108 * 16 * 1.41e9),
    Gpu("H100 SXM", "sm_90", 3.35e12, 989e12, 132 * 128 * 1.83e9, 132 * 16 * 1.83e9),
)


@dataclass(frozen=True)
class Stage:
    """The attention of one stage of a backbone at 224 x 224.

    Attributes:
        blocks: how many.
        side: of the grid.
        heads: of each block.
        d: channels of a head.
        full: full attention instead of criss-cross attention.
    """

    blocks: int
    side: int
    heads: int
    d: int
    full: bool

    def __str__(self) -> str:
        kind = "full" if self.full else "criss-cross"
        return f"{kind} {self.side}x{self.side}, {self.heads} x {self.d}"

    def launches(self, batch: int, combine: Combine, backward: bool, save: bool = True) -> list[Launch]:
        """The launches of one block; a forward pass keeps what the backward pass will need only if `save`."""
        tensors = cases.attention_inputs(batch, self.heads, self.side, self.side, self.d, torch.bfloat16)
        record = cases.record_attention if self.full else cases.record_criss_cross
        with recording() as launches:
            record(tensors, combine, backward, save)
        return launches


# Name of the model, and its stages.
MODELS = {
    "PPMA-T": (
        "ppma_tiny",
        (Stage(2, 56, 4, 16, False), Stage(2, 28, 4, 32, False), Stage(8, 14, 8, 32, True), Stage(2, 7, 16, 32, True)),
    ),
    "PPMA-S": (
        "ppma_small",
        (
            Stage(3, 56, 4, 16, False),
            Stage(4, 28, 4, 32, False),
            Stage(18, 14, 8, 32, False),
            Stage(4, 7, 16, 32, True),
        ),
    ),
    "PPMA-B": (
        "ppma_base",
        (
            Stage(4, 56, 5, 16, False),
            Stage(8, 28, 5, 32, False),
            Stage(25, 14, 10, 32, False),
            Stage(8, 7, 16, 32, True),
        ),
    ),
}

BATCH = 64


def block_kinds() -> list[Stage]:
    """Every kind of attention block of the models, once."""
    kinds = (replace(stage, blocks=1) for _, stages in MODELS.values() for stage in stages)
    return list(dict.fromkeys(kinds))


def _bound(launches: Iterable[Launch], gpu: Gpu) -> float:
    return sum(max(gpu.seconds(work_of(launch, gpu.target)).values()) for launch in launches)


@dataclass(frozen=True)
class Prediction:
    """Attention of one block on one GPU.

    Attributes:
        masked: seconds.
        plain: seconds without a mask.
        bound: what most of the time is spent on.
    """

    masked: float
    plain: float
    bound: str

    @property
    def overhead(self) -> float:
        """Of the mask, in per cent."""
        return 100 * (self.masked / self.plain - 1)


@cache
def predict(
    stage: Stage, gpu: Gpu, combine: Combine, backward: bool, batch: int = BATCH, save: bool = True
) -> Prediction:
    """The bound of one block's attention, forward or backward alone; `save` as in `Stage.launches`."""
    launches = stage.launches(batch, combine, backward, save)
    plain = [bare for launch in launches if (bare := without_mask(launch)) is not None]
    parts = [gpu.seconds(work_of(launch, gpu.target)) for launch in launches]
    heaviest = max(parts, key=lambda part: max(part.values()))
    return Prediction(_bound(launches, gpu), _bound(plain, gpu), max(heaviest, key=lambda name: heaviest[name]))


class _Operations(TorchDispatchMode):
    """Bytes and matrix FLOPs of every operation but the attentions, which are predicted by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.works: list[Work] = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = operator(*args, **(kwargs or {}))
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        if not operator.is_view and operator.namespace != "ppma" and operator.__name__ not in _FREE:
            count = flop_registry.get(operator.overloadpacket)
            flops = 0 if count is None else count(*args, **(kwargs or {}), out_val=out)
            self.works.append(Work(sum(t.numel() * t.element_size() for t in (*given, *made)), float(flops)))
        return out


_FREE = ("empty.memory_format", "empty_strided.default", "detach.default", "_unsafe_view.default")


@cache
def _operations(model: str, mask: bool, train: bool, batch: int) -> tuple[Work, ...]:
    """The work of a model outside its attention operators, on the meta device."""
    with torch.device("meta"):
        options: dict[str, Any] = {} if mask else {"mask": "none"}
        backbone = timm.create_model(model, **options).bfloat16().train(train)
        images = torch.empty((batch, 3, 224, 224), dtype=torch.bfloat16)
        with _Operations() as operations, torch.set_grad_enabled(train), _composed_kernels() as launches:
            out = backbone(images)
            if train:
                out.backward(torch.empty_like(out))
    return (*operations.works, *(Work(bytes=bytes_of(launch)) for launch in launches))


@contextmanager
def _composed_kernels() -> Iterator[list[Launch]]:
    """Record the Triton kernels around the attention, which "auto" runs on a GPU, on the meta device."""
    with (
        mock.patch.dict(backends._COMPOSED, meta="triton"),
        mock.patch.object(triton_backend, "unsupported_reason", return_value=None),
        recording() as launches,
    ):
        yield launches


def model_seconds(name: str, gpu: Gpu, combine: Combine, mask: bool, train: bool, batch: int = BATCH) -> float:
    """A whole model: its attention, and everything else operation by operation.

    Args:
        name: one of MODELS.
        gpu: where.
        combine: of the mask.
        mask: with it, or without.
        train: forward and backward pass, or forward alone.
        batch: images.
    """
    model, stages = MODELS[name]
    others = sum(max(gpu.seconds(work).values()) for work in _operations(model, mask, train, batch))
    for stage in stages:
        for backward in (False, True) if train else (False,):
            found = predict(replace(stage, blocks=1), gpu, combine, backward, batch, save=train)
            others += stage.blocks * (found.masked if mask else found.plain)
    return others


def block_report(gpu: Gpu, combine: Combine, batch: int = BATCH) -> Report:
    """Every kind of attention block of the three models."""
    report = Report(
        f"Predicted attention of one block: {gpu.name}, {combine}, bfloat16, batch {batch} (not a measurement)",
        ["block", "pass", "without mask us", "with mask us", "mask %", "bound by"],
    )
    for stage in block_kinds():
        for backward in (False, True):
            found = predict(stage, gpu, combine, backward, batch, save=False)
            direction = "backward" if backward else "forward"
            report.rows.append(
                [str(stage), direction, 1e6 * found.plain, 1e6 * found.masked, found.overhead, found.bound]
            )
    return report


def model_report(combine: Combine, train: bool, batch: int = BATCH) -> Report:
    """Whole models."""
    direction = "forward and backward pass" if train else "forward pass"
    report = Report(
        f"Predicted {direction} of whole models: {combine}, bfloat16, batch {batch}, 224 x 224 (not a measurement)",
        ["model", "GPU", "without mask ms", "with mask ms", "mask %", "us/image for the mask"],
    )
    for name in MODELS:
        for gpu in GPUS:
            plain, masked = (model_seconds(name, gpu, combine, mask, train, batch) for mask in (False, True))
            extra = masked - plain
            report.rows.append([name, gpu.name, 1e3 * plain, 1e3 * masked, 100 * extra / plain, 1e6 * extra / batch])
    return report


def reports() -> list[Report]:
    """Everything that the page on the GPU kernels shows."""
    models = [model_report(combine, train) for combine in COMBINES for train in (False, True)]
    return [*models, *(block_report(gpu, combine) for gpu in GPUS for combine in COMBINES)]
