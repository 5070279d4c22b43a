"""The mask ablation: one configuration of any task trained with each mask and several seeds."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ppma.engine.config import RunConfig
from ppma.layers.attention import ATTENTION_KINDS
from ppma.masks import KINDS
from ppma.models.config import CONFIGS
from ppma.ops import checks
from ppma.tasks.registry import task_class
from ppma.tasks.study import Study, with_seeds


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


class Ablation(Study):
    """One configuration trained with each mask and the seeds seed, seed + 1, ...

    Args:
        config: a run of a task that has `Task.macs` and `Task.example`. Its `model_args.mask` is replaced, as are
            `{mask}` and `{seed}` (from 0) in `init`, so that each run can start from weights trained with its mask.
        masks: names of `ppma.masks.KINDS`, each alone or with an attention kind for all stages: "2d-linear".
        seeds: runs for each mask.
        out: the folder; finished runs in it are not repeated, interrupted ones are resumed.
    """

    kind, stem = "mask", "ablation"

    def __init__(self, config: RunConfig, masks: Sequence[str], seeds: int, out: Path) -> None:
        checks.one_of("model", config.model, CONFIGS)
        for name in masks:
            mask, dash, kind = name.partition("-")
            checks.one_of("masks", mask, KINDS)
            if dash:
                checks.one_of(f"masks: the attention of {name!r}", kind, ATTENTION_KINDS)
        runs = {
            name: [_variant(one, name, number) for number, one in enumerate(with_seeds(config, seeds))]
            for name in masks
        }
        super().__init__(config, runs, out, task_class(config.task).eval_batch_size)

    def table(self) -> str:
        """The results in Markdown, with the paper's (PPMA-T on ImageNet and ADE20K) beside them."""
        lines = [
            f"| mask | parameters | MFLOPs | images/s | {self.metric}, mean ± sd (each seed) "
            "| paper: M params | GFLOPs | images/s | top-1 | mIoU |",
            "| --- | ---: | ---: | ---: | --- | ---: | ---: | ---: | ---: | ---: |",
        ]
        for result in self.results():
            paper = " | ".join(f"{value:g}" for value in PAPER.get(result.name, ())) or " | ".join(["–"] * 5)
            lines.append(
                f"| {result.name} | {result.parameters:,} | {result.macs / 1e6:.1f} | {result.images_per_second:.0f} "
                f"| {result.scores()} | {paper} |"
            )
        return "\n".join(lines)


def _variant(config: RunConfig, name: str, number: int) -> RunConfig:
    """The configuration of the run with this number; `name` as in `Ablation`."""
    mask, _, kind = name.partition("-")
    init = getattr(config, "init", None)
    model_args = {**config.model_args, "mask": mask}
    if kind:
        model_args["kinds"] = [kind] * len(model_args.get("depths", CONFIGS[config.model].depths))
    changes: dict[str, Any] = {"model_args": model_args}
    if init is not None:
        changes["init"] = init.replace("{mask}", mask).replace("{seed}", str(number))
    return dataclasses.replace(config, **changes)
