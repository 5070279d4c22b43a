"""Optimizer, learning-rate schedule and EMA, all timm's."""

import fnmatch
from collections.abc import Mapping
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
    """Make the optimizer.

    Weight decay excludes biases, norms and the model's `no_weight_decay` names; with `weight_decay_groups: authors` it
    excludes the model's `authors_no_weight_decay` names and nothing else.

    Args:
        config: the run's configuration.
        model: the model.
        backbone: name of the backbone's submodule, for `layer_decay` and `backbone_lr_scale`.
    """
    chosen = config.optimizer
    adam: dict[str, Any] = {"eps": chosen.eps, "betas": chosen.betas} if "adam" in chosen.name.lower() else {}
    if chosen.name in ("adam", "adamw") and all(parameter.is_cpu for parameter in model.parameters()):
        adam["fused"] = True  # one kernel for all parameters; on a GPU PyTorch has a fast default
    scaled = chosen.layer_decay is not None or chosen.backbone_lr_scale != 1
    scales = _lr_scales(model, backbone, chosen) if scaled else {}
    parameters = _groups(model, scales, chosen) if scaled or chosen.weight_decay_groups == "authors" else model
    try:
        return create_optimizer_v2(
            parameters, opt=chosen.name, lr=config.scaled_lr, weight_decay=chosen.weight_decay, **adam
        )
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:  # a missing package or GPU
        raise ConfigError(f"optimizer: {chosen.name} is not available: {error}") from None


def _groups(model: nn.Module, scales: Mapping[str, float], chosen: OptimizerConfig) -> list[dict[str, Any]]:
    """Parameter groups by learning rate and weight decay; timm's schedules multiply the rate by `lr_scale`."""
    without_decay = _without_decay(model, chosen)
    groups: dict[tuple[float, bool], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        decays = name not in without_decay
        scale = scales.get(name, 1.0)
        group = {"params": [], "lr_scale": scale, "weight_decay": chosen.weight_decay if decays else 0.0}
        groups.setdefault((scale, decays), group)["params"].append(parameter)
    return list(groups.values())


def _without_decay(model: nn.Module, chosen: OptimizerConfig) -> set[str]:
    """Names of the parameters without weight decay."""
    if chosen.weight_decay_groups == "authors":
        if not hasattr(model, "authors_no_weight_decay"):
            raise ConfigError("optimizer.weight_decay_groups: expected 'ours' for this model, got 'authors'")
        return model.authors_no_weight_decay()  # type: ignore[operator]
    patterns = list(model.no_weight_decay()) if hasattr(model, "no_weight_decay") else []  # type: ignore[operator]
    return {
        name
        for name, parameter in model.named_parameters()
        if parameter.ndim <= 1
        or name.endswith(".bias")
        or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    }


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
        if step is None or not self.use_warmup:
            return self.decay
        return min(self.decay, (1 + step) / (10 + step))


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
