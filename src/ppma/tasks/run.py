"""Training from a recipe."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ppma.engine import distributed, folder
from ppma.engine.config import RunConfig
from ppma.engine.trainer import Trainer
from ppma.tasks.registry import load_config, make_task


def train(
    config: str | Path | RunConfig,
    out: str | Path,
    *,
    resume: str = "none",
    overwrite: bool = False,
    assignments: Iterable[str] = (),
    tensorboard: bool = True,
) -> dict[str, Any]:
    """Train and write a run's folder; under torchrun every process calls this.

    Args:
        config: a recipe (a YAML file or a name), or a checked configuration.
        out: the run's folder.
        resume: "none", "auto" or the path of a checkpoint.
        overwrite: delete an earlier run in the folder; else such a folder is refused.
        assignments: `key=value` changes of the recipe.
        tensorboard: write TensorBoard events too.

    Returns:
        What summary.json holds.
    """
    checked = config if isinstance(config, RunConfig) else load_config(config, assignments)
    run = Path(out)
    with distributed.world() as world, folder.reserve(run, world):
        task = make_task(checked)
        return Trainer(task, run, world, resume=resume, overwrite=overwrite, tensorboard=tensorboard).train()
