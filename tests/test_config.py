"""Configurations name the key that is wrong, and the nearest right one."""

from dataclasses import dataclass

import pytest

from ppma import config as configs
from ppma.engine.config import RunConfig

VALID = {"task": "t", "model": "m", "epochs": 2, "batch_size": 4, "lr": 0.1, "schedule": {"name": "poly"}}


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("lrr=1", r"run\.yaml: lrr: unknown key; did you mean lr\?"),
        ("batchsize=1", r"batchsize: unknown key; did you mean batch_size\?"),
        ("zzz=1", r"zzz: unknown key; valid keys: task, model,"),
        ("schedule.warmup=1", r"schedule.warmup: unknown key; did you mean schedule.warmup_\w+\?"),
        ("schedule.name=cosin", r"schedule.name: expected one of 'cosine'.*did you mean 'cosine'\?\), got 'cosin'"),
        ("schedule=3", r"schedule: expected a mapping of keys to values, got 3"),
        ("lr=fast", r"lr: expected a number, got 'fast'"),
        ("lr=true", r"lr: expected a number, got True"),
        ("lr=-1", r"lr: expected a number > 0, got -1.0"),
        ("lr=nan", r"lr: expected a number > 0, got nan"),
        ("batch_size=1.5", r"batch_size: expected a whole number, got 1.5"),
        ("model=3", r"model: expected text, got 3"),
        ("deterministic=1", r"deterministic: expected true or false, got 1"),
        ("optimizer.betas=[0.9]", r"optimizer.betas: expected a list of 2 entries"),
        ("optimizer.betas=[0.9, x]", r"optimizer.betas\[1\]: expected a number, got 'x'"),
        ("schedule.milestones=[2, 1]", r"schedule.milestones: expected ascending epochs"),
        ("ema.reference_batch=1", r"ema.decay: missing key"),
        ("steps=3", r"epochs, steps: expected exactly one of the two, the other null, got \(2.0, 3\)"),
    ],
)
def test_mistakes(assignment, message):
    with pytest.raises(configs.ConfigError, match=message):
        configs.build(RunConfig, configs.override(VALID, [assignment]), source="run.yaml")


def test_override_reads_yaml_and_reaches_into_sections():
    changed = configs.override(VALID, ["lr=1e-3", "schedule.name=cosine", "ema.decay=0.9", "epochs=null", "steps=7"])
    run = configs.build(RunConfig, changed)
    assert (run.lr, run.schedule.name, run.ema.decay, run.steps) == (1e-3, "cosine", 0.9, 7)
    assert VALID["schedule"] == {"name": "poly"}


@pytest.mark.parametrize("assignment", ["lr", "=3", "lr=[1"])
def test_override_needs_key_and_value(assignment):
    with pytest.raises(configs.ConfigError, match="--set"):
        configs.override(VALID, [assignment])


def test_written_configurations_read_back(tmp_path):
    run = configs.build(RunConfig, configs.override(VALID, ["lr=1e-5", "schedule.milestones=[1,2]", "ema.decay=0.9"]))
    configs.write(run, tmp_path / "config.yaml")
    assert configs.build(RunConfig, configs.read(tmp_path / "config.yaml")) == run


def test_files_that_are_no_configuration(tmp_path):
    with pytest.raises(configs.ConfigError, match="found none at"):
        configs.read(tmp_path / "none.yaml")
    (tmp_path / "list.yaml").write_text("- 1")
    with pytest.raises(configs.ConfigError, match="expected a mapping"):
        configs.read(tmp_path / "list.yaml")
    (tmp_path / "broken.yaml").write_text("a: [")
    with pytest.raises(configs.ConfigError, match="not valid YAML"):
        configs.read(tmp_path / "broken.yaml")


def test_differences_are_told_by_key():
    assert configs.differences({"a": 1, "s": {"b": 2}}, {"a": 1, "s": {"b": 3}, "c": None}) == ["s.b: 2 -> 3"]


def test_linear_scaling():
    @dataclass(frozen=True, kw_only=True)
    class Other(RunConfig):
        more: int = 0

    run = configs.build(Other, {**VALID, "batch_size": 512, "lr_batch_size": 1024, "more": 1})
    assert run.scaled_lr == pytest.approx(0.05)
    run = configs.build(RunConfig, {**VALID, "batch_size": 1024, "ema": {"decay": 0.99996, "reference_batch": 512}})
    assert run.ema.for_batch(run.batch_size) == pytest.approx(0.99996**2)
