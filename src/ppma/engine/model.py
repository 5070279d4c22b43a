"""Preparing a model for training: frozen parameters, gradient checkpointing, synchronised norms, compilation, DDP."""

import fnmatch
from collections.abc import Sequence

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from ppma.config import ConfigError, require, shown
from ppma.engine.distributed import World, synchronise_batch_norm
from ppma.engine.task import TrainingTask


def build_model(task: TrainingTask, world: World) -> nn.Module:
    """Build the task's model on the device, as its configuration asks."""
    config, model = task.config, task.model()
    parts = [name for name, _ in model.named_children()]
    for name in config.sync_batch_norm_skip:
        require(name in parts, "sync_batch_norm_skip", f"names of {', '.join(parts)}", name)
    freeze(model, config.freeze)
    if config.grad_checkpointing:
        _checkpoint_gradients(model.get_submodule(task.backbone))
    model = model.to(world.device)
    if config.sync_batch_norm and world.size > 1:
        model = synchronise_batch_norm(model, world.device, config.sync_batch_norm_skip)
    return model


def parallelise(task: TrainingTask, model: nn.Module, world: World) -> nn.Module:
    """Compile the backbone in place if asked, and wrap the model in DDP if there are several processes."""
    if task.config.compile:
        model.get_submodule(task.backbone).compile()
    if world.size == 1:
        return model
    # Synchronised norms have the same buffers in every process; otherwise the main process's are used.
    return DistributedDataParallel(
        model,
        device_ids=[world.device.index] if world.device.type == "cuda" else None,
        broadcast_buffers=not task.config.sync_batch_norm or bool(task.config.sync_batch_norm_skip),
    )


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Exclude the parameters whose names match a pattern from training.

    Args:
        model: the model.
        patterns: shell-style patterns of whole parameter names, such as "stem.*".

    Raises:
        ConfigError: a pattern matches nothing, or nothing is left to train.

    Examples:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        >>> freeze(model, ["0.*"])
        >>> [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        ['1.weight', '1.bias']
    """
    parameters = dict(model.named_parameters())
    for pattern in patterns:
        matched = fnmatch.filter(parameters, pattern)
        require(bool(matched), "freeze", f"patterns of parameter names such as {next(iter(parameters))!r}", pattern)
        for name in matched:
            parameters[name].requires_grad_(False)
    if patterns and not any(parameter.requires_grad for parameter in parameters.values()):
        raise ConfigError(f"freeze: expected some parameters to train, {shown(tuple(patterns))} freezes all of them")


def frozen_norms(model: nn.Module) -> list[nn.Module]:
    """The batch norms with frozen parameters, which stay in evaluation mode to keep their statistics."""
    norms = (module for module in model.modules() if isinstance(module, _BatchNorm))
    return [norm for norm in norms if norm.weight is not None and not norm.weight.requires_grad]


def _checkpoint_gradients(backbone: nn.Module) -> None:
    try:
        backbone.set_grad_checkpointing(True)  # type: ignore[operator]
    except (AttributeError, AssertionError):  # timm asserts that the model supports it
        raise ConfigError(f"grad_checkpointing: not supported by {type(backbone).__name__}") from None
