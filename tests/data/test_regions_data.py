import numpy as np
import pytest
import torch

from ppma.config import ConfigError
from ppma.data.label_maps import IGNORED
from ppma.data.regions import Regions, RegionsDataConfig, draw_regions


def components(free):
    """The 4-connected components of the True pixels, numbered from 1; 0 elsewhere."""
    found, count = np.zeros(free.shape, int), 0
    for start in np.argwhere(free):
        if found[tuple(start)]:
            continue
        count += 1
        stack = [tuple(start)]
        while stack:
            i, j = stack.pop()
            if 0 <= i < len(free) and 0 <= j < free.shape[1] and free[i, j] and not found[i, j]:
                found[i, j] = count
                stack += [(i + 1, j), (i - 1, j), (i, j + 1), (i, j - 1)]
    return found


@pytest.mark.parametrize("split", ["train", "larger", "scaled"])
def test_regions_labels_follow_walls(split):
    """Pixels that no wall separates have one colour, and that of every dot among them."""
    data = Regions(RegionsDataConfig(seed=3), split)
    for index in range(5):
        image, labels = data[index]
        assert image.shape == (5, data.size, data.size)
        walls = image[0] == 1
        assert (labels[walls] == IGNORED).all()
        assert set(image.unique().tolist()) == {0.0, 1.0}
        dots = image[1:].max(0)
        assert torch.equal(labels[dots.values == 1], dots.indices[dots.values == 1])
        connected = torch.from_numpy(components(~walls.numpy()))
        assert all(len(labels[connected == one].unique()) == 1 for one in range(1, connected.max() + 1))
        labelled = labels[labels != IGNORED]
        assert len(labelled) > 0.4 * labels.numel()
        assert labelled.max() < 4


@pytest.mark.parametrize(
    ("split", "side", "curves", "length"), [("train", 20, 6, 30), ("larger", 40, 24, 30), ("scaled", 40, 12, 60)]
)
def test_curves_apart(split, side, curves, length):
    """Each curve is a chain of pixels with two ends, of one colour, and touches no other, not even at a corner."""
    data = Regions(RegionsDataConfig(shape="curves", seed=3), split)
    lengths = []
    for index in range(5):
        image, labels = data[index]
        assert image.shape == (5, side, side)
        ink = image[0].numpy() == 0
        found = components(ink)
        assert 2 <= found.max() <= curves
        for one in range(1, found.max() + 1):
            curve = found == one
            lengths.append(curve.sum())
            around = np.zeros((side + 2, side + 2), bool)
            for i in range(3):
                for j in range(3):
                    around[i : i + side, j : j + side] |= curve
            assert not (around[1:-1, 1:-1] & ink & ~curve).any()
            padded = np.pad(curve, 1)
            neighbours = sum(np.roll(padded, shift, axis) for shift in (1, -1) for axis in (0, 1))[1:-1, 1:-1]
            assert sorted(neighbours[curve].tolist()) == sorted([1, 1, *[2] * (curve.sum() - 2)]) or curve.sum() == 1
            dots = (image[1:].sum(0).numpy() == 1) & curve
            assert dots.sum() == (curve.sum() >= 4)
            assert len(labels[torch.from_numpy(curve)].unique()) == 1
    assert length // 2 < np.mean(lengths) <= max(lengths) <= length


def test_curves_turns():
    """A curve that never turns of itself is straight until it meets something."""
    straight, winding = (
        Regions(RegionsDataConfig(shape="curves", size=40, regions=2, turns=turns), "val") for turns in (0.0, 0.5)
    )

    def corners(data):
        count = 0
        for index in range(10):
            ink = np.pad(data[index][0][0].numpy() == 0, 1)
            vertical, horizontal = (np.roll(ink, 1, axis) | np.roll(ink, -1, axis) for axis in (0, 1))
            count += (ink & vertical & horizontal).sum()
        return count

    assert 3 * corners(straight) < corners(winding)


def test_regions_deterministic():
    """A function of configuration, split and index; other splits, seeds and indices have other images."""
    config = RegionsDataConfig(size=12, cells=10, regions=3)
    first, again = Regions(config, "train"), Regions(config, "train")
    assert all(torch.equal(a, b) for a, b in zip(first[7], again[7], strict=True))
    others = [
        first[8],
        Regions(config, "val")[7],
        Regions(RegionsDataConfig(size=12, cells=10, regions=3, seed=1), "train")[7],
    ]
    assert not any(torch.equal(first[7][0], image) for image, _ in others)
    assert (len(first), len(Regions(config, "val")), len(Regions(config, "scaled"))) == (100_000, 96, 24)
    with pytest.raises(IndexError):
        first[100_000]


def test_regions_difficulty():
    """Gaps remove wall pixels and change no label; noise is added to every channel."""
    plain = Regions(RegionsDataConfig(), "val")
    gaps, noisy = Regions(RegionsDataConfig(gaps=0.3), "val"), Regions(RegionsDataConfig(noise=0.2), "val")
    kept = total = 0
    for index in range(20):
        image, labels = plain[index]
        thinned, same = gaps[index]
        assert torch.equal(labels, same)
        assert (thinned[0] <= image[0]).all()
        assert torch.equal(thinned[1:], image[1:])
        kept, total = kept + thinned[0].sum(), total + image[0].sum()
        difference = noisy[index][0] - image
        assert 0.15 < difference.std() < 0.25
    assert 0.6 < kept / total < 0.8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"regions": 40}, "regions: expected at most the 30 cells, got 40"),
        ({"size": 3}, "size: expected a number from 4 to 256, got 3"),
        ({"gaps": 1.5}, "gaps: expected a share from 0 to 1, got 1.5"),
        ({"turns": -0.1}, "turns: expected a share from 0 to 1, got -0.1"),
        ({"noise": -1.0}, "noise: expected a number from 0 to 100, got -1.0"),
    ],
)
def test_regions_invalid(changes, message):
    with pytest.raises(ConfigError, match=message):
        RegionsDataConfig(**changes)


def test_draw_regions():
    image, labels = Regions(RegionsDataConfig(), "train")[0]
    drawn = draw_regions(image, labels)
    assert (drawn.shape, drawn.dtype) == ((20, 20, 3), torch.uint8)
    assert (drawn[image[0] == 1] == 0).all()
    inside = (labels == labels[labels != IGNORED][0]) & (image[1:].sum(0) == 0)
    assert len(drawn[inside].unique(dim=0)) == 1
