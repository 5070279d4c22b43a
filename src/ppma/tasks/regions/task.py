"""Training of a small model of masked attention on the synthetic regions."""

from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import Dataset

from ppma import config as configs
from ppma.config import ConfigError, require
from ppma.data.decoding import Report
from ppma.data.drawing import CELL, Panel
from ppma.data.label_maps import IGNORED
from ppma.data.regions import SPLITS, Regions, RegionsDataConfig, draw_regions
from ppma.engine.config import RunConfig
from ppma.engine.task import Metrics
from ppma.models import BackboneConfig, Checkpoint, CheckpointError
from ppma.models.checkpoints import write_checkpoint
from ppma.models.grid import GridModel, grid_config, load_grid
from ppma.recipes import is_recipe
from ppma.tasks.base import Evaluation, Prediction, Task
from ppma.tasks.dense.cost import count
from ppma.tasks.registry import load_config


@dataclass(frozen=True, kw_only=True)
class RegionsConfig(RunConfig):
    """A run on the regions; `model` is "grid", and `model_args` are fields of its only stage.

    Attributes:
        data: see `RegionsDataConfig`.
    """

    data: RegionsDataConfig = field(default_factory=RegionsDataConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.model == "grid", "model", "'grid', the model of this task", self.model)
        try:
            self.grid  # noqa: B018
        except (ValueError, TypeError) as error:
            raise ConfigError(str(error)) from None

    @property
    def grid(self) -> BackboneConfig:
        """The configuration of the model."""
        return grid_config(self.data.channels, self.data.colours, **self.model_args)


class PixelAccuracy(Metrics):
    """Pixels with the right colour, in percent of those that have one."""

    def __init__(self) -> None:
        self.right = self.labelled = 0

    def update(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
        images, labels = batch
        labelled = labels != IGNORED
        self.right += int((model(images).argmax(1) == labels)[labelled].sum())
        self.labelled += int(labelled.sum())

    def state(self) -> tuple[int, int]:
        return self.right, self.labelled

    def compute(self, states: Sequence[tuple[int, int]]) -> dict[str, float]:
        right, labelled = (sum(parts) for parts in zip(*states, strict=True))
        return {"accuracy": 100 * right / max(labelled, 1)}


class RegionsTask(Task[RegionsConfig]):
    """Training on the regions; evaluated on images like the training's, on larger grids and on larger regions."""

    schema = RegionsConfig
    monitor = "accuracy"
    backbone = "stage"
    eval_batch_size = 16

    def model(self) -> nn.Module:
        return GridModel(self.config.grid)

    def train_data(self) -> Dataset:
        return Regions(self.config.data, "train")

    def eval_data(self) -> Mapping[str, Dataset]:
        return {split: Regions(self.config.data, split) for split in SPLITS[1:]}

    @staticmethod
    def collate(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        images, labels = zip(*samples, strict=True)
        return torch.stack(images), torch.stack(labels)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        images, labels = batch
        return {"cross_entropy": F.cross_entropy(model(images).float(), labels, ignore_index=IGNORED)}

    def metrics(self) -> PixelAccuracy:
        return PixelAccuracy()

    def draw(self, sample: tuple[Tensor, Tensor]) -> Panel:
        drawn = draw_regions(*sample)
        return Image.fromarray(drawn.numpy()).resize((CELL, CELL), Image.Resampling.NEAREST), ""

    def macs(self, model: nn.Module) -> int:
        size = (1, self.config.data.channels, self.config.data.size, self.config.data.size)
        return count(model, lambda shadow: shadow(torch.empty(size, device="meta"))).macs

    def example(self, batch: int) -> Tensor:
        return torch.randn(batch, self.config.data.channels, self.config.data.size, self.config.data.size)

    def save_weights(self, model: nn.Module, path: Path) -> None:
        assert isinstance(model, GridModel)
        colours = [f"colour {number}" for number in range(self.config.data.colours)]
        facts = {"classes": colours, "config": configs.to_dict(self.config)}
        write_checkpoint(path, model.state_dict(), model.config, task="regions", facts=facts)

    @staticmethod
    def evaluation(checkpoint: Checkpoint, data: str, split: str | None, assignments: Iterable[str]) -> Evaluation:
        """See `ppma.tasks.base.Task.evaluation`; `data` is a recipe, `split` one of `ppma.data.regions.SPLITS`."""
        model = load_grid(checkpoint)
        require(is_recipe(data), "data", "a recipe of the regions", data)
        config = load_config(data, assignments)
        if not isinstance(config, RegionsConfig):
            raise ConfigError(f"{data}: expected a recipe of the regions, got {config.task}")
        expected = model.config.num_classes
        require(config.data.colours == expected, "data.colours", f"{expected} as in the file", config.data.colours)
        return Evaluation(model, PixelAccuracy(), Regions(config.data, split or "test"))

    @staticmethod
    def predict(
        checkpoint: Checkpoint, images: Sequence[str | Path], options: Any, report: Report | None = None
    ) -> Generator[Prediction, None, None]:
        _refuse(checkpoint)

    @staticmethod
    def exportable(checkpoint: Checkpoint, **changes: Any) -> tuple[nn.Module, dict[str, str]]:
        _refuse(checkpoint)


def _refuse(checkpoint: Checkpoint) -> NoReturn:
    raise CheckpointError(f"{checkpoint.path}: expected a model of photographs, got one of the regions task")
