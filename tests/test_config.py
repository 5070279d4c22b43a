"""Messages about invalid configurations name the key and the nearest valid one."""

import itertools
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
        ("lr=nan", r"lr: expected a finite number, got 'nan'"),
        ("lr=null", r"lr: expected a number, got None"),
        ("lr=[1]", r"lr: expected a number, got \[1\]"),
        ("epochs=.inf", r"epochs: expected a finite number, got inf"),
        ("epochs=1e400", r"epochs: expected a finite number, got '1e400'"),
        ("epochs=1e30", r"epochs: expected at most 1,000,000, got 1e\+30"),
        ("epochs=-1", r"epochs: expected a number > 0, got -1.0"),
        (f"epochs=1{'0' * 400}", r"epochs: expected a finite number, got 1000\d*\.\.\.0+$"),
        (f"epochs=1{'0' * 5000}", r"--set epochs: not valid YAML: Exceeds the limit"),
        ("workers=100000", r"workers: expected at most 1,000, got 100000"),
        ("optimizer.name=adamww", r"optimizer.name: expected .*did you mean 'adamw'\?\), got 'adamww'"),
        ("optimizer.betas=[0.9, 1]", r"optimizer.betas: expected two numbers in \[0, 1\), got \(0.9, 1.0\)"),
        ("ema={decay: 0.9, reference_batch: 0}", r"ema.reference_batch: expected at least 1, got 0"),
        ("schedule.min_lr=-1", r"schedule.min_lr: expected a number >= 0, got -1.0"),
        ("1=2", r"run.yaml: '1': unknown key"),
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
def test_build_mistakes(assignment, message):
    with pytest.raises(configs.ConfigError, match=message):
        configs.build(RunConfig, configs.override(VALID, [assignment]), source="run.yaml")


def test_override_sections():
    changed = configs.override(VALID, ["lr=1e-3", "schedule.name=cosine", "ema.decay=0.9", "epochs=null", "steps=7"])
    run = configs.build(RunConfig, changed)
    assert (run.lr, run.schedule.name, run.ema.decay, run.steps) == (1e-3, "cosine", 0.9, 7)
    assert VALID["schedule"] == {"name": "poly"}


def test_override_aliased_section():
    section = {"name": "poly"}
    changed = configs.override({"a": section, "b": section}, ["a.name=cosine"])
    assert changed == {"a": {"name": "cosine"}, "b": {"name": "poly"}}


@pytest.mark.parametrize("assignment", ["lr", "=3", "lr=[1"])
def test_override_malformed(assignment):
    with pytest.raises(configs.ConfigError, match="--set"):
        configs.override(VALID, [assignment])


def test_write_round_trip(tmp_path):
    run = configs.build(RunConfig, configs.override(VALID, ["lr=1e-5", "schedule.milestones=[1,2]", "ema.decay=0.9"]))
    configs.write(run, tmp_path / "config.yaml")
    assert configs.build(RunConfig, configs.read(tmp_path / "config.yaml")) == run


LETTERS = "abcdefghijklmnopqrs"
LAUGHS = "a: &a [x, x]\n" + "".join(f"{b}: &{b} [*{a}, *{a}]\n" for a, b in itertools.pairwise(LETTERS))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"- 1", r"expected a mapping of keys to values, got \[1\]"),
        (b"word", r"expected a mapping of keys to values, got 'word'"),
        (b"", r"expected a mapping of keys to values, got an empty file"),
        (b"# nothing\n", r"got an empty file"),
        (b"a: [", r"not valid YAML: .*\(line 1, column 5\)"),
        (b"lr: 1\nlr: 2\n", r"not valid YAML: duplicate key 'lr' \(line 2, column 1\)"),
        (b"data: {root: a, root: b}", r"duplicate key 'root'"),
        (b"\x89PNG\r\n", r"expected text in UTF-8, got b'\\x89'"),
        (b"a: \x00", r"not valid YAML: special characters are not allowed"),
        (b"a: !!python/object/apply:os.system [ls]", r"could not determine a constructor"),
        (b"a: 2020-13-45", r"not valid YAML: month must be in 1..12"),
        (b"a: &a [*a]", r"expected plain values, got a section that contains itself"),
        (b"a: " + b"[" * 30 + b"]" * 30, r"at most 20 nested sections"),
        (b"[" * 100_000, r"at most 20 nested sections"),
        (LAUGHS.encode(), r"at most 20000 values|at most 20 nested sections"),
        (b"#" * (1 << 17) + b"\n", r"expected a YAML file of at most 131,072 bytes, got 131,073"),
    ],
    ids=lambda value: None if isinstance(value, str) else value[:20],
)
def test_read_malformed(tmp_path, content, message):
    path = tmp_path / "run.yaml"
    path.write_bytes(content)
    with pytest.raises(configs.ConfigError, match=message) as caught:
        configs.read(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_read_missing(tmp_path):
    with pytest.raises(configs.ConfigError, match="found none at"):
        configs.read(tmp_path / "none.yaml")
    with pytest.raises(configs.ConfigError, match="found a folder at"):
        configs.read(tmp_path)


def test_read_merge_keys(tmp_path):
    (tmp_path / "run.yaml").write_text("base: &b {x: 1, y: 2}\nmine: &m {<<: *b, x: 3}\nother: {<<: *m, y: 4}\n")
    assert configs.read(tmp_path / "run.yaml")["other"] == {"x": 3, "y": 4}


def test_differences_keys():
    assert configs.differences({"a": 1, "s": {"b": 2}}, {"a": 1, "s": {"b": 3}, "c": None}) == ["s.b: 2 -> 3"]


def test_scaled_lr_and_decay():
    @dataclass(frozen=True, kw_only=True)
    class Other(RunConfig):
        more: int = 0

    run = configs.build(Other, {**VALID, "batch_size": 512, "lr_batch_size": 1024, "more": 1})
    assert run.scaled_lr == pytest.approx(0.05)
    run = configs.build(RunConfig, {**VALID, "batch_size": 1024, "ema": {"decay": 0.99996, "reference_batch": 512}})
    assert run.ema.for_batch(run.batch_size) == pytest.approx(0.99996**2)
