"""Training from a recipe."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ppma.allocator import reuse_freed_memory
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
) -> dict[str, Any]:
    """Train and write the run's folder; under torchrun every process calls this.

    From then on the process keeps memory that it frees (`ppma.allocator.reuse_freed_memory`).

    Args:
        config: a recipe (path of a YAML file, or name), or a configuration.
        out: the run's folder.
        resume: "none", "auto" (the newest checkpoint in `out`, if any) or the path of a checkpoint.
        overwrite: delete an earlier run in the folder, which is refused otherwise.
        assignments: `key=value` changes of the recipe.

    Returns:
        The contents of summary.json.

    Examples:
        >>> import tempfile
        >>> from ppma.tasks.run import train
        >>> changes = ["steps=1", "batch_size=4", "data.image_size=16", "data.test_split=null", "log=[csv]"]
        >>> with tempfile.TemporaryDirectory() as out:
        ...     summary = train("digits_nano", out, assignments=changes)
        >>> summary["steps"], summary["val_count"]
        (1, 180)
    """
    checked = config if isinstance(config, RunConfig) else load_config(config, assignments)
    run = Path(out)
    reuse_freed_memory()
    with distributed.world() as world, folder.reserve(run, world):
        task = make_task(checked)
        return Trainer(task, run, world, resume=resume, overwrite=overwrite).train()
