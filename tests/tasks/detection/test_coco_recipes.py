"""The COCO recipes are the paper's."""

from pathlib import Path

import pytest

from ppma.tasks.registry import load_config

CONFIGS = Path(__file__).parents[3] / "configs"
DROP_PATH = {"tiny": 0.1, "small": 0.15, "base": 0.4}
EPOCHS = {"1x": (12, (8, 11)), "3x": (36, (27, 33))}


@pytest.mark.parametrize("schedule", EPOCHS)
@pytest.mark.parametrize("size", DROP_PATH)
def test_the_recipes_are_the_papers(size, schedule):
    config = load_config(CONFIGS / f"coco_maskrcnn_ppma_{size}_{schedule}.yaml")
    assert (config.task, config.model) == ("detection", f"ppma_{size}")
    assert config.model_args == {"drop_path_rate": DROP_PATH[size]}
    assert (config.epochs, config.schedule.milestones) == EPOCHS[schedule]
    assert (config.schedule.name, config.schedule.gamma, config.schedule.warmup_steps) == ("multistep", 0.1, 500)
    assert (config.batch_size, config.scaled_lr) == (16, 1e-4)
    assert (config.optimizer.name, config.optimizer.weight_decay) == ("adamw", 0.05)
    augment = config.augment
    assert (augment.long_side, augment.hflip) == (1333, 0.5)
    if schedule == "1x":
        assert augment.short_sides == (800,)
        assert augment.crop_short_sides == ()
    else:
        assert augment.short_sides == tuple(range(480, 801, 32))
        assert (augment.crop_short_sides, augment.crop_sides) == ((400, 500, 600), (384, 600))
    detector = config.detector
    assert (detector.channels, detector.short_side, detector.long_side) == (256, 800, 1333)
    assert detector.anchor_sizes == (32, 64, 128, 256, 512)
