"""The interface between a task and the engine."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from torch import Tensor, nn
from torch.utils.data import Dataset

from ppma.engine.config import RunConfig

Config = TypeVar("Config", bound=RunConfig)


@dataclass(frozen=True)
class Details:
    """What an evaluation found beyond its metrics.

    Attributes:
        classes: a row for each class, with the keys "class", "count" and the metrics of the class, None where it has
            none.
        confusion: counts [label, prediction], (classes, classes), int64; None if the task has no such matrix.
        predictions: every prediction, as plain values for JSON; None if the task has no common format.
    """

    classes: list[dict[str, Any]]
    confusion: Tensor | None = None
    predictions: list[Any] | None = None


class Metrics(ABC):
    """Metrics on held-out data: updated batch by batch in every process, computed at the end in the main one."""

    @abstractmethod
    def update(self, model: nn.Module, batch: Any) -> None:
        """Run the model, in evaluation mode, on one batch on its device, and accumulate the results."""

    @abstractmethod
    def state(self) -> Any:
        """The accumulated results, as picklable values or CPU tensors."""

    @abstractmethod
    def compute(self, states: Sequence[Any]) -> dict[str, float]:
        """Compute the metrics, by name, from the states of all processes."""

    def details(self, states: Sequence[Any]) -> Details | None:
        """What `ppma eval --out` writes besides; called after `compute` with the same states."""
        return None


class TrainingTask(ABC, Generic[Config]):
    """Model, data, loss and metrics of a task.

    Attributes:
        config: the run's configuration.
        monitor: name of the metric that selects the best weights; larger is better.
        backbone: name of the backbone's submodule in the model; "" if the model is the backbone and its classifier.
    """

    monitor: str
    backbone: str = ""

    def __init__(self, config: Config) -> None:
        self.config = config

    @abstractmethod
    def model(self) -> nn.Module:
        """Build the model on the CPU, with its initial weights."""

    @abstractmethod
    def train_data(self) -> Dataset:
        """The training samples. A sample may draw from the global random generators, which are seeded for each one."""

    def sample_weights(self) -> Sequence[float] | None:
        """Relative probabilities with which an epoch draws each training sample; None to use each sample once."""
        return None

    @abstractmethod
    def eval_data(self) -> Mapping[str, Dataset]:
        """The held-out samples by split.

        "val" is evaluated during training and selects the best weights; others are evaluated once, with those weights.
        """

    @abstractmethod
    def collate(self, samples: list[Any]) -> Any:
        """Make a batch: tensors, possibly nested in tuples, lists and dictionaries."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """Compute the named terms of the loss, each a mean over the batch; their sum is minimised."""

    @abstractmethod
    def metrics(self) -> Metrics:
        """Make an empty metrics object."""

    @abstractmethod
    def save_weights(self, model: nn.Module, path: Path) -> None:
        """Write the weight file that users load, atomically."""
