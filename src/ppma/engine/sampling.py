"""Batches as a pure function of (seed, step), for any number of processes and loader workers.

A run is one stream of global batches. The order of an epoch depends on (seed, epoch) and a sample's augmentation on
(seed, epoch, position), so a run can be resumed at any step. Process r of n takes every n-th sample of a global
micro-batch, so that repeated copies of a sample go to different processes.
"""

import contextlib
import random
import signal
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from ppma.data.errors import BrokenSampleError
from ppma.engine.config import RunConfig
from ppma.engine.distributed import World
from ppma.engine.errors import LoaderDiedError, TooManyBrokenError

REPLACEMENTS = 20  # attempts to replace a broken sample


class Key(NamedTuple):
    """One sample in the stream.

    Attributes:
        epoch: index of the epoch.
        position: position in the epoch.
        sample: index in the data set.
    """

    epoch: int
    position: int
    sample: int


class Batch(NamedTuple):
    """One micro-batch of this process.

    Attributes:
        data: what the task's `collate` returned; None if every sample was broken.
        size: number of samples in `data`.
        broken: a message for each broken sample.
        keys: the samples in `data`.
    """

    data: Any
    size: int
    broken: list[str]
    keys: list[Key]


class _Read(NamedTuple):
    key: Key
    sample: Any
    broken: list[str]


@contextlib.contextmanager
def seeded(*entropy: int) -> Iterator[None]:
    """Seed Python's, NumPy's and torch's CPU generators inside the context, and restore them afterwards.

    Examples:
        >>> with seeded(1, 2):
        ...     first = random.random()
        >>> with seeded(1, 2):
        ...     first == random.random()
        True
    """
    with restored_generators():
        _seed(*entropy)
        yield


@contextlib.contextmanager
def restored_generators() -> Iterator[None]:
    """Restore Python's, NumPy's and torch's CPU generators afterwards."""
    kept = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(kept[0])
        np.random.set_state(kept[1])
        torch.default_generator.set_state(kept[2])


def _seed(*entropy: int) -> None:
    seed = int(np.random.SeedSequence(entropy).generate_state(1)[0])
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)


def epoch_order(
    samples: int, seed: int, epoch: int, repeats: int = 1, weights: Sequence[float] | None = None
) -> list[int]:
    """The sample indices of one epoch, as many as there are samples.

    Args:
        samples: number of samples.
        seed: seed of the run.
        epoch: index of the epoch.
        repeats: copies of each index, in a row.
        weights: relative probabilities with which indices are drawn, with replacement; None for a permutation.

    Examples:
        >>> sorted(epoch_order(4, seed=0, epoch=0))
        [0, 1, 2, 3]
        >>> epoch_order(4, seed=0, epoch=0, weights=[0, 0, 1, 0])
        [2, 2, 2, 2]
    """
    generator = torch.Generator().manual_seed(int(np.random.SeedSequence((seed, epoch)).generate_state(1)[0]))
    if weights is None:
        order = torch.randperm(samples, generator=generator)
    else:
        chances = torch.tensor(weights, dtype=torch.float64)
        order = torch.multinomial(chances, samples, replacement=True, generator=generator)
    return order.repeat_interleave(repeats)[:samples].tolist()


class StepSampler(Sampler[list[Key]]):
    """The keys of this process's micro-batches for a range of steps.

    Args:
        samples: number of samples.
        config: the run's configuration: seed, batch_size, accumulate, repeats.
        world: this process among all.
        steps: the steps.
        weights: see `epoch_order`.
    """

    def __init__(
        self, samples: int, config: RunConfig, world: World, steps: range, weights: Sequence[float] | None = None
    ) -> None:
        self.samples, self.config, self.world, self.steps, self.weights = samples, config, world, steps, weights
        self.per_epoch = samples // config.batch_size

    def __iter__(self) -> Iterator[list[Key]]:
        config, current, order = self.config, -1, []
        for step in self.steps:
            epoch, first = step // self.per_epoch, step % self.per_epoch * config.batch_size
            if epoch != current:
                current, order = epoch, epoch_order(self.samples, config.seed, epoch, config.repeats, self.weights)
            size = config.batch_size // config.accumulate  # of a micro-batch over all processes
            for begin in range(first, first + config.batch_size, size):
                mine = range(begin + self.world.rank, begin + size, self.world.size)
                yield [Key(epoch, position, order[position]) for position in mine]

    def __len__(self) -> int:
        return len(self.steps) * self.config.accumulate


