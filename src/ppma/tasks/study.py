"""Several configurations of a task, each trained with several seeds, in one table."""

import dataclasses
import functools
import json
import statistics
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from ppma import config as configs
from ppma.atomic import write_atomically
from ppma.engine.config import RunConfig
from ppma.engine.folder import CONFIG, SUMMARY
from ppma.measure.timing import interleave
from ppma.progress import announce
from ppma.tasks.registry import make_task, task_class
from ppma.tasks.run import train
from ppma.tasks.significance import welch_p


@dataclasses.dataclass(frozen=True)
class Result:
    """The results of one variant.

    Attributes:
        name: of the variant.
        parameters: number of parameters of the model.
        macs: multiply-adds for one image, which papers call FLOPs.
        image: height and width of that image.
        images_per_second: throughput of the forward pass, timed interleaved with the other variants.
        metric: name of the task's metric.
        values: the metric for each seed, on the test split if there is one, else on the validation split.
        others: the metric for each seed on the task's further splits, by their names.
    """

    name: str
    parameters: int
    macs: int
    image: tuple[int, int]
    images_per_second: float
    metric: str
    values: tuple[float, ...]
    others: dict[str, tuple[float, ...]]

    def latex_scores(self) -> list[str]:
        """Cells of a LaTeX table: mean and, of several values, standard deviation; of the metric and further splits."""
        cells = []
        for values in (self.values, *self.others.values()):
            spread = rf" \pm {statistics.stdev(values):.2f}" if len(values) > 1 else ""
            cells.append(f"${statistics.mean(values):.2f}{spread}$")
        return cells

    def scores(self, reference: "Result | None" = None) -> str:
        """Cells of a table: mean, standard deviation and each value, for the metric and for each further split.

        Args:
            reference: the variant to compare with, by the p-value of Welch's t-test; None for no comparison.
        """
        against = (
            [None] * (1 + len(self.others)) if reference is None else [reference.values, *reference.others.values()]
        )
        return " | ".join(map(_score, (self.values, *self.others.values()), against))


class Study(ABC):
    """Variants of one configuration, each trained with several seeds.

    Models and costs are checked here, before hours of training.

    Args:
        config: the configuration that the variants change.
        variants: configurations by name, one for each seed, of a task that has `Task.macs` and `Task.example`.
        out: the folder; finished runs in it are not repeated, interrupted ones are resumed.
        batch: number of images with which the forward pass is timed.

    Attributes:
        kind: what a variant is, "mask" or "model".
        stem: of the files with the results, `out/STEM.md`, `out/STEM.tex` and `out/STEM.json`.
    """

    kind: ClassVar[str]
    stem: ClassVar[str]

    def __init__(self, config: RunConfig, variants: Mapping[str, Sequence[RunConfig]], out: Path, batch: int) -> None:
        self.config, self.out = config, out
        self.runs = {
            name: [(one, out / name / f"seed{number}") for number, one in enumerate(seeds)]
            for name, seeds in variants.items()
        }
        for runs in self.runs.values():
            for run in runs:
                _check_same(*run)
        tasks = {name: make_task(runs[0][0]) for name, runs in self.runs.items()}
        self.metric = task_class(config.task).monitor
        models = {name: task.model().eval() for name, task in tasks.items()}
        self.macs = {name: task.macs(models[name]) for name, task in tasks.items()}
        self.parameters = {name: sum(p.numel() for p in model.parameters()) for name, model in models.items()}
        examples = {name: task.example(batch) for name, task in tasks.items()}
        self.images = {name: _image_size(example) for name, example in examples.items()}
        self.speeds = _images_per_second(
            {name: functools.partial(model, examples[name]) for name, model in models.items()}, batch
        )
        self.values: dict[str, list[dict[str, float]]] = {name: [] for name in models}

    @property
    def files(self) -> tuple[Path, ...]:
        """The table in Markdown and in LaTeX, and the results in JSON."""
        return tuple(self.out / f"{self.stem}.{suffix}" for suffix in ("md", "tex", "json"))

    def run(self) -> None:
        """Train the missing runs and write the results after each; seed by seed, so that a part of it compares too."""
        for number in range(len(next(iter(self.runs.values())))):
            for name, runs in self.runs.items():
                announce(f"{self.kind} {name}, run {number + 1} of {len(runs)}")
                self.values[name].append(_result(*runs[number], self.metric))
                self._write()

    def results(self) -> list[Result]:
        """The variants that have a finished run."""
        return [
            Result(
                name,
                self.parameters[name],
                self.macs[name],
                self.images[name],
                self.speeds[name],
                self.metric,
                **_split_values(runs),
            )
            for name, runs in self.values.items()
            if runs
        ]

    def headers(self) -> str:
        """The headers above `Result.scores`."""
        first = self.results()[0]
        return f"{self.metric}, mean ± sd (each seed)" + "".join(f" | {split}" for split in first.others)

    @abstractmethod
    def table(self) -> str:
        """The results in Markdown."""

    def latex(self) -> str:
        """The results as a table for LaTeX with the package booktabs: mean ± standard deviation over the seeds."""
        results = self.results()
        heads = [self.kind, "parameters (M)", "GFLOPs", "images/s", self.metric, *results[0].others]
        rows = [
            [
                result.name,
                f"{result.parameters / 1e6:.2f}",
                f"{result.macs / 1e9:.3f}",
                f"{result.images_per_second:.0f}",
                *result.latex_scores(),
            ]
            for result in results
        ]
        head, *body = [" & ".join(cell.replace("_", r"\_") for cell in row) + r" \\" for row in (heads, *rows)]
        begin = rf"\begin{{tabular}}{{l{'r' * (len(heads) - 1)}}}"
        return "\n".join([begin, r"\toprule", head, r"\midrule", *body, r"\bottomrule", r"\end{tabular}"])

    def _write(self) -> None:
        results = [dataclasses.asdict(result) for result in self.results()]
        results = [{self.kind: result.pop("name"), **result} for result in results]
        document = json.dumps({"config": configs.to_dict(self.config), "results": results}, indent=2)
        for path, text in zip(self.files, (self.table(), self.latex(), document), strict=True):
            write_atomically(path, f"{text}\n".encode())


