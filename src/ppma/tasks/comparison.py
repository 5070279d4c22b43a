"""The comparison of models: one recipe trained with each model and several seeds."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from ppma import config as configs
from ppma.tasks.registry import load_config
from ppma.tasks.study import Study, with_seeds

_BATCH = 8  # large enough for the throughput of a CPU


class Comparison(Study):
    """One recipe trained with each model and the seeds seed, seed + 1, ...

    Args:
        recipe: a recipe; each model has its own preprocessing, see `ppma.tasks.registry.load_config`.
        models: names of models, ours or timm's.
        seeds: runs for each model.
        out: the folder; finished runs in it are not repeated, interrupted ones are resumed.
        assignments: `key=value` changes of the recipe, for all models.
    """

    kind, stem = "model", "comparison"

    def __init__(
        self, recipe: str | Path, models: Sequence[str], seeds: int, out: Path, assignments: Iterable[str] = ()
    ) -> None:
        assignments = list(assignments)
        repeated = [name for name in models if models.count(name) > 1]
        configs.require(not repeated, "models", "different names", ",".join(models))
        variants = {name: load_config(recipe, [*assignments, f"model={name}"]) for name in models}
        runs = {name: with_seeds(config, seeds) for name, config in variants.items()}
        super().__init__(load_config(recipe, assignments), runs, out, _BATCH)

    def table(self) -> str:
        """The results in Markdown."""
        lines = [
            f"| model | image | M parameters | GFLOPs | images/s | {self.headers()} |",
            "| --- | ---: | ---: | ---: | ---: | --- |" + " --- |" * len(self.results()[0].others),
        ]
        lines += [
            f"| {result.name} | {result.image[0]} x {result.image[1]} | {result.parameters / 1e6:.2f} "
            f"| {result.macs / 1e9:.3f} | {result.images_per_second:.0f} | {result.scores()} |"
            for result in self.results()
        ]
        return "\n".join(lines)
