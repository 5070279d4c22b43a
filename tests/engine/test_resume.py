"""A killed and resumed run ends bit-identical to an uninterrupted one."""

import zipfile
from pathlib import Path

import pytest
import torch
from processes import program

from ppma.engine import checkpoint
from ppma.engine.logging import read_rows

STEPS = 24  # of the stand-in's defaults: 6 steps in each of 4 epochs, a checkpoint at every second
LAST = checkpoint.path_of(Path(), STEPS)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("uninterrupted")
    finished = program(out, "none")
    assert finished.exit_code == 0, finished.output
    return out


def assert_same(ours, theirs, where="state"):
    assert type(ours) is type(theirs), where
    if isinstance(ours, torch.Tensor):
        assert torch.equal(ours, theirs), where
    elif isinstance(ours, dict):
        assert ours.keys() == theirs.keys(), where
        for key in ours:
            assert_same(ours[key], theirs[key], f"{where}.{key}")
    elif isinstance(ours, list | tuple):
        assert len(ours) == len(theirs), where
        for number, pair in enumerate(zip(ours, theirs, strict=True)):
            assert_same(*pair, f"{where}[{number}]")
    else:
        assert ours == theirs, where


def assert_same_end(run: Path, uninterrupted: Path) -> None:
    """The last checkpoints agree in weights, EMA, optimizer, generators and best; files and rows agree too."""
    ours, theirs = (checkpoint.load(folder / LAST) for folder in (run, uninterrupted))
    for state in (ours, theirs):
        del state["log"]["seconds"]
    assert_same(ours, theirs)
    for name in ("last.safetensors", "best.safetensors"):
        assert (run / name).read_bytes() == (uninterrupted / name).read_bytes()
    timed = ("seconds", "samples_per_second", "val_per_second")
    rows, expected = (
        [{key: value for key, value in row.items() if key not in timed} for row in read_rows(folder / "metrics.csv")]
        for folder in (run, uninterrupted)
    )
    assert rows == expected


# In the first epoch before any checkpoint, in the middle of epochs, right at and after an evaluation, in the last step.
@pytest.mark.parametrize("step", [1, 7, 12, 13, 23])
def test_resume_killed_at_step(tmp_path, uninterrupted, step):
    killed = program(tmp_path, "none", "--kill-at-step", str(step))
    assert killed.exit_code == -9
    assert not (tmp_path / LAST).exists()
    resumed = program(tmp_path, "auto")
    assert resumed.exit_code == 0, resumed.output
    assert_same_end(tmp_path, uninterrupted)


def test_resume_killed_repeatedly(tmp_path, uninterrupted):
    for steps_of_this_life in (3, 6, 4, 5):
        assert program(tmp_path, "auto", "--kill-at-step", str(steps_of_this_life)).exit_code == -9
    assert program(tmp_path, "auto").exit_code == 0
    assert_same_end(tmp_path, uninterrupted)


def test_resume_killed_while_saving(tmp_path, uninterrupted):
    # Files are synced in order: metrics.csv when the log opens, then each checkpoint and the folder around it.
    assert program(tmp_path, "none", "--kill-in-save", "7").exit_code == -9
    assert list(tmp_path.rglob("*.partial"))
    assert program(tmp_path, "auto").exit_code == 0
    assert not list(tmp_path.rglob("*.partial"))
    assert_same_end(tmp_path, uninterrupted)


def test_resume_with_loader_processes(tmp_path, uninterrupted):
    workers = "workers=2"
    assert program(tmp_path, "none", workers, "--kill-at-step", "9").exit_code == -9
    assert program(tmp_path, "auto", workers).exit_code == 0
    ours, theirs = (checkpoint.load(folder / LAST) for folder in (tmp_path, uninterrupted))
    for part in ("model", "ema", "optimizer"):
        assert_same(ours[part], theirs[part], part)


@pytest.mark.parametrize("damage", ["truncated", "a flipped byte", "empty"])
def test_resume_damaged_checkpoint(tmp_path, uninterrupted, damage):
    assert program(tmp_path, "none", "--kill-at-step", "9").exit_code == -9
    newest = checkpoint.path_of(tmp_path, checkpoint.steps(tmp_path)[-1])
    content = bytearray(newest.read_bytes())
    if damage == "a flipped byte":
        with zipfile.ZipFile(newest) as archive:
            weights = max(archive.infolist(), key=lambda part: part.file_size)
        content[weights.header_offset + 200] ^= 1
    newest.write_bytes({"truncated": content[: len(content) // 2], "empty": b""}.get(damage, bytes(content)))
    resumed = program(tmp_path, "auto")
    assert resumed.exit_code == 0, resumed.output
    assert "skipping" in resumed.output
    assert newest.name in resumed.output
    assert_same_end(tmp_path, uninterrupted)
