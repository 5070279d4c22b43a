"""The mask ablation: one configuration of any task trained with each mask and several seeds."""

import dataclasses
import functools
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ppma import config as configs
from ppma.atomic import write_atomically
from ppma.engine.config import RunConfig
from ppma.engine.folder import CONFIG, SUMMARY
from ppma.layers.attention import ATTENTION_KINDS
from ppma.masks import KINDS
from ppma.measure.timing import interleave
from ppma.models.config import CONFIGS
from ppma.ops import checks
from ppma.progress import announce
from ppma.tasks.registry import make_task, task_class
from ppma.tasks.run import train


class PaperRow(NamedTuple):
    """A row of the paper's ablation of PPMA-T.

    Attributes:
        parameters: in millions.
        gflops: multiply-adds in billions.
        images_per_second: on an A800.
        top1: accuracy on ImageNet in percent.
        miou: single-scale mIoU on ADE20K in percent.
    """

    parameters: float
    gflops: float
    images_per_second: int
    top1: float
    miou: float


PAPER = {
    "none": PaperRow(14.33, 2.65, 1779, 82.28, 47.78),
    "rmt": PaperRow(14.33, 2.65, 1650, 82.35, 48.01),
    "cross": PaperRow(14.34, 2.71, 1100, 82.44, 48.14),
    "hilbert": PaperRow(14.34, 2.71, 1091, 82.44, 48.14),
    "v2h": PaperRow(14.34, 2.71, 1203, 82.44, 48.57),
    "2d": PaperRow(14.34, 2.71, 1034, 82.60, 48.73),
    "shared": PaperRow(14.33, 2.71, 1124, 82.37, 48.27),
}


@dataclasses.dataclass(frozen=True)
class MaskResult:
    """The results of one mask.

    Attributes:
        mask: name of the mask.
        parameters: number of parameters of the model.
        macs: multiply-adds for one image, which papers call FLOPs.
        images_per_second: throughput of the forward pass, timed interleaved with the other masks.
        metric: name of the task's metric.
        values: the metric for each seed, on the test split if there is one, else on the validation split.
    """

    mask: str
    parameters: int
    macs: int
    images_per_second: float
    metric: str
    values: tuple[float, ...]


class Ablation:
    """One configuration trained with each mask and the seeds seed, seed + 1, ...

    Names, models and costs are checked here, before hours of training.

    Args:
        config: a run of a task that has `Task.macs` and `Task.example`. Its `model_args.mask` is replaced, as are
            `{mask}` and `{seed}` (from 0) in `init`, so that each run can start from weights trained with its mask.
        masks: names of `ppma.masks.KINDS`, each alone or with an attention kind for all stages: "2d-linear".
        seeds: runs for each mask.
        out: the folder; finished runs in it are not repeated, interrupted ones are resumed.
    """

    def __init__(self, config: RunConfig, masks: Sequence[str], seeds: int, out: Path) -> None:
        for name in masks:
            mask, dash, kind = name.partition("-")
            checks.one_of("masks", mask, KINDS)
            if dash:
                checks.one_of(f"masks: the attention of {name!r}", kind, ATTENTION_KINDS)
        configs.require(seeds >= 1, "seeds", "at least 1", seeds)
        self.config, self.out = config, out
        self.runs = {
            mask: [(_variant(config, mask, number), out / mask / f"seed{number}") for number in range(seeds)]
            for mask in masks
        }
        for runs in self.runs.values():
            for run in runs:
                _check_same(*run)
        tasks = {mask: make_task(runs[0][0]) for mask, runs in self.runs.items()}
        self.metric = task_class(config.task).monitor
        models = {mask: task.model().eval() for mask, task in tasks.items()}
        self.macs = {mask: task.macs(models[mask]) for mask, task in tasks.items()}
        self.parameters = {mask: sum(p.numel() for p in model.parameters()) for mask, model in models.items()}
        batch = task_class(config.task).eval_batch_size
        self.speeds = _images_per_second(models, next(iter(tasks.values())).example(batch), batch)
        self.values: dict[str, list[float]] = {mask: [] for mask in models}

    def run(self) -> None:
        """Train the missing runs; after each, write ablation.md and ablation.json."""
        for mask, runs in self.runs.items():
            for number, run in enumerate(runs, start=1):
                announce(f"mask {mask}, run {number} of {len(runs)}")
                self.values[mask].append(_result(*run, self.metric))
                self._write()

    def results(self) -> list[MaskResult]:
        """The masks that have a finished run."""
        return [
            MaskResult(mask, self.parameters[mask], self.macs[mask], self.speeds[mask], self.metric, tuple(values))
            for mask, values in self.values.items()
            if values
        ]

    def table(self) -> str:
        """The results in Markdown."""
        return table(self.results(), self.metric)

    def _write(self) -> None:
        results = [dataclasses.asdict(result) for result in self.results()]
        document = json.dumps({"config": configs.to_dict(self.config), "results": results}, indent=2)
        write_atomically(self.out / "ablation.json", (document + "\n").encode())
        write_atomically(self.out / "ablation.md", (self.table() + "\n").encode())


