"""Optimizer, learning-rate schedule and EMA, all timm's."""

from typing import Any

from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler, MultiStepLRScheduler, PolyLRScheduler
from timm.scheduler.scheduler import Scheduler
from timm.utils import ModelEmaV3
from torch import nn
from torch.optim import Optimizer

from ppma.config import ConfigError
from ppma.engine.config import RunConfig


def make_optimizer(config: RunConfig, model: nn.Module) -> Optimizer:
    """Make the optimizer.

    Weight decay excludes biases, norms and the model's `no_weight_decay` names; with `weight_decay_groups: authors` it
    excludes the model's `authors_no_weight_decay` names and nothing else.
    """
    chosen = config.optimizer
    adam: dict[str, Any] = {"eps": chosen.eps, "betas": chosen.betas} if "adam" in chosen.name.lower() else {}
    try:
        return create_optimizer_v2(
            model if chosen.weight_decay_groups == "ours" else _groups_of_authors(model),
            opt=chosen.name,
            lr=config.scaled_lr,
            weight_decay=chosen.weight_decay,
            layer_decay=chosen.layer_decay,
            **adam,
        )
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:  # a missing package or GPU
        raise ConfigError(f"optimizer: {chosen.name} is not available: {error}") from None


def _groups_of_authors(model: nn.Module) -> list[dict[str, Any]]:
    excluded = getattr(model, "authors_no_weight_decay", None)
    if excluded is None:
        raise ConfigError("optimizer.weight_decay_groups: expected 'ours' for this model, got 'authors'")
    names = excluded()
    parameters = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    return [
        {"params": [parameter for name, parameter in parameters if name in names], "weight_decay": 0.0},
        {"params": [parameter for name, parameter in parameters if name not in names]},
    ]


class EpochSchedule:
    """A schedule that is constant within an epoch and one epoch late: epochs 0 and 1 both have its first value.

    Args:
        schedule: over steps.
        steps_per_epoch: steps in an epoch.
    """

    def __init__(self, schedule: Scheduler, steps_per_epoch: int) -> None:
        self.schedule, self.steps_per_epoch = schedule, steps_per_epoch

    def step_update(self, step: int) -> None:
        """Set the learning rate of step `step` + 1."""
        self.schedule.step_update(max(0, step // self.steps_per_epoch - 1) * self.steps_per_epoch)


def make_schedule(
    config: RunConfig, optimizer: Optimizer, *, steps: int, steps_per_epoch: int
) -> Scheduler | EpochSchedule:
    """Make the schedule over steps; `step_update(n)` sets the learning rate of step n + 1."""
    schedule = _step_schedule(config, optimizer, steps, steps_per_epoch)
    return EpochSchedule(schedule, steps_per_epoch) if config.schedule.per == "epoch" else schedule


def _step_schedule(config: RunConfig, optimizer: Optimizer, steps: int, steps_per_epoch: int) -> Scheduler:
    chosen = config.schedule
    warmup = chosen.warmup_steps
    if warmup is None:
        warmup = round(chosen.warmup_epochs * steps_per_epoch)
    common: dict[str, Any] = {
        "warmup_t": min(warmup, steps),
        "warmup_lr_init": chosen.warmup_lr,
        "warmup_prefix": False,
        "t_in_epochs": False,
    }
    if chosen.name == "cosine":
        return CosineLRScheduler(optimizer, t_initial=steps, lr_min=chosen.min_lr, **common)
    if chosen.name == "poly":
        return PolyLRScheduler(optimizer, t_initial=steps, power=chosen.power, lr_min=chosen.min_lr, **common)
    # timm counts a milestone as reached one update early
    milestones = [round(epoch * steps_per_epoch) + 1 for epoch in chosen.milestones if chosen.name == "multistep"]
    return MultiStepLRScheduler(optimizer, decay_t=milestones, decay_rate=chosen.gamma, **common)


class WarmEma(ModelEmaV3):
    """A moving average whose decay warms up, unless `use_warmup` is False.

    With a constant decay the initial weights would keep a weight of decay^t after t steps, close to 1 in a short run.
    """

    def get_decay(self, step: int | None = None) -> float:
        """The decay of update number `step`, counted from 1."""
        warm = step is not None and self.use_warmup
        return min(self.decay, (1 + step) / (10 + step)) if warm else self.decay


def make_ema(config: RunConfig, model: nn.Module) -> WarmEma | None:
    """Make the moving average, which starts as a copy of the model; None without `ema`."""
    if config.ema is None:
        return None
    return WarmEma(model, decay=config.ema.for_batch(config.batch_size), use_warmup=config.ema.warmup)


def load_optimizer(optimizer: Optimizer, state: dict) -> None:
    """Restore the optimizer's moments; its options stay those of the current configuration."""
    options = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    optimizer.load_state_dict(state)
    for group, kept in zip(optimizer.param_groups, options, strict=True):
        group.update(kept)
