"""The mask ablation: one configuration trained with each mask and several seeds."""

import dataclasses
import functools
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import timm
import torch
from torch import nn

from ppma import config as configs
from ppma.atomic import write_atomically
from ppma.data.images import open_training_images
from ppma.engine.config import RunConfig
from ppma.engine.folder import CONFIG, SUMMARY
from ppma.masks import KINDS
from ppma.measure.timing import interleave
from ppma.models.profile import profile
from ppma.ops import checks
from ppma.tasks.classification.config import ClassificationConfig
from ppma.tasks.run import train

# The paper's ablation of PPMA-T on ImageNet: parameters (M), GFLOPs, images/s on an A800, top-1 (%).
PAPER = {
    "none": (14.33, 2.65, 1779, 82.28),
    "rmt": (14.33, 2.65, 1650, 82.35),
    "cross": (14.34, 2.71, 1100, 82.44),
    "hilbert": (14.34, 2.71, 1091, 82.44),
    "v2h": (14.34, 2.71, 1203, 82.44),
    "2d": (14.34, 2.71, 1034, 82.60),
    "shared": (14.33, 2.71, 1124, 82.37),
}
THROUGHPUT_BATCH = 64


@dataclasses.dataclass(frozen=True)
class MaskResult:
    """The results of one mask.

    Attributes:
        mask: name of the mask.
        parameters: number of parameters of the model.
        macs: multiply-adds for one image, which papers call FLOPs.
        images_per_second: throughput of the forward pass, timed interleaved with the other masks.
        top1: accuracy in percent for each seed, on the test split if there is one, else on the validation split.
    """

    mask: str
    parameters: int
    macs: int
    images_per_second: float
    top1: tuple[float, ...]


class Ablation:
    """One configuration trained with each mask and the seeds seed, seed + 1, ...

    Names, models and costs are checked here, before hours of training.

    Args:
        config: a classification run; its `model_args.mask` is replaced.
        masks: names of `ppma.masks.KINDS`.
        seeds: runs for each mask.
        out: the folder; finished runs in it are not repeated, interrupted ones are resumed.
    """

    def __init__(self, config: RunConfig, masks: Sequence[str], seeds: int, out: Path) -> None:
        if not isinstance(config, ClassificationConfig):
            raise configs.ConfigError(f"task: expected a classification, got {config.task}")
        for mask in masks:
            checks.one_of("masks", mask, KINDS)
        configs.require(seeds >= 1, "seeds", "at least 1", seeds)
        self.config, self.out = config, out
        self.runs = {
            mask: [(_with_mask(config, mask, config.seed + n), out / mask / f"seed{n}") for n in range(seeds)]
            for mask in masks
        }
        for runs in self.runs.values():
            for run in runs:
                _check_same(*run)
        classes = len(open_training_images(config.data).classes)
        models = {mask: _model(config, mask, classes) for mask in masks}
        size = config.data.image_size
        self.costs = {mask: profile(model, (size, size)).total for mask, model in models.items()}
        self.speeds = _images_per_second(models, size)
        self.top1: dict[str, list[float]] = {mask: [] for mask in models}

    def run(self) -> None:
        """Train the missing runs; after each, write ablation.md and ablation.json."""
        for mask, runs in self.runs.items():
            for run in runs:
                self.top1[mask].append(_accuracy(*run))
                self._write()

    def results(self) -> list[MaskResult]:
        """The masks that have a finished run."""
        return [
            MaskResult(mask, self.costs[mask].parameters, self.costs[mask].macs, self.speeds[mask], tuple(accuracies))
            for mask, accuracies in self.top1.items()
            if accuracies
        ]

    def table(self) -> str:
        """The results in Markdown."""
        return table(self.results())

    def _write(self) -> None:
        results = [dataclasses.asdict(result) for result in self.results()]
        document = json.dumps({"config": configs.to_dict(self.config), "results": results}, indent=2)
        write_atomically(self.out / "ablation.json", (document + "\n").encode())
        write_atomically(self.out / "ablation.md", (self.table() + "\n").encode())


def _with_mask(config: ClassificationConfig, mask: str, seed: int) -> ClassificationConfig:
    return dataclasses.replace(config, model_args={**config.model_args, "mask": mask}, seed=seed)


def _check_same(config: ClassificationConfig, run: Path) -> None:
    """Raise if the folder holds a run with another configuration."""
    if (run / CONFIG).is_file():
        changes = configs.differences(configs.read(run / CONFIG), configs.to_dict(config))
        if changes:
            raise configs.ConfigError(
                f"out: {run} was trained with another configuration ({'; '.join(changes)}); choose another folder"
            )


def _accuracy(config: ClassificationConfig, run: Path) -> float:
    """The accuracy of one run, which is trained unless it is finished."""
    if (run / SUMMARY).is_file() and (run / CONFIG).is_file():
        summary: dict[str, Any] = json.loads((run / SUMMARY).read_text(encoding="utf-8"))
    else:
        summary = train(config, run, resume="auto", tensorboard=False)
    return summary["test_top1"] if "test_top1" in summary else summary["val_top1"]


def _model(config: ClassificationConfig, mask: str, classes: int) -> Any:
    changed = _with_mask(config, mask, config.seed)
    return timm.create_model(config.model, num_classes=classes, **changed.model_args).eval()


def _images_per_second(models: dict[str, nn.Module], size: int) -> dict[str, float]:
    images = torch.randn(THROUGHPUT_BATCH, 3, size, size)
    with torch.inference_mode():
        timings = interleave({name: functools.partial(model, images) for name, model in models.items()}, rounds=7)
    return {name: THROUGHPUT_BATCH / timings.median(name) for name in models}


def table(results: Sequence[MaskResult]) -> str:
    """The results in Markdown, with the paper's (PPMA-T on ImageNet) beside them."""
    lines = [
        "| mask | parameters | MFLOPs | images/s | top-1, mean ± sd (each seed) "
        "| paper: M params | GFLOPs | images/s | top-1 |",
        "| --- | ---: | ---: | ---: | --- | ---: | ---: | ---: | ---: |",
    ]
    for result in results:
        spread = statistics.stdev(result.top1) if len(result.top1) > 1 else float("nan")
        each = ", ".join(f"{value:.2f}" for value in result.top1)
        paper = " | ".join(f"{value:g}" for value in PAPER.get(result.mask, ())) or " | ".join(["–"] * 4)
        lines.append(
            f"| {result.mask} | {result.parameters:,} | {result.macs / 1e6:.1f} | {result.images_per_second:.0f} "
            f"| {statistics.mean(result.top1):.2f} ± {spread:.2f} ({each}) | {paper} |"
        )
    return "\n".join(lines)
