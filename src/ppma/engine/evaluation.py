"""Evaluation of every held-out sample once, over all processes."""

import contextlib
import functools
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from ppma.config import require
from ppma.engine import distributed
from ppma.engine.distributed import World
from ppma.engine.errors import TooManyBrokenError
from ppma.engine.progress_line import ProgressLine
from ppma.engine.sampling import eval_batches, name_dead_workers, to_device
from ppma.engine.task import Details, Metrics
from ppma.progress import Progress

Report = Callable[[dict[str, float], Details | None], None]

AMP_DTYPES = {"none": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class BrokenSamples:
    """Counts unreadable samples and reports each once.

    Attributes:
        limit: number of broken samples that are skipped before `note` raises.
        seen: the distinct messages.
    """

    def __init__(self, limit: int, say: Callable[[str], None] = print) -> None:
        self.limit, self.say = limit, say
        self.seen: set[str] = set()

    def note(self, messages: list[str]) -> None:
        """Count and report new messages; raise a TooManyBrokenError beyond the limit."""
        for message in messages:
            if message not in self.seen:
                self.seen.add(message)
                self.say(f"skipped: {message}")
        if len(self.seen) > self.limit:
            raise TooManyBrokenError(
                f"{len(self.seen)} broken samples, more than max_broken = {self.limit}; the last: {messages[-1]}"
            )


def autocast(amp: str, device: torch.device) -> torch.autocast:
    """The autocast context for the configuration's `amp`."""
    dtype = AMP_DTYPES[amp]
    return torch.autocast(device.type, dtype=dtype or torch.bfloat16, enabled=dtype is not None)


@torch.inference_mode()
def evaluate(
    model: nn.Module,
    metrics: Metrics,
    dataset: Dataset,
    collate: Callable[[list[Any]], Any],
    *,
    batch_size: int,
    workers: int,
    world: World,
    broken: BrokenSamples,
    amp: str = "none",
    title: str = "evaluate",
    within: ProgressLine | None = None,
    report: Report | None = None,
) -> dict[str, float]:
    """Compute the metrics, with `count` (samples) and `per_second` (throughput including data loading).

    Args:
        model: on the device of `world`; its training mode is restored afterwards.
        metrics: an empty metrics object.
        dataset: held-out samples.
        collate: makes a batch of samples.
        batch_size: batch size of one process.
        workers: loader processes of each process.
        world: this process among all.
        broken: counter of unreadable samples.
        amp: "none", "bf16" or "fp16".
        title: title of the progress bar.
        within: the progress bar to nest this one in.
        report: called in the main process with the metrics and their details.
    """
    training = model.training
    model.eval()
    begun, count = time.monotonic(), 0
    batches = eval_batches(dataset, collate, batch_size=batch_size, workers=workers, world=world)
    progress = ProgressLine(title, len(dataset), enabled=world.main, unit="samples", within=within)  # type: ignore[arg-type]
    try:
        for batch in batches:
            broken.note(batch.broken)
            if batch.data is not None:
                with autocast(amp, world.device):
                    metrics.update(model, to_device(batch.data, world.device))
            count += batch.size
            progress.update(count * world.size)
    finally:
        batches.close()
        progress.close()
        model.train(training)
    gathered = world.gather((metrics.state(), count))
    counted = sum(part for _, part in gathered)
    if counted == 0:
        raise ValueError("evaluation data: expected at least one readable sample, found none")
    states = [state for state, _ in gathered]
    # Average precision takes seconds. Training shows a bar of its own.
    with Progress("computing the metrics") if world.main and within is None else contextlib.nullcontext():
        computed = metrics.compute(states) if world.main else None
    measured: dict[str, float] = world.broadcast(computed)
    measured = {**measured, "count": counted, "per_second": counted / (time.monotonic() - begun)}
    if report is not None and world.main:
        report(measured, metrics.details(states))
    return measured


def evaluate_model(
    model: nn.Module,
    metrics: Metrics,
    dataset: Dataset,
    collate: Callable[[list[Any]], Any],
    *,
    batch_size: int,
    workers: int = 0,
    amp: str = "none",
    max_broken: int = 50,
    device: str | None = None,
    report: Report | None = None,
) -> dict[str, float]:
    """Evaluate outside of training; under torchrun the samples are divided between the processes.

    Args:
        model: in evaluation mode.
        metrics: an empty metrics object.
        dataset: held-out samples.
        collate: makes a batch of samples.
        batch_size: batch size of one process.
        workers: loader processes of each process.
        amp: "none", "bf16" or "fp16".
        max_broken: broken samples to skip before raising a TooManyBrokenError.
        device: "cpu", "cuda", "cuda:1", ...; None for the GPU if there is one, and under torchrun.
        report: see `evaluate`.
    """
    require(batch_size >= 1, "batch_size", "at least 1", batch_size)
    require(workers >= 0, "workers", "0 or more", workers)
    with distributed.world(device) as world, name_dead_workers():
        return evaluate(
            model.to(world.device),
            metrics,
            dataset,
            collate,
            batch_size=batch_size,
            workers=workers,
            world=world,
            broken=BrokenSamples(max_broken, functools.partial(print, file=sys.stderr)),  # stdout is for the results
            amp=amp,
            report=report,
        )