def with_seeds(config: RunConfig, seeds: int) -> list[RunConfig]:
    """The configuration with the seeds seed, seed + 1, ..."""
    configs.require(seeds >= 1, "seeds", "at least 1", seeds)
    return [dataclasses.replace(config, seed=config.seed + number, log=("csv",)) for number in range(seeds)]


def _check_same(config: RunConfig, run: Path) -> None:
    """Raise if the folder holds a run with another configuration."""
    if (run / CONFIG).is_file():
        stored = configs.build(type(config), configs.read(run / CONFIG), source=str(run / CONFIG))
        changes = configs.differences(configs.to_dict(stored), configs.to_dict(config))
        if changes:
            raise configs.ConfigError(
                f"out: {run} was trained with another configuration ({'; '.join(changes)}); choose another folder"
            )


def _result(config: RunConfig, run: Path, metric: str) -> dict[str, float]:
    """The metric of one run by split, "" for the main one; the run is trained unless it is finished."""
    if (run / SUMMARY).is_file() and (run / CONFIG).is_file():
        summary: dict[str, Any] = json.loads((run / SUMMARY).read_text(encoding="utf-8"))
    else:
        summary = train(config, run, resume="auto")
    splits = {key.removesuffix(f"_{metric}"): value for key, value in summary.items() if key.endswith(f"_{metric}")}
    validation = splits.pop("val", None)
    return {"": splits.pop("test", validation), **splits}


def _split_values(runs: list[dict[str, float]]) -> dict[str, Any]:
    values = {split: tuple(run[split] for run in runs) for split in runs[0]}
    return {"values": values.pop(""), "others": values}


def _score(values: Sequence[float], reference: Sequence[float] | None) -> str:
    spread = statistics.stdev(values) if len(values) > 1 else float("nan")
    each = ", ".join(f"{value:.2f}" for value in values)
    p = None if reference is None else welch_p(values, reference)
    significance = "" if p is None or p != p else f", p {p:.2g}" if p >= 0.001 else ", p < 0.001"
    return f"{statistics.mean(values):.2f} ± {spread:.2f} ({each}){significance}"


def _image_size(example: Any) -> tuple[int, int]:
    image = example if isinstance(example, Tensor) else example[0]
    return int(image.shape[-2]), int(image.shape[-1])


def _images_per_second(calls: Mapping[str, Any], batch: int) -> dict[str, float]:
    with torch.inference_mode():
        timings = interleave(dict(calls), rounds=7, label="throughput")
    return {name: batch / timings.median(name) for name in calls}
