"""The runs under docs/runs have the configuration of the command that the documentation gives for them."""

import re
from pathlib import Path

import pytest

from ppma import config as configs
from ppma.tasks.registry import load_config

RUNS = Path(__file__).parents[2] / "docs/runs"
PETS_MASKS = (
    "data.test_split=null", "data.short_side=64", "augment.crop=64", "epochs=2", "eval_epochs=2",
    "schedule.warmup_steps=40", "ema.decay=0.98",
)  # fmt: skip
PETS_LONG = ("data.test_split=null", "data.short_side=64", "augment.crop=64", "epochs=6", "eval_epochs=6")
# The first run was stopped after 12 of its 22 epochs; the recipe ends there. The last started from the weights of the
# one before it under the name under which they were shipped then.
SINGLE = {
    "cifar10_nano": ("cifar10_nano", ("epochs=22", "schedule.epochs=null", "data.test_split=null")),
    "cifar10_nano_32": ("cifar10_nano_32", ()),
    "cifar10_nano_restart": ("cifar10_nano_32", ("init=runs/cifar10_nano_32/best.safetensors", "epochs=10")),
    "cifar10_nano_restart_2": ("cifar10_nano_32", ("init=ppma_nano.cifar10", "epochs=12", "seed=1")),
    "pets_upernet_nano": ("pets_upernet_nano", ()),
}
STUDIES = {
    "digits_starts": ("digits_ablation", ()),
    "digits_starts-release": ("digits_ablation", ("model_args.formulation=release",)),
    "pathfinder": ("pathfinder", ()),
    "pathfinder-release": ("pathfinder", ("model_args.formulation=release",)),
    "cifar10_masks": ("cifar10_ablation", ()),
    "cifar10_starts": ("cifar10_ablation", ()),
    "cifar10_starts-release": ("cifar10_ablation", ("model_args.formulation=release",)),
    "pets_masks": ("pets_upernet_nano", PETS_MASKS),
    "pets_masks-long": ("pets_upernet_nano", PETS_LONG),
    "regions/regions": ("regions", ()),
    "regions/regions-kinds": ("regions", ()),
    "regions/regions-release": ("regions", ("model_args.formulation=release",)),
    "regions/starts": ("regions", ()),
    "regions/starts-release": ("regions", ("model_args.formulation=release",)),
    "regions/starts-warmup": ("regions", ("schedule.warmup_steps=120",)),
}
KEYS = {
    "decay_start": "model_args.decay_start",
    "formulation": "model_args.formulation",
    "decay_lr_scale": "optimizer.decay_lr_scale",
}


def assert_configured(run, recipe, settings):
    expected = load_config(recipe, settings)
    stored = configs.build(type(expected), configs.read(run / "config.yaml"), source=str(run))
    assert configs.differences(configs.to_dict(stored), configs.to_dict(expected)) == []


@pytest.mark.parametrize("name", SINGLE)
def test_single(name):
    assert_configured(RUNS / name, *SINGLE[name])


@pytest.mark.parametrize("name", STUDIES)
def test_study(name):
    recipe, settings = STUDIES[name]
    runs = sorted((RUNS / name).glob("*/seed*"))
    assert runs
    for run in runs:
        variant, *varied = run.parent.name.split(",")
        mask, _, kind = variant.partition("-")
        model = [f"model_args.mask='{mask}'", *([f"model_args.kinds=[{kind}]"] if kind else [])]
        changes = [f"{KEYS[key]}={value}" for key, value in (one.split("=") for one in varied)]
        seed = [f"seed={run.name.removeprefix('seed')}", "log=[csv]"]
        assert_configured(run, recipe, [*settings, *model, *changes, *seed])


def test_runs_complete():
    """Every folder of runs is compared."""
    listed = {*SINGLE, *STUDIES}
    for path in RUNS.rglob("config.yaml"):
        folder = path.parent.relative_to(RUNS).as_posix()
        assert re.sub(r"/[^/]+/seed\d+$", "", folder) in listed
