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
    devices = {parameter.device.type for parameter in model.parameters()}
    on_cpu = devices == {"cpu"}
    adam: dict[str, Any] = {"eps": chosen.eps, "betas": chosen.betas} if "adam" in chosen.name.lower() else {}
    if chosen.name in ("adam", "adamw") and devices in ({"cpu"}, {"cuda"}):
        # One kernel for all parameters. On a GPU it also skips steps whose scaled gradients overflow, which the host
        # would otherwise read in every step.
        adam["fused"] = True
    scales: dict[str, float] = {}
    if chosen.layer_decay is not None or chosen.backbone_lr_scale != 1:
        scales = _lr_scales(model, backbone, chosen)
    if chosen.decay_lr_scale != 1:
        scales |= {name: chosen.decay_lr_scale * scales.get(name, 1.0) for name in decay_parameters(model)}
    parameters: Any = model
    if scales or chosen.weight_decay_groups == "authors":
        groups = _groups(model, scales, _without_decay(model, chosen), chosen.weight_decay)
        parameters = [  # timm's schedules multiply the rate by the scale
            {"params": params, "lr_scale": scale, "weight_decay": decay} for scale, decay, params in groups
        ]
    try:
        optimizer = create_optimizer_v2(
            parameters, opt=chosen.name, lr=config.scaled_lr, weight_decay=chosen.weight_decay, **adam
        )
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:  # a missing package or GPU
        raise ConfigError(f"optimizer: {chosen.name} is not available: {error}") from None
    if on_cpu and "muon" in chosen.name.lower():  # timm has no such module before 1.0.21
        from ppma.engine.muon import for_cpu

        return for_cpu(optimizer)
    return optimizer


def parameter_groups(
    model: nn.Module, lr: float, *, weight_decay: float = 0.05, decay_lr_scale: float = 1.0
) -> list[dict[str, Any]]:
    """Parameter groups for any optimizer of PyTorch or timm, with a learning rate of their own for the decay heads.

    Biases, norms, what a decay head has besides its weights, and the model's `no_weight_decay` names take no weight
    decay.

    Args:
        model: with masked attention anywhere in it; a model without decay heads has groups of one learning rate.
        lr: learning rate.
        weight_decay: weight decay of the other parameters.
        decay_lr_scale: factor on the learning rate of the decay heads.

    Examples:
        >>> import torch
        >>> import ppma
        >>> from ppma.layers import PolylineAttention
        >>> groups = ppma.parameter_groups(PolylineAttention(32, heads=2), 1e-3, decay_lr_scale=10)
        >>> optimizer = torch.optim.AdamW(groups)
        >>> [(group["lr"], group["weight_decay"], len(group["params"])) for group in optimizer.param_groups]
        [(0.001, 0.05, 2), (0.001, 0.0, 2), (0.01, 0.05, 1), (0.01, 0.0, 1)]
    """
    for name, value in (("lr", lr), ("decay_lr_scale", decay_lr_scale)):
        if value <= 0:
            raise ValueError(f"{name}: expected a number > 0, got {value}")
    scales = dict.fromkeys(decay_parameters(model), decay_lr_scale)
    groups = _groups(model, scales, _undecayed(model), weight_decay)
    return [{"params": params, "lr": lr * scale, "weight_decay": decay} for scale, decay, params in groups]


def decay_parameters(model: nn.Module) -> set[str]:
    """Names of the parameters of the decay heads in a model."""
    heads = {module for module in model.modules() if getattr(module, "is_decay_head", False)}
    owned = {id(parameter) for head in heads for parameter in head.parameters()}
    return {name for name, parameter in model.named_parameters() if id(parameter) in owned}


def _groups(
    model: nn.Module, scales: Mapping[str, float], without_decay: set[str], weight_decay: float
) -> list[tuple[float, float, list[nn.Parameter]]]:
    """The trained parameters by factor on the learning rate, 1 where `scales` has none, and by weight decay."""
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            key = scales.get(name, 1.0), 0.0 if name in without_decay else weight_decay
            groups.setdefault(key, []).append(parameter)
    return [(*key, parameters) for key, parameters in groups.items()]


def _without_decay(model: nn.Module, chosen: OptimizerConfig) -> set[str]:
    """Names of the parameters without weight decay."""
    if chosen.weight_decay_groups == "authors":
        if not hasattr(model, "authors_no_weight_decay"):
            raise ConfigError("optimizer.weight_decay_groups: expected 'ours' for this model, got 'authors'")
        return model.authors_no_weight_decay()  # type: ignore[operator]
    return _undecayed(model)


def _undecayed(model: nn.Module) -> set[str]:
    """Names of biases, norms, what a decay head has besides its weights, and the model's `no_weight_decay` names."""
    heads = decay_parameters(model)
    patterns = list(model.no_weight_decay()) if hasattr(model, "no_weight_decay") else []  # type: ignore[operator]
    return {
        name
        for name, parameter in model.named_parameters()
        if parameter.ndim <= 1
        or name.endswith(".bias")
        or (name in heads and not name.endswith(".weight"))
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
    warmup = min(warmup, steps)
    common: dict[str, Any] = {
        "warmup_t": warmup,
        "warmup_lr_init": chosen.warmup_lr,
        "warmup_prefix": chosen.warmup_prefix,
        "t_in_epochs": False,
    }
    length = steps if chosen.epochs is None else max(1, round(chosen.epochs * steps_per_epoch))
    if chosen.warmup_prefix:
        length = max(1, length - warmup)
    if chosen.name == "cosine":
        return CosineLRScheduler(optimizer, t_initial=length, lr_min=chosen.min_lr, **common)
    if chosen.name == "poly":
        return PolyLRScheduler(optimizer, t_initial=length, power=chosen.power, lr_min=chosen.min_lr, **common)
    # timm counts a milestone as reached one update early
    milestones = [round(epoch * steps_per_epoch) + 1 for epoch in chosen.milestones if chosen.name == "multistep"]
    common["warmup_prefix"] = False
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
