"""A tiny task for the engine's tests: a small network with batch norm and dropout on random vectors shaped as images.

`main` trains like a program; the tests run it in separate processes, which they kill.
"""

import argparse
import os
import random
import signal
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.data import Dataset

from ppma import config as configs
from ppma.data.errors import BrokenSampleError
from ppma.engine import distributed, folder
from ppma.engine.config import RunConfig
from ppma.engine.task import Metrics, TrainingTask
from ppma.engine.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class StandInConfig(RunConfig):
    samples: int = 24
    dropout: float = 0.2
    noise: bool = True
    broken: tuple[int, ...] = ()
    nan_at: int | None = None


class Points(Dataset):
    """Two classes of points; each training read adds noise from all three global generators."""

    def __init__(self, config: StandInConfig, split: str) -> None:
        self.config, self.split = config, split
        generator = torch.Generator().manual_seed(3 if split == "train" else 4)
        self.labels = torch.arange(config.samples) % 2
        self.points = torch.randn(config.samples, 3, 4, 4, generator=generator) + self.labels[:, None, None, None]

    def __len__(self) -> int:
        return self.config.samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int, int]:
        if index in self.config.broken:
            raise BrokenSampleError(f"{self.split}/{index}: cannot be read")
        point = self.points[index]
        if self.split == "train" and self.config.noise:
            point = point + 0.1 * torch.randn(3, 4, 4) + 0.1 * random.random() + 0.1 * float(np.random.rand())
        return point, int(self.labels[index]), index


class Accuracy(Metrics):
    def __init__(self) -> None:
        self.seen: list[tuple[int, bool]] = []

    def update(self, model, batch):
        points, labels, indices = batch
        right = model(points).argmax(-1) == labels
        self.seen += list(zip(indices.tolist(), right.tolist(), strict=True))

    def state(self):
        return self.seen

    def compute(self, states):
        seen = [entry for state in states for entry in state]
        return {
            "accuracy": sum(right for _, right in seen) / len(seen),
            "distinct": len({index for index, _ in seen}),
        }


class ShiftedNorm(nn.BatchNorm2d):
    """A subclass that does something around the norm, as channel-last norms do."""

    def forward(self, x):
        return super().forward(x + 1) * 2


class StandIn(TrainingTask[StandInConfig]):
    monitor = "accuracy"

    def model(self):
        model = nn.Sequential(
            nn.Conv2d(3, 6, 3),
            nn.BatchNorm2d(6),
            nn.GELU(),
            nn.Dropout(self.config.dropout),
            nn.Conv2d(6, 4, 1),
            ShiftedNorm(4),
            nn.Flatten(),
            nn.Linear(16, 2),
        )
        return model.double() if self.config.amp == "none" else model

    def train_data(self):
        return Points(self.config, "train")

    def eval_data(self):
        return {"val": Points(self.config, "val"), "test": Points(self.config, "test")}

    def collate(self, samples):
        points, labels, indices = zip(*samples, strict=True)
        points = torch.stack(points)
        return points.double() if self.config.amp == "none" else points, torch.tensor(labels), torch.tensor(indices)

    def loss(self, model, batch):
        points, labels, _ = batch
        loss = nn.functional.cross_entropy(model(points), labels)
        if self.config.nan_at is not None and optimizer_steps.count == self.config.nan_at:
            loss = loss * float("nan")
        optimizer_steps.count += 1
        return {"cross_entropy": loss}

    def metrics(self):
        return Accuracy()

    def save_weights(self, model, path):
        save_file(model.state_dict(), path)


class _Count:
    count = 0


optimizer_steps = _Count()
DEFAULTS = {
    "task": "stand_in",
    "model": "none",
    "epochs": 4,
    "batch_size": 4,
    "lr": 0.01,
    "eval_epochs": 2,
    "checkpoint_steps": 2,
    "log_steps": 3,
    "log": ["csv"],
    "ema": {"decay": 0.8},
    "schedule": {"warmup_epochs": 1},
}


def make(*assignments: str) -> StandIn:
    return StandIn(configs.build(StandInConfig, configs.override(DEFAULTS, assignments)))


def run(out: Path, *assignments: str, resume: str = "none", read_steps: int = 1, **kwargs) -> Trainer:
    """Train; `read_steps` is the number of steps between reads of the loss, as on a GPU."""
    optimizer_steps.count = 0
    with distributed.world() as world, folder.reserve(Path(out), world):
        trainer = Trainer(make(*assignments), Path(out), world, resume=resume, **kwargs)
        trainer.read_steps = read_steps
        trainer.train()
    return trainer


READS = {"item", "tolist", "cpu", "numpy", "nonzero", "equal", "__bool__", "__float__", "__int__", "__index__"}
UPLOADS = {"tensor", "as_tensor", "new_tensor"}  # a GPU would have to take these before the host went on


class Waits(TorchFunctionMode):
    """Records the calls that would make the host wait for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function.__name__ in READS | UPLOADS:
            self.seen.append(function.__name__)
        return function(*args, **(kwargs or {}))


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main(command: list[str]) -> None:
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("resume")
    parser.add_argument("assignments", nargs="*")
    parser.add_argument("--kill-at-step", type=int)
    parser.add_argument("--kill-in-save", type=int)
    parser.add_argument("--read-steps", type=int, default=1)
    parser.add_argument("--slow", action="store_true", help="a step takes a while, so that a signal meets it")
    parser.add_argument("--print-waits", action="store_true", help="what a step reads, a line for each")
    arguments = parser.parse_args(command)
    if arguments.print_waits:
        step = Trainer._step

        def watched(self, batches, request):
            batch = [next(batches) for _ in range(self.config.accumulate)]  # the loader reads on the CPU
            with Waits() as waits:
                step(self, iter(batch), request)
            print(f"step {self.step}: {' '.join(waits.seen)}", flush=True)

        Trainer._step = watched
    if arguments.kill_at_step is not None or arguments.slow:
        learn = StandIn.loss

        def loss(self, model, batch):
            if optimizer_steps.count == arguments.kill_at_step:
                _die()
            if arguments.slow:
                print("step", flush=True)
                signal.sigtimedwait([], 0.2)
            return learn(self, model, batch)

        StandIn.loss = loss
    if arguments.kill_in_save is not None:
        sync, calls = os.fsync, _Count()

        def die_before_rename(descriptor: int) -> None:
            sync(descriptor)
            calls.count += 1
            if calls.count == arguments.kill_in_save:
                _die()

        os.fsync = die_before_rename
    run(arguments.out, *arguments.assignments, resume=arguments.resume, read_steps=arguments.read_steps)