class SeededSamples(Dataset):
    """Samples by key. A broken one is replaced in training by another drawn from the same seed, else skipped."""

    def __init__(self, dataset: Dataset, seed: int, *, replace: bool) -> None:
        self.dataset, self.seed, self.replace = dataset, seed, replace

    def __getitem__(self, key: Key) -> _Read:
        with restored_generators():
            return self._read(key)

    def __getitems__(self, keys: list[Key]) -> list[_Read]:
        """A batch, for PyTorch's loader: saving and restoring the generators takes as long as a small image."""
        with restored_generators():
            return [self._read(key) for key in keys]

    def _read(self, key: Key) -> _Read:
        _seed(self.seed, key.epoch, key.position)
        broken: list[str] = []
        index = key.sample
        for _ in range(REPLACEMENTS if self.replace else 1):
            try:
                return _Read(key, self.dataset[index], broken)
            except BrokenSampleError as error:
                broken.append(str(error))
                index = random.randrange(len(self.dataset))  # type: ignore[arg-type]
        return _Read(key, None, broken)


class _Collate:
    """Makes a `Batch` from the reads of `SeededSamples`; picklable, for loader processes."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self.collate = collate

    def __call__(self, reads: Sequence[_Read]) -> Batch:
        good = [read for read in reads if read.sample is not None]
        data = self.collate([read.sample for read in good]) if good else None
        broken = [message for read in reads for message in read.broken]
        return Batch(data, len(good), broken, [read.key for read in good])


def _ignore_signals(worker: int) -> None:
    """Ctrl-C and SIGTERM often go to the whole process group, but the loop needs its workers until it has saved."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def name_dead_workers() -> Iterator[None]:
    """Turn PyTorch's error about a killed loader process, which can be raised anywhere in the loop, into one line."""
    try:
        yield
    except RuntimeError as error:
        if not str(error).startswith("DataLoader worker (pid"):
            raise
        reason = str(error).splitlines()[0].removeprefix("DataLoader worker ").rstrip(". ")
        raise LoaderDiedError(
            f"a loader process died: {reason}. The usual cause is that memory or shared memory ran out: try fewer "
            "workers or a smaller batch_size"
        ) from None


def _read(dataset: Dataset, workers: int, world: World, **kwargs: Any) -> Generator[Batch, None, None]:
    loader = DataLoader(
        dataset,
        num_workers=workers,
        pin_memory=world.device.type == "cuda",
        worker_init_fn=_ignore_signals,
        generator=torch.Generator().manual_seed(0),  # creating an iterator must not advance the global generator
        **kwargs,
    )
    iterator = iter(loader)
    try:
        yield from iterator
    finally:
        # Workers ignore SIGTERM, so they must be shut down here; at exit Python would terminate them and wait.
        if workers:
            iterator._shutdown_workers()  # type: ignore[attr-defined]


def train_batches(
    dataset: Dataset, collate: Callable[[list[Any]], Any], sampler: StepSampler
) -> Generator[Batch, None, None]:
    """Yield this process's micro-batches of the sampler's steps, `accumulate` for each step."""
    config, world = sampler.config, sampler.world
    samples = SeededSamples(dataset, config.seed, replace=True)
    size = config.batch_size // config.accumulate // world.size
    read = _read(samples, config.workers, world, batch_sampler=sampler, collate_fn=_Collate(collate))
    with contextlib.closing(read) as batches:
        for batch in batches:
            if batch.size < size:
                raise TooManyBrokenError(f"{REPLACEMENTS} broken samples in a row, the last: {batch.broken[-1]}")
            yield batch


def eval_batches(
    dataset: Dataset, collate: Callable[[list[Any]], Any], *, batch_size: int, workers: int, world: World
) -> Generator[Batch, None, None]:
    """Yield every sample once over all processes, in order and unpadded; `batch_size` is that of one process."""
    keys = [Key(0, index, index) for index in range(world.rank, len(dataset), world.size)]  # type: ignore[arg-type]
    batches = [keys[first : first + batch_size] for first in range(0, len(keys), batch_size)]
    samples = SeededSamples(dataset, 0, replace=False)
    return _read(samples, workers, world, batch_sampler=batches, collate_fn=_Collate(collate))


def to_device(value: Any, device: torch.device) -> Any:
    """Move tensors nested in tuples, lists and dictionaries to the device."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, dict):
        return {key: to_device(item, device) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(to_device(item, device) for item in value)
    return value


def seed_process(seed: int, rank: int = 0, *, deterministic: bool = False) -> None:
    """Seed Python, NumPy and torch; the processes of a run get different seeds.

    Args:
        seed: seed of the run.
        rank: index of the process.
        deterministic: also select deterministic GPU kernels where they exist.
    """
    mixed = int(np.random.SeedSequence((seed, rank)).generate_state(1)[0])
    random.seed(mixed)
    np.random.seed(mixed)
    torch.manual_seed(mixed)
    if deterministic:
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False
        torch.use_deterministic_algorithms(True, warn_only=True)
