"""What an optimizer step changes: weights, optimizer, learning rate, loss scale and moving average."""

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ppma.engine import optim
from ppma.engine.distributed import World
from ppma.engine.evaluation import autocast
from ppma.engine.model import build_model, frozen_norms, parallelise
from ppma.engine.sampling import to_device
from ppma.engine.task import TrainingTask


class Learner:
    """The model of a run with its optimizer, schedule, loss scaler and moving average.

    Args:
        task: supplies model and loss.
        world: this process among all.
        steps: number of steps of the run.
        steps_per_epoch: number of steps of an epoch.

    Attributes:
        model: the model being trained.
        optimizer: its optimizer.
        ema: its moving average; None for none.
    """

    def __init__(self, task: TrainingTask, world: World, *, steps: int, steps_per_epoch: int) -> None:
        self.task, self.config, self.device = task, task.config, world.device
        self.model = build_model(task, world)
        self.frozen_norms = frozen_norms(self.model)
        self.optimizer = optim.make_optimizer(self.config, self.model, task.backbone)
        self.schedule = optim.make_schedule(self.config, self.optimizer, steps=steps, steps_per_epoch=steps_per_epoch)
        self.ema = optim.make_ema(self.config, self.model)
        self.scaler = torch.amp.GradScaler(world.device.type, enabled=self.config.amp == "fp16")
        self.parallel = parallelise(task, self.model, world)

    @property
    def eval_model(self) -> nn.Module:
        """The model to evaluate and save: the moving average if there is one."""
        return self.model if self.ema is None else self.ema.module

    @property
    def lr(self) -> float:
        """The learning rate of the schedule, before the scales of the parameter groups."""
        return max(group["lr"] / group.get("lr_scale", 1.0) for group in self.optimizer.param_groups)

    def begin(self, step: int) -> None:
        """Prepare for the micro-batches of a step: training mode and learning rate."""
        self.parallel.train()
        for norm in self.frozen_norms:
            norm.eval()
        self.schedule.step_update(step)

    def backward(self, batch: Any, *, last: bool) -> dict[str, torch.Tensor]:
        """Add the gradient of a micro-batch; processes exchange gradients in the last one of a step only.

        Returns:
            The terms of the loss, divided by the number of micro-batches.
        """
        wait = isinstance(self.parallel, DistributedDataParallel) and not last
        with self.parallel.no_sync() if wait else contextlib.nullcontext():  # type: ignore[operator]
            with autocast(self.config.amp, self.device):
                terms = self.task.loss(self.parallel, to_device(batch, self.device))
                loss = torch.stack(list(terms.values())).sum() / self.config.accumulate
            self.scaler.scale(loss).backward()
        return {name: term.detach() / self.config.accumulate for name, term in terms.items()}

    def update(self, step: int) -> None:
        """Clip the gradient, update the weights and, as update number `step`, the moving average."""
        if self.config.clip_grad is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip_grad)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        if self.ema is not None:
            self.ema.update(self.model, step=step)

    def state(self, step: int) -> dict[str, Any]:
        """The parts of a checkpoint after `step` steps that `load` needs."""
        return {
            "model": self.model.state_dict(),
            "ema": None if self.ema is None else self.ema.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": {"step": step, "lr": [group["lr"] for group in self.optimizer.param_groups]},
            "scaler": self.scaler.state_dict(),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`; a moving average that it lacks starts as the model."""
        self.model.load_state_dict(state["model"])
        if self.ema is not None:
            self.ema.module.load_state_dict(state["ema"] or state["model"])
        optim.load_optimizer(self.optimizer, state["optimizer"])
        for group, lr in zip(self.optimizer.param_groups, state["schedule"]["lr"], strict=True):
            group["lr"] = lr
        if state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
