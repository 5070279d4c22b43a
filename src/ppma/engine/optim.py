"""Optimizer, learning-rate schedule and EMA, all timm's."""

import fnmatch
from typing import Any

from timm.models import group_parameters
from timm.optim import auto_group_layers, create_optimizer_v2
from timm.scheduler import CosineLRScheduler, MultiStepLRScheduler, PolyLRScheduler
from timm.scheduler.scheduler import Scheduler
from timm.utils import ModelEmaV3
from torch import nn
from torch.optim import Optimizer

from ppma.config import ConfigError
from ppma.engine.config import OptimizerConfig, RunConfig


def make_optimizer(config: RunConfig, model: nn.Module, backbone: str = "") -> Optimizer:
    """Make the optimizer; biases, norms and the model's `no_weight_decay` names are excluded from weight decay.

    Args:
        config: the run's configuration.
        model: the model.
        backbone: name of the backbone's submodule, for `layer_decay` and `backbone_lr_scale`.
    """
    chosen = config.optimizer
    adam: dict[str, Any] = {"eps": chosen.eps, "betas": chosen.betas} if "adam" in chosen.name.lower() else {}
    scaled = chosen.layer_decay is not None or chosen.backbone_lr_scale != 1
    parameters = _scaled_groups(model, backbone, chosen) if scaled else model
    try:
        return create_optimizer_v2(
            parameters, opt=chosen.name, lr=config.scaled_lr, weight_decay=chosen.weight_decay, **adam
        )
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:  # a missing package or GPU
        raise ConfigError(f"optimizer: {chosen.name} is not available: {error}") from None


def _scaled_groups(model: nn.Module, backbone: str, chosen: OptimizerConfig) -> list[dict[str, Any]]:
    """Parameter groups by learning rate and weight decay; timm's schedules multiply the rate by `lr_scale`."""
    scales = _lr_scales(model, backbone, chosen)
    without_decay = list(model.no_weight_decay()) if hasattr(model, "no_weight_decay") else []  # type: ignore[operator]
    groups: dict[tuple[float, bool], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        excluded = any(fnmatch.fnmatchcase(name, pattern) for pattern in without_decay)
        decays = parameter.ndim > 1 and not name.endswith(".bias") and not excluded
        scale = scales.get(name, 1.0)
        group = {"params": [], "lr_scale": scale, "weight_decay": chosen.weight_decay if decays else 0.0}
        groups.setdefault((scale, decays), group)["params"].append(parameter)
    return list(groups.values())


def _lr_scales(model: nn.Module, backbone: str, chosen: OptimizerConfig) -> dict[str, float]:
    """The factor on the learning rate of each backbone parameter; the head's is 1."""
    body = model.get_submodule(backbone)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    if hasattr(body, "group_matcher"):
        layers = group_parameters(body, body.group_matcher(coarse=False), reverse=True)  # type: ignore[operator]
    else:
        layers = auto_group_layers(body)
    last = max(layers.values())
    head: set[int] = set()
    if not backbone and hasattr(body, "get_classifier"):
        head = {id(parameter) for parameter in body.get_classifier().parameters()}  # type: ignore[operator]
    decay = chosen.layer_decay or 1.0
    return {
        names[id(parameter)]: chosen.backbone_lr_scale * decay ** (last - layers[name])
        for name, parameter in body.named_parameters()
        if id(parameter) not in head
    }


def make_schedule(config: RunConfig, optimizer: Optimizer, *, steps: int, steps_per_epoch: int) -> Scheduler:
    """Make the schedule over steps; `step_update(n)` sets the learning rate of step n + 1."""
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
    """A moving average whose decay warms up.

    With a constant decay the initial weights would keep a weight of decay^t after t steps, close to 1 in a short run.
    """

    def get_decay(self, step: int | None = None) -> float:
        """The decay of update number `step`, counted from 1."""
        return self.decay if step is None else min(self.decay, (1 + step) / (10 + step))


def make_ema(config: RunConfig, model: nn.Module) -> WarmEma | None:
    """Make the moving average, which starts as a copy of the model; None without `ema`."""
    return None if config.ema is None else WarmEma(model, decay=config.ema.for_batch(config.batch_size))


def load_optimizer(optimizer: Optimizer, state: dict) -> None:
    """Restore the optimizer's moments; its options stay those of the current configuration."""
    options = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    optimizer.load_state_dict(state)
    for group, kept in zip(optimizer.param_groups, options, strict=True):
        group.update(kept)
