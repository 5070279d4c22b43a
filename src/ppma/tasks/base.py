"""The interface of a task: training, evaluation, prediction and export; `docs/contributing/task.md` has an example."""

from abc import abstractmethod
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.utils.data import Dataset

from ppma import config as configs
from ppma.data.checked import CheckedData
from ppma.data.decoding import Report
from ppma.data.drawing import Panel
from ppma.engine.config import RunConfig
from ppma.engine.evaluation import evaluate_model
from ppma.engine.task import Config, Details, Metrics, TrainingTask
from ppma.models import Checkpoint
from ppma.progress import Progress
from ppma.tasks.prediction import PredictOptions, ResultFolder
from ppma.tasks.report import FILES, report_files


@dataclass(frozen=True)
class Evaluation:
    """The parts of an evaluation.

    Attributes:
        model: the model, in evaluation mode.
        metrics: an empty metrics object.
        dataset: the held-out samples.
    """

    model: nn.Module
    metrics: Metrics
    dataset: Dataset


@dataclass(frozen=True)
class Prediction:
    """The prediction for one image.

    Attributes:
        values: plain values, for JSON, with the paths of the files that were written.
        lines: the same as text to print.
    """

    values: dict[str, Any]
    lines: Sequence[str]


class Task(TrainingTask[Config]):
    """A task of `ppma.tasks.registry`.

    Attributes:
        schema: schema of its configuration files.
        predict_options: dataclass of the options of `predict`, with the task's own; every field has a default.
        preprocessing_keys: keys of the `data` section that a model of timm sets.
        eval_batch_size: batch size of one process when `ppma eval --batch-size` is not given.
    """

    schema: ClassVar[type[RunConfig]]
    predict_options: ClassVar[type[PredictOptions]] = PredictOptions
    preprocessing_keys: ClassVar[tuple[str, ...]] = ("mean", "std")
    eval_batch_size: ClassVar[int] = 4

    @staticmethod
    @abstractmethod
    def collate(samples: list[Any]) -> Any: ...

    @staticmethod
    @abstractmethod
    def evaluation(checkpoint: Checkpoint, data: str, split: str | None, assignments: Iterable[str]) -> Evaluation:
        """Load a trained model and the data to evaluate it on.

        Args:
            checkpoint: a checkpoint of this task.
            data: the argument of `ppma eval --data`: a recipe or a folder.
            split: name of the split; None for the held-out one.
            assignments: `key=value` changes of the recipe.
        """

    @staticmethod
    @abstractmethod
    def predict(
        checkpoint: Checkpoint, images: Sequence[str | Path], options: Any, report: Report | None = None
    ) -> Generator[Prediction, None, None]:
        """Predict lazily, image by image, and write the result files of `options.out`.

        Files about all images are complete when the iteration ends or is closed, for whatever reason.

        Args:
            checkpoint: a checkpoint of this task.
            images: paths of images, folders or patterns, see `ppma.data.decoding.image_files`.
            options: an instance of `predict_options`.
            report: called for each unreadable image, see `ppma.data.decoding.read_images`.
        """

    @staticmethod
    @abstractmethod
    def exportable(checkpoint: Checkpoint, **changes: Any) -> tuple[nn.Module, dict[str, str]]:
        """Load the module that `ppma export` writes, and describe its outputs by name.

        Args:
            checkpoint: a checkpoint of this task.
            changes: fields of the backbone's configuration to change.

        Raises:
            ValueError: the model cannot be exported.
        """

    def macs(self, model: nn.Module) -> int:
        """Count the multiply-adds for one image of the size of `example`; `ppma ablate` and `ppma compare` need both.

        Args:
            model: a model of this task.
        """
        raise configs.ConfigError(f"task: expected one that counts and times its models, got {self.config.task}")

    def example(self, batch: int) -> Any:
        """A random input of the model in evaluation mode, to time it.

        Args:
            batch: number of images.
        """
        raise configs.ConfigError(f"task: expected one that counts and times its models, got {self.config.task}")

    def checked_data(self) -> Mapping[str, CheckedData]:
        """The data sets that `ppma data check` examines: `train_data` as "train", and those of `eval_data`."""
        data = {"train": self.train_data(), **self.eval_data()}
        checked = {name: split for name, split in data.items() if isinstance(split, CheckedData)}
        if len(checked) < len(data):
            raise configs.ConfigError(f"task: expected one whose data can be checked, got {self.config.task}")
        return checked

    def draw(self, sample: Any) -> Panel:
        """Draw a sample of `train_data` with its labels; `ppma data check` needs it.

        Args:
            sample: an augmented sample.

        Returns:
            The drawing, at most `ppma.data.drawing.CELL` pixels wide and high, and a caption.
        """
        raise configs.ConfigError(f"task: expected one that draws its samples, got {self.config.task}")

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
        out: str | None = None,
        overwrite: bool = False,
        **options: Any,
    ) -> dict[str, float]:
        """Evaluate a trained model; under torchrun the samples are divided between the processes.

        Args:
            checkpoint: a checkpoint of this task.
            data: see `evaluation`.
            split: see `evaluation`.
            assignments: see `evaluation`.
            batch_size: batch size of one process; None for `eval_batch_size`.
            out: folder for the files of `ppma.tasks.report`; None to write none.
            overwrite: replace such files of an earlier evaluation.
            options: options of `ppma.engine.evaluation.evaluate_model`, such as `workers`.
        """
        folder = ResultFolder(out, names=FILES, overwrite=overwrite)

        def write(measured: dict[str, float], details: Details | None) -> None:
            for name, content in report_files(measured, details).items():
                folder.write(name, content)

        with Progress("loading the model and the data"):
            chosen = cls.evaluation(checkpoint, data, split, assignments)
        if out is not None:
            options["report"] = write
        size = cls.eval_batch_size if batch_size is None else batch_size
        return evaluate_model(chosen.model, chosen.metrics, chosen.dataset, cls.collate, batch_size=size, **options)

    @classmethod
    def probe(cls, checkpoint: Checkpoint, images: Tensor) -> Tensor:
        """Load the whole model, with every name and shape checked, and return its output for `ppma weights --verify`.

        Args:
            checkpoint: a checkpoint of this task.
            images: (B, 3, height, width); the model is cast to their dtype.
        """
        model, _ = cls.exportable(checkpoint)
        return model.to(images.dtype)(images)

    @classmethod
    def parse_options(cls, values: Mapping[str, Any]) -> Any:
        """Validate plain values and build `predict_options`."""
        return configs.build(cls.predict_options, values, source="options")
