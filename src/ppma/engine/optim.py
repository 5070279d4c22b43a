"""Optimizer, learning-rate schedule and EMA from timm's parts."""

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
    """No weight decay on biases, norms and what the model's `no_weight_decay` names."""
    chosen = config.optimizer
    adam: dict[str, Any] = {"eps": chosen.eps, "betas": chosen.betas} if "adam" in chosen.name.lower() else {}
    try:
        return create_optimizer_v2(
            model,
            opt=chosen.name,
            lr=config.scaled_lr,
            weight_decay=chosen.weight_decay,
            layer_decay=chosen.layer_decay,
            **adam,
        )
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:  # packages or GPUs that some of them need
        raise ConfigError(f"optimizer: {chosen.name} cannot be used here: {error}") from None


def make_schedule(config: RunConfig, optimizer: Optimizer, *, steps: int, steps_per_epoch: int) -> Scheduler:
    """A schedule over steps; `step_update(n)` sets the rate of the step after n."""
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
    """A moving average that follows the model from the first step on.

    With the decay alone, the random start would weigh decay^t after t steps: nearly everything in a short run.
    """

    def get_decay(self, step: int | None = None) -> float:
        """The decay of update number `step`, counted from 1."""
        return self.decay if step is None else min(self.decay, (1 + step) / (10 + step))


def make_ema(config: RunConfig, model: nn.Module) -> WarmEma | None:
    """The moving average, which starts as a copy of the model."""
    return None if config.ema is None else WarmEma(model, decay=config.ema.for_batch(config.batch_size))


def weights_to_use(model: nn.Module, ema: ModelEmaV3 | None) -> nn.Module:
    """A model for evaluation and saving: the moving average where there is one."""
    return model if ema is None else ema.module


def load_optimizer(optimizer: Optimizer, state: dict) -> None:
    """Continue the optimizer's moments; its options stay those of the present configuration."""
    options = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    optimizer.load_state_dict(state)
    for group, kept in zip(optimizer.param_groups, options, strict=True):
        group.update(kept)
