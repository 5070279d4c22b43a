"""The ADE20K recipes are the paper's."""

from pathlib import Path

import pytest

from ppma.tasks.registry import load_config

CONFIGS = Path(__file__).parents[3] / "configs"
DROP_PATH = {"tiny": 0.1, "small": 0.15, "base": 0.4}


@pytest.mark.parametrize("size", DROP_PATH)
def test_the_recipes_are_the_papers(size):
    config = load_config(CONFIGS / f"ade20k_upernet_ppma_{size}.yaml")
    assert (config.task, config.model) == ("segmentation", f"ppma_{size}")
    assert config.model_args == {"drop_path_rate": DROP_PATH[size]}
    assert (config.steps, config.batch_size, config.scaled_lr) == (160_000, 16, 6e-5)
    assert (config.optimizer.name, config.optimizer.weight_decay) == ("adamw", 0.05)
    schedule = config.schedule
    assert (schedule.name, schedule.power, schedule.warmup_steps, schedule.min_lr) == ("poly", 1, 1500, 0)
    assert (config.data.short_side, config.data.long_side) == (512, 2048)
    augment = config.augment
    assert (augment.ratio, augment.crop, augment.class_share) == ((0.5, 2.0), 512, 0.75)
    assert (augment.hflip, augment.photometric) == (0.5, True)
    decoder = config.decoder
    assert (decoder.channels, decoder.pool_scales) == (512, (1, 2, 3, 6))
    assert (decoder.auxiliary_channels, decoder.auxiliary_weight, decoder.dropout) == (256, 0.4, 0.1)
    assert (config.test.mode, config.test.window, config.test.stride) == ("slide", 512, 341)
    multi_scale = load_config(
        CONFIGS / f"ade20k_upernet_ppma_{size}.yaml", ["test.scales=[0.5,0.75,1.0,1.25,1.5,1.75]", "test.flip=true"]
    )
    assert multi_scale.test.flip
    assert multi_scale.test.scales == tuple(0.5 + 0.25 * step for step in range(6))
