"""What the GPU kernels should cost: a prediction on paper, from the launches themselves and data sheets of GPUs.

A launch takes at least as long as its busiest part: memory, matrix units, exponentials, other float32 arithmetic. That
is a bound from below, for the masked kernels and for plain flash attention alike; nothing here was measured.
"""

from dataclasses import dataclass, replace

import torch

from ppma.bench.gpu import cases
from ppma.bench.gpu.work import Work, work_of
from ppma.bench.report import Report
from ppma.ops.backends.triton.launch import Launch, recording
from ppma.ops.options import Combine


@dataclass(frozen=True)
class Gpu:
    """Peak rates, by the second: bytes, half-precision matrix FLOPs, exponentials, other float32 instructions."""

    name: str
    bandwidth: float
    matrix: float
    exponentials: float
    vector: float

    def seconds(self, work: Work) -> dict[str, float]:
        """The least time that each part of a launch takes."""
        return {
            "memory": work.bytes / self.bandwidth,
            "matrix": work.matrix / self.matrix,
            "exponentials": work.exponentials / self.exponentials,
            "arithmetic": work.vector / self.vector,
        }


# Multiprocessors x lanes x clock: 16 lanes for exponentials; 64 (A100) and 128 (H100) for float32.
GPUS = (
    Gpu("A100 SXM 80 GB", 2.039e12, 312e12, 108 * 16 * 1.41e9, 108 * 64 * 1.41e9),
    Gpu("H100 SXM", 3.35e12, 989e12, 132 * 16 * 1.83e9, 132 * 128 * 1.83e9),
)


@dataclass(frozen=True)
class Stage:
    """The attention of one stage of a backbone at 224 x 224: blocks of it, grid side, heads, channels of a head."""

    blocks: int
    side: int
    heads: int
    d: int
    full: bool

    def __str__(self) -> str:
        kind = "full" if self.full else "criss-cross"
        return f"{kind} {self.side}x{self.side}, {self.heads} x {self.d}"

    def launches(self, batch: int, combine: Combine, backward: bool) -> list[Launch]:
        """The launches of one block."""
        tensors = cases.attention_inputs(batch, self.heads, self.side, self.side, self.d, torch.bfloat16)
        record = cases.record_attention if self.full else cases.record_criss_cross
        with recording() as launches:
            record(tensors, combine, backward)
        return launches


_ENDS_FULL = Stage(1, 7, 16, 32, True)
MODELS = {
    "PPMA-T": (
        Stage(2, 56, 4, 16, False),
        Stage(2, 28, 4, 32, False),
        Stage(8, 14, 8, 32, True),
        replace(_ENDS_FULL, blocks=2),
    ),
    "PPMA-S": (
        Stage(3, 56, 4, 16, False),
        Stage(4, 28, 4, 32, False),
        Stage(18, 14, 8, 32, False),
        replace(_ENDS_FULL, blocks=4),
    ),
    "PPMA-B": (
        Stage(4, 56, 5, 16, False),
        Stage(8, 28, 5, 32, False),
        Stage(25, 14, 10, 32, False),
        replace(_ENDS_FULL, blocks=8),
    ),
}

BATCH = 64


def block_kinds() -> list[Stage]:
    """Every kind of attention block of the models, once."""
    kinds = (replace(stage, blocks=1) for stages in MODELS.values() for stage in stages)
    return list(dict.fromkeys(kinds))


@dataclass(frozen=True)
class Prediction:
    """Masked and plain attention of one block on one GPU."""

    masked: float
    plain: float
    bound: str
    work: Work
    plain_work: Work

    @property
    def overhead(self) -> float:
        """Of the mask, in per cent."""
        return 100 * (self.masked / self.plain - 1)


def predict(stage: Stage, gpu: Gpu, combine: Combine, backward: bool, batch: int = BATCH) -> Prediction:
    """The roofline of one block's attention, forward or backward alone."""
    launches = stage.launches(batch, combine, backward)
    with_mask = [work_of(launch) for launch in launches]
    without = [work_of(launch, mask=False) for launch in launches]
    masked = sum(max(gpu.seconds(work).values()) for work in with_mask)
    plain = sum(max(gpu.seconds(work).values()) for work in without)
    parts = [gpu.seconds(work) for work in with_mask]
    heaviest = max(parts, key=lambda part: max(part.values()))
    total, plain_total = sum(with_mask, Work()), sum(without, Work())
    return Prediction(masked, plain, max(heaviest, key=lambda name: heaviest[name]), total, plain_total)


def block_report(gpu: Gpu, combine: Combine, batch: int = BATCH) -> Report:
    """Every kind of attention block of the three models."""
    report = Report(
        f"Prediction, not a measurement: {gpu.name}, {combine}, bfloat16, batch {batch}",
        [
            "block", "pass", "bytes/token", "kFLOP/token", "FLOP/byte", "plain us", "masked us", "mask %",
            "memory and matrix only %", "bound by",
        ],
    )  # fmt: skip
    for stage in block_kinds():
        tokens = batch * stage.heads * stage.side**2
        for backward in (False, True):
            found = predict(stage, gpu, combine, backward, batch)
            report.rows.append(
                [
                    str(stage),
                    "backward" if backward else "forward",
                    round(found.work.bytes / tokens),
                    found.work.matrix / tokens / 1e3,
                    found.work.matrix / found.work.bytes,
                    1e6 * found.plain,
                    1e6 * found.masked,
                    found.overhead,
                    _classical_overhead(stage, gpu, combine, backward, batch),
                    found.bound,
                ]
            )
    return report


def _classical_overhead(stage: Stage, gpu: Gpu, combine: Combine, backward: bool, batch: int) -> float:
    """The overhead if only bytes and matrix products counted, as in the usual roofline."""

    def seconds(mask: bool) -> float:
        works = [work_of(launch, mask) for launch in stage.launches(batch, combine, backward)]
        parts = [gpu.seconds(work) for work in works]
        return sum(max(part["memory"], part["matrix"]) for part in parts)

    return 100 * (seconds(True) / seconds(False) - 1)


def model_report(combine: Combine, batch: int = BATCH) -> Report:
    """All attention of a model's forward pass."""
    report = Report(
        f"Prediction, not a measurement: all attention blocks of a forward pass, {combine}, bfloat16, batch {batch}",
        ["model", "GPU", "plain ms", "masked ms", "mask ms", "mask %", "us/image for the mask"],
    )
    for model, stages in MODELS.items():
        for gpu in GPUS:
            found = [(stage.blocks, predict(stage, gpu, combine, False, batch)) for stage in stages]
            plain = sum(blocks * one.plain for blocks, one in found)
            masked = sum(blocks * one.masked for blocks, one in found)
            report.rows.append(
                [model, gpu.name, 1e3 * plain, 1e3 * masked, 1e3 * (masked - plain), 100 * (masked / plain - 1),
                 1e6 * (masked - plain) / batch]
            )  # fmt: skip
    return report


def reports() -> list[Report]:
    """Everything that the page on the GPU kernels shows."""
    blocks = [block_report(gpu, combine) for gpu in GPUS for combine in ("hadamard", "logit")]
    return [*(model_report(combine) for combine in ("hadamard", "logit")), *blocks]
