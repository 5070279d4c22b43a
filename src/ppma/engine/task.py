"""What a task supplies to the engine."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from torch import Tensor, nn
from torch.utils.data import Dataset

from ppma.engine.config import RunConfig

Config = TypeVar("Config", bound=RunConfig)


class Metrics(ABC):
    """What is measured on held-out data: fed batch by batch in every process, put together at the end in one."""

    @abstractmethod
    def update(self, model: nn.Module, batch: Any) -> None:
        """Run the model, in evaluation mode, on one batch on its device, and note what came out."""

    @abstractmethod
    def state(self) -> Any:
        """What was noted, as plain picklable values or CPU tensors."""

    @abstractmethod
    def compute(self, states: Sequence[Any]) -> dict[str, float]:
        """The metrics from the states of all processes."""


class TrainingTask(ABC, Generic[Config]):
    """Model, data, loss and metrics of one kind of training.

    Attributes:
        monitor: name of the metric that chooses the best weights; larger is better.
    """

    monitor: str

    def __init__(self, config: Config) -> None:
        self.config = config

    @abstractmethod
    def model(self) -> nn.Module:
        """A new model, on the CPU, with its starting weights."""

    @abstractmethod
    def train_data(self) -> Dataset:
        """Training samples. A sample may depend on the global random generators, which are seeded for each one."""

    @abstractmethod
    def eval_data(self) -> Mapping[str, Dataset]:
        """Held-out samples by split.

        "val" is evaluated during training and chooses the best weights; any other once, at the end, with those.
        """

    @abstractmethod
    def collate(self, samples: list[Any]) -> Any:
        """A batch: tensors, nested in tuples, lists and dictionaries as the task likes."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """Named parts of the loss, each a mean over the batch; their sum is minimised."""

    @abstractmethod
    def metrics(self) -> Metrics:
        """A fresh, empty object."""

    @abstractmethod
    def save_weights(self, model: nn.Module, path: Path) -> None:
        """Write the file that users load; replace an older one only when complete."""
