"""Training from a configuration file."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ppma.engine import distributed
from ppma.engine.config import RunConfig
from ppma.engine.trainer import Trainer
from ppma.tasks.registry import load_config, make_task


def train(
    config: str | Path | RunConfig,
    out: str | Path,
    *,
    resume: str = "none",
    assignments: Iterable[str] = (),
    tensorboard: bool = True,
) -> dict[str, Any]:
    """Train and write a run's folder; under torchrun every process calls this.

    Args:
        config: a YAML file, or a checked configuration.
        out: the run's folder.
        resume: "none", "auto" or the path of a checkpoint.
        assignments: `key=value` changes of the file.
        tensorboard: write TensorBoard events too.

    Returns:
        What summary.json holds.
    """
    checked = config if isinstance(config, RunConfig) else load_config(config, assignments)
    with distributed.world() as world:
        trainer = Trainer(make_task(checked), Path(out), world, resume=resume, tensorboard=tensorboard)
        return trainer.train()
