"""Order and augmentation are functions of seed, epoch and position."""

import random
from collections import Counter

import numpy as np
import pytest
import torch
from stand_in import make

from ppma.engine.distributed import World
from ppma.engine.evaluation import BrokenSamples, TooManyBrokenError
from ppma.engine.sampling import Key, SeededSamples, StepSampler, epoch_order, eval_batches, seeded, train_batches


def batches(*, world=None, steps=range(12), accumulate=1, workers=0, repeats=1, settings=(), weights=None):
    task = make(
        "seed=5", "batch_size=8", f"accumulate={accumulate}", f"workers={workers}", f"repeats={repeats}", *settings
    )
    dataset = task.train_data()
    sampler = StepSampler(len(dataset), task.config, world or World(), steps, weights)
    return list(train_batches(dataset, task.collate, sampler))


def samples(micro_batches):
    """Sample data by its place in the run."""
    return {
        (key.epoch, key.position): (key.sample, *(part[row] for part in batch.data))
        for batch in micro_batches
        for row, key in enumerate(batch.keys)
    }


def assert_same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for place, sample in ours.items():
        assert all(
            torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(sample, theirs[place], strict=True)
        )


def test_epoch_order_is_a_permutation():
    orders = [epoch_order(50, seed=1, epoch=epoch) for epoch in range(3)]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3
    assert epoch_order(50, seed=2, epoch=0) != orders[0]


def test_epoch_order_repeats():
    order = epoch_order(12, seed=0, epoch=0, repeats=3)
    assert len(order) == 12
    assert set(Counter(order).values()) == {3}
    points = samples(batches(repeats=3, steps=range(3)))
    first, second = points[0, 0], points[0, 1]
    assert first[0] == second[0]
    assert not torch.equal(first[1], second[1])


@pytest.mark.parametrize("change", [{"workers": 2}, {"accumulate": 4}, {"steps": "two halves"}, {"world": 2}])
def test_train_batches_independent_of_loading(change):
    whole = samples(batches())
    if change.get("steps"):
        parts = batches(steps=range(5)) + batches(steps=range(5, 12))
    elif "world" in change:
        parts = [batch for rank in range(2) for batch in batches(world=World(rank, 2))]
    else:
        parts = batches(**change)
    assert_same(samples(parts), whole)


def test_train_batches_keep_global_generators():
    def draws():
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    with seeded(1):
        undisturbed = draws()
    with seeded(1):
        batches()
        assert draws() == undisturbed


def test_samples_by_batch_and_one_by_one():
    """The same draws, whether the generators are seeded in a batch or for a single sample."""
    task = make()
    read = SeededSamples(task.train_data(), 3, replace=True)
    keys = [Key(0, position, sample) for position, sample in enumerate((5, 1, 5))]
    single, batch = (
        task.collate([read[key].sample for key in keys]),
        task.collate([item.sample for item in read.__getitems__(keys)]),
    )
    assert all(torch.equal(a, b) for a, b in zip(single, batch, strict=True))


def test_batches_broken_samples():
    read = batches(settings=["broken=[3,4]"], steps=range(3))
    assert all(batch.size == 8 for batch in read)
    assert {m for batch in read for m in batch.broken} == {"train/3: cannot be read", "train/4: cannot be read"}
    task = make("broken=[3,4]")
    held_out = list(eval_batches(task.eval_data()["val"], task.collate, batch_size=2, workers=0, world=World()))
    indices = [int(index) for batch in held_out if batch.data is not None for index in batch.data[2]]
    assert indices == [index for index in range(24) if index not in (3, 4)]


def test_broken_samples_limit():
    said = []
    broken = BrokenSamples(2, said.append)
    broken.note(["a", "b", "a"])
    assert said == ["skipped: a", "skipped: b"]
    with pytest.raises(TooManyBrokenError, match=r"3 broken samples, more than max_broken = 2; the last: c"):
        broken.note(["c"])


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_eval_batches_cover_all_samples(size):
    task = make()
    indices = [
        int(index)
        for rank in range(size)
        for batch in eval_batches(
            task.eval_data()["val"], task.collate, batch_size=4, workers=0, world=World(rank, size)
        )
        for index in batch.data[2]
    ]
    assert sorted(indices) == list(range(24))


def test_epoch_order_weights():
    order = epoch_order(3000, seed=0, epoch=0, weights=[1.0] * 1000 + [3.0] * 2000)
    assert len(order) == 3000
    # Binomial with p = 6/7 over 3000 draws: a standard deviation of 19.2, five of them either way.
    assert abs(sum(index >= 1000 for index in order) - 3000 * 6 / 7) < 5 * 19.2
    assert epoch_order(3000, seed=0, epoch=1, weights=[1.0] * 1000 + [3.0] * 2000) != order


def test_train_batches_weights_and_resume():
    weights = [1.0] * 12 + [0.0] * 12
    whole = samples(batches(weights=weights))
    assert {sample[0] for sample in whole.values()} <= set(range(12))
    assert_same(samples(batches(weights=weights, steps=range(5)) + batches(weights=weights, steps=range(5, 12))), whole)
