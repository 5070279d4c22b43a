"""The mask ablation: one configuration of any task trained with each mask and several seeds."""

import dataclasses
import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ppma import config as configs
from ppma.engine.config import RunConfig
from ppma.layers.attention import ATTENTION_KINDS
from ppma.masks import KINDS
from ppma.models.config import CONFIGS
from ppma.models.grid import GRID
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
    """One configuration trained with each mask, each value of the settings to vary, and the seeds seed, seed + 1, ...

    Args:
        config: a run of a task that has `Task.macs` and `Task.example`. Its `model_args.mask` is replaced, as are
            `{mask}` and `{seed}` (from 0) in `init`, so that each run can start from weights trained with its mask.
        masks: names of `ppma.masks.KINDS`, each alone or with an attention kind for all stages: "2d-linear".
        seeds: runs for each mask.
        out: the folder; finished runs in it are not repeated, interrupted ones are resumed.
        vary: further settings, each as "KEY=VALUE,VALUE,...", of which every combination is trained with every mask:
            "model_args.formulation=paper,release".
    """

    kind, stem = "mask", "ablation"

    def __init__(
        self, config: RunConfig, masks: Sequence[str], seeds: int, out: Path, vary: Sequence[str] = ()
    ) -> None:
        checks.one_of("model", config.model, (*CONFIGS, "grid"))
        for name in masks:
            mask, dash, kind = name.partition("-")
            checks.one_of("masks", mask, KINDS)
            if dash:
                checks.one_of(f"masks: the attention of {name!r}", kind, ATTENTION_KINDS)
        self.paper = config.model in CONFIGS
        runs = {
            ",".join((name, *labels)): [
                _variant(changed, name, number) for number, changed in enumerate(with_seeds(one, seeds))
            ]
            for labels, one in _varied(config, vary)
            for name in masks
        }
        super().__init__(config, runs, out, task_class(config.task).eval_batch_size)

    def table(self) -> str:
        """The results in Markdown.

        With a mask "none" there is Welch's p-value against it, at the same attention and settings. Models that the
        paper has (on ImageNet and ADE20K) have its results beside theirs.
        """
        results = {result.name: result for result in self.results()}
        header = f"| mask | parameters | MFLOPs | images/s | {self.headers()} |"
        rule = "| --- | ---: | ---: | ---: | --- |" + " --- |" * len(next(iter(results.values())).others)
        if self.paper:
            header += " paper: M params | GFLOPs | images/s | top-1 | mIoU |"
            rule += " ---: |" * len(PaperRow._fields)
        lines = [header, rule]
        for name, result in results.items():
            mask = name.partition(",")[0].partition("-")[0]
            reference = None if mask == "none" else results.get(name.replace(mask, "none", 1))
            line = (
                f"| {name} | {result.parameters:,} | {result.macs / 1e6:.1f} | {result.images_per_second:.0f} "
                f"| {result.scores(reference)} |"
            )
            if self.paper:
                cells = [f"{value:g}" for value in PAPER.get(name, ())] or ["–"] * len(PaperRow._fields)
                line += f" {' | '.join(cells)} |"
            lines.append(line)
        if any(", p " in line for line in lines[2:]):
            lines += ["", "p: Welch's t-test over the seeds, two-sided, against the mask none."]
        return "\n".join(lines)


def _varied(config: RunConfig, vary: Sequence[str]) -> list[tuple[tuple[str, ...], RunConfig]]:
    """The configuration with every combination of values, and what each is called: "formulation=release"."""
    choices = []
    for setting in vary:
        key, equals, values = setting.partition("=")
        configs.require(bool(equals and key), "vary", "KEY=VALUE,VALUE,...", setting)
        choices.append([(key, one) for one in re.split(r",(?![^\[]*\])", values)])
    combinations = []
    for chosen in itertools.product(*choices):
        assignments = [f"{key}={value}" for key, value in chosen]
        changed = configs.override(configs.to_dict(config), assignments)
        labels = tuple(f"{key.rpartition('.')[2]}={value}" for key, value in chosen)
        combinations.append((labels, configs.build(type(config), changed, source="vary")))
    return combinations


def _variant(config: RunConfig, name: str, number: int) -> RunConfig:
    """The configuration of the run with this number; `name` as in `Ablation`."""
    mask, _, kind = name.partition("-")
    init = getattr(config, "init", None)
    model_args = {**config.model_args, "mask": mask}
    if kind:
        depths = CONFIGS[config.model].depths if config.model in CONFIGS else GRID.depths
        model_args["kinds"] = [kind] * len(model_args.get("depths", depths))
    changes: dict[str, Any] = {"model_args": model_args}
    if init is not None:
        changes["init"] = init.replace("{mask}", mask).replace("{seed}", str(number))
    return dataclasses.replace(config, **changes)
