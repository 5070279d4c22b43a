"""Resuming a run: which checkpoint to continue from, and whether it fits."""

from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ppma import config as configs
from ppma.engine import checkpoint, folder
from ppma.engine.config import RunConfig
from ppma.engine.distributed import World


def find_state(run: Path, world: World, resume: str, *, overwrite: bool) -> dict[str, Any] | None:
    """Load the state to continue from; refuse a folder whose results the run would mix with its own.

    Args:
        run: the run's folder.
        world: this process among all.
        resume: "none", "auto" (the newest readable checkpoint, if any) or the path of a checkpoint.
        overwrite: delete an earlier run in the folder.
    """
    if overwrite:
        configs.require(resume == "none", "overwrite", "no --resume with it", f"--resume {resume}")
        if world.main:
            folder.clear(run)
        world.broadcast(None)  # the others look only once it is empty
    found = folder.results_in(run)
    ways = "choose another folder, or --overwrite deletes them"
    if resume in ("none", "auto"):
        steps = checkpoint.steps(run)
        if resume == "none" and steps:
            raise ValueError(f"out: {run} holds a run at step {steps[-1]}; --resume auto continues it, or {ways}")
        state = checkpoint.newest(run) if resume == "auto" else None
        if state is None and found:
            listed = ", ".join(found[:3]) + (", ..." if len(found) > 3 else "")
            raise ValueError(f"out: {run} holds {listed}, but no checkpoint to continue from; {ways}")
    else:
        path = Path(resume)
        state = checkpoint.load(path)
        if found and path.resolve().parent != (run / checkpoint.FOLDER).resolve():
            raise ValueError(f"out: {run} holds {found[0]} of another run than {path}; {ways}")
    found_by_all = world.gather(state and state["step"])
    if len(set(found_by_all)) > 1:
        raise ValueError(f"out: expected a folder shared by all processes, they found the steps {found_by_all}")
    return state


def check_fits(state: dict[str, Any], config: RunConfig, model: nn.Module, optimizer: Optimizer, steps: int) -> None:
    """Raise a ConfigError unless the state belongs to this model and optimizer and is within the run's length."""
    saved = state["config"]
    misfit = checkpoint.misfit(state["model"], model.state_dict())
    if misfit:
        ours, theirs = (
            f"{name} {configs.shown(changes)}"
            for name, changes in ((config.model, config.model_args), (saved["model"], saved["model_args"]))
        )
        raise configs.ConfigError(f"resume: expected a checkpoint of {ours}, got one of {theirs}: {misfit}")
    name = saved["optimizer"]["name"]
    configs.require(
        name == config.optimizer.name, "optimizer.name", f"the checkpoint's, {name!r}", config.optimizer.name
    )
    sizes, own_sizes = (
        [len(group["params"]) for group in groups]
        for groups in (state["optimizer"]["param_groups"], optimizer.param_groups)
    )
    configs.require(sizes == own_sizes, "optimizer", f"the checkpoint's parameter groups, {sizes}", own_sizes)
    configs.require(
        state["step"] <= steps,
        "steps" if config.epochs is None else "epochs",
        f"at least the checkpoint's {state['step']} steps",
        steps,
    )
