"""The contract of a task: how it trains, and how a trained model is evaluated, used and exported.

`docs/contributing/task.md` writes one out.
"""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import nn
from torch.utils.data import Dataset

from ppma import config as configs
from ppma.data.decoding import Report
from ppma.engine.config import RunConfig
from ppma.engine.evaluation import evaluate_model
from ppma.engine.task import Config, Metrics, TrainingTask
from ppma.models import Checkpoint


@dataclass(frozen=True)
class Evaluation:
    """What `Task.evaluate` runs.

    Attributes:
        model: in evaluation mode.
        metrics: fresh.
        dataset: held-out samples.
    """

    model: nn.Module
    metrics: Metrics
    dataset: Dataset


@dataclass(frozen=True)
class Prediction:
    """What a model says of one image.

    Attributes:
        values: plain values, for JSON.
        lines: the same for people.
    """

    values: dict[str, Any]
    lines: Sequence[str]


class Task(TrainingTask[Config]):
    """A task that `ppma.tasks.registry` names.

    Attributes:
        schema: of its configuration files.
        predict_options: a dataclass of what `predict` takes beside images; every field has a default.
        eval_batch_size: of one process, unless `ppma eval --batch-size` says otherwise.
    """

    schema: ClassVar[type[RunConfig]]
    predict_options: ClassVar[type]
    eval_batch_size: ClassVar[int] = 4

    @staticmethod
    @abstractmethod
    def collate(samples: list[Any]) -> Any: ...

    @staticmethod
    @abstractmethod
    def evaluation(checkpoint: Checkpoint, data: str, split: str | None, assignments: Iterable[str]) -> Evaluation:
        """A trained model and the data it is measured on.

        Args:
            checkpoint: of this task.
            data: what `ppma eval --data` names: a configuration file or a folder.
            split: which part; None for the held-out one.
            assignments: `key=value` changes of the configuration.
        """

    @staticmethod
    @abstractmethod
    def predict(
        checkpoint: Checkpoint, images: Sequence[str | Path], options: Any, report: Report | None = None
    ) -> Iterator[Prediction]:
        """Use a trained model on images, each as it is asked for.

        Args:
            checkpoint: of this task.
            images: paths; a folder stands for the images in it.
            options: of the class `predict_options`.
            report: called for each image that cannot be read, see `ppma.data.decoding.read_images`.
        """

    @staticmethod
    @abstractmethod
    def exportable(checkpoint: Checkpoint, **changes: Any) -> tuple[nn.Module, dict[str, str]]:
        """The module that `ppma export` writes, and its outputs: names, and descriptions.

        Args:
            checkpoint: of this task.
            changes: fields of the backbone's configuration to change.

        Raises:
            ValueError: such a model cannot be exported.
        """

    @staticmethod
    def convert(checkpoint: Checkpoint, target: Path, **changes: Any) -> str | None:
        """Write a whole model to another format, chosen by the suffix of `target`.

        Args:
            checkpoint: a file of this task.
            target: output file.
            changes: fields of the backbone's configuration to override.

        Returns:
            A line about what was written; None where `ppma convert` writes the backbone alone.
        """
        return None

    @classmethod
    def evaluate(
        cls,
        checkpoint: Checkpoint,
        data: str,
        *,
        split: str | None = None,
        assignments: Iterable[str] = (),
        batch_size: int | None = None,
        **options: Any,
    ) -> dict[str, float]:
        """Measure a trained model; under torchrun the samples are shared out.

        Args:
            checkpoint: of this task.
            data: see `evaluation`, as for `split` and `assignments`.
            split: which part.
            assignments: changes.
            batch_size: for one process.
            options: of `evaluate_model`, such as `workers`.
        """
        chosen = cls.evaluation(checkpoint, data, split, assignments)
        size = cls.eval_batch_size if batch_size is None else batch_size
        return evaluate_model(chosen.model, chosen.metrics, chosen.dataset, cls.collate, batch_size=size, **options)

    @classmethod
    def parse_options(cls, values: Mapping[str, Any]) -> Any:
        """Checked `predict_options` from plain values."""
        return configs.build(cls.predict_options, values, source="options")
