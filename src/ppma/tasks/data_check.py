"""What a training will see of its data: `ppma data check`."""

from dataclasses import dataclass

from PIL import Image

from ppma.config import require
from ppma.data.checked import SplitFacts, examine
from ppma.data.drawing import contact_sheet
from ppma.engine.sampling import Key, SeededSamples, epoch_order
from ppma.progress import track
from ppma.tasks.base import Task


@dataclass(frozen=True)
class DataCheck:
    """The result of a check.

    Attributes:
        splits: what each split holds, the training split first.
        sheet: the first training samples with their augmentation and labels; None if none were asked for.
    """

    splits: list[SplitFacts]
    sheet: Image.Image | None


def check_data(task: Task, *, limit: int | None = None, panels: int = 0) -> DataCheck:
    """Read the data of a task.

    Args:
        task: the task of a configuration, see `ppma.tasks.registry.make_task`.
        limit: read at most this many samples of each split, evenly spread; None for all.
        panels: number of samples on the sheet. They are the first ones of the training, in its order and with the
            augmentation of its first epoch.

    Raises:
        ValueError: nothing can be trained.

    Examples:
        >>> from ppma.tasks.data_check import check_data
        >>> from ppma.tasks.registry import load_config, make_task
        >>> check = check_data(make_task(load_config("digits_nano")), limit=20)
        >>> [(split.name, split.samples, split.read) for split in check.splits]
        [('train', 1258, 20), ('val', 180, 20), ('test', 359, 20)]
    """
    config, data = task.config, task.checked_data()
    samples = len(data["train"])
    require(samples >= config.batch_size, "batch_size", f"at most the {samples} samples", config.batch_size)
    splits = [examine(name, split, limit) for name, split in data.items()]
    if panels == 0:
        return DataCheck(splits, None)
    order = epoch_order(samples, config.seed, 0, config.repeats, task.sample_weights())[:panels]
    seeded = SeededSamples(data["train"], config.seed, replace=True)
    keys = [Key(0, position, sample) for position, sample in enumerate(order)]
    reads = [seeded[key].sample for key in track(keys, "drawing")]
    return DataCheck(splits, contact_sheet([task.draw(sample) for sample in reads if sample is not None]))