def _variant(config: RunConfig, name: str, number: int) -> RunConfig:
    """The configuration of the run with this number; `name` as in `Ablation`."""
    mask, _, kind = name.partition("-")
    init = getattr(config, "init", None)
    model_args = {**config.model_args, "mask": mask}
    if kind:
        model_args["kinds"] = [kind] * len(model_args.get("depths", CONFIGS[config.model].depths))
    changes: dict[str, Any] = {"model_args": model_args, "seed": config.seed + number, "log": ("csv",)}
    if init is not None:
        changes["init"] = init.replace("{mask}", mask).replace("{seed}", str(number))
    return dataclasses.replace(config, **changes)


def _check_same(config: RunConfig, run: Path) -> None:
    """Raise if the folder holds a run with another configuration."""
    if (run / CONFIG).is_file():
        stored = configs.build(type(config), configs.read(run / CONFIG), source=str(run / CONFIG))
        changes = configs.differences(configs.to_dict(stored), configs.to_dict(config))
        if changes:
            raise configs.ConfigError(
                f"out: {run} was trained with another configuration ({'; '.join(changes)}); choose another folder"
            )


def _result(config: RunConfig, run: Path, metric: str) -> float:
    """The metric of one run, which is trained unless it is finished."""
    if (run / SUMMARY).is_file() and (run / CONFIG).is_file():
        summary: dict[str, Any] = json.loads((run / SUMMARY).read_text(encoding="utf-8"))
    else:
        summary = train(config, run, resume="auto")
    return summary[f"test_{metric}"] if f"test_{metric}" in summary else summary[f"val_{metric}"]


def _images_per_second(models: dict[str, nn.Module], images: Any, batch: int) -> dict[str, float]:
    with torch.inference_mode():
        timings = interleave(
            {name: functools.partial(model, images) for name, model in models.items()}, rounds=7, label="throughput"
        )
    return {name: batch / timings.median(name) for name in models}


def table(results: Sequence[MaskResult], metric: str) -> str:
    """The results in Markdown, with the paper's (PPMA-T on ImageNet and ADE20K) beside them."""
    lines = [
        f"| mask | parameters | MFLOPs | images/s | {metric}, mean ± sd (each seed) "
        "| paper: M params | GFLOPs | images/s | top-1 | mIoU |",
        "| --- | ---: | ---: | ---: | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for result in results:
        spread = statistics.stdev(result.values) if len(result.values) > 1 else float("nan")
        each = ", ".join(f"{value:.2f}" for value in result.values)
        paper = " | ".join(f"{value:g}" for value in PAPER.get(result.mask, ())) or " | ".join(["–"] * 5)
        lines.append(
            f"| {result.mask} | {result.parameters:,} | {result.macs / 1e6:.1f} | {result.images_per_second:.0f} "
            f"| {statistics.mean(result.values):.2f} ± {spread:.2f} ({each}) | {paper} |"
        )
    return "\n".join(lines)
