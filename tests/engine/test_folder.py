"""The run's folder: locking, overwriting, and checkpoints of other runs."""

import os
import time

import pytest
from processes import Program, program
from stand_in import run

from ppma.engine import checkpoint, folder
from ppma.engine.distributed import World
from ppma.engine.logging import read_rows


def test_lock_second_process(tmp_path):
    first = Program(str(tmp_path), "none", "--slow")
    try:
        while first.process.is_alive() and "step" not in first.output.read_text():
            time.sleep(0.02)
        with pytest.raises(ValueError, match="is in use by another run") as refused:
            run(tmp_path)
        assert str(tmp_path) in str(refused.value)
        assert f"(process {first.process.pid} on " in str(refused.value)
    finally:
        first.process.kill()
        first.process.join()
    run(tmp_path, "epochs=1", resume="auto")  # the lock went with the process


def test_lock_orphaned_loader_processes(tmp_path):
    assert program(tmp_path, "none", "workers=2", "--kill-at-step", "5").exit_code == -9
    assert program(tmp_path, "auto", "workers=2").exit_code == 0


def test_lock_same_process(tmp_path):
    with folder.reserve(tmp_path, World()):
        with (
            pytest.raises(ValueError, match="in use by another run of this process"),
            folder.reserve(tmp_path, World()),
        ):
            pass
        with pytest.raises(ValueError, match="in use by another run of this process"):
            run(tmp_path)
    run(tmp_path, "epochs=1")


@pytest.mark.parametrize("place", ["file", "file/inside", "loop"])
def test_reserve_unwritable_folder(tmp_path, place):
    (tmp_path / "file").write_text("not a folder")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(ValueError, match=r"out: expected a folder that can be written to, got .*\(.*\)$"):
        run(tmp_path / place)


def test_reserve_read_only_folder(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)  # chmod would not stop root
    with pytest.raises(ValueError, match=r"expected a folder that can be written to, got .* \(Permission denied\)"):
        run(tmp_path)


@pytest.mark.parametrize("resume", ["none", "auto"])
@pytest.mark.parametrize("name", ["best.safetensors", "last.safetensors", "summary.json"])
def test_resume_results_without_checkpoints(tmp_path, name, resume):
    (tmp_path / name).write_bytes(b"somebody's work")
    with pytest.raises(ValueError, match=rf"holds {name}, but no checkpoint to continue from; choose .*--overwrite"):
        run(tmp_path, resume=resume)
    assert (tmp_path / name).read_bytes() == b"somebody's work"
    assert {path.name for path in tmp_path.iterdir()} == {name, ".lock"}


def test_resume_all_checkpoints_damaged(tmp_path):
    path = checkpoint.path_of(tmp_path, 3)
    path.parent.mkdir()
    path.write_bytes(b"damaged")
    with pytest.warns(UserWarning, match="skipping"), pytest.raises(ValueError, match="no checkpoint to continue from"):
        run(tmp_path, resume="auto")
    assert path.read_bytes() == b"damaged"


def test_resume_killed_before_first_checkpoint(tmp_path):
    assert program(tmp_path, "none", "checkpoint_steps=null", "log_steps=1", "--kill-at-step", "3").exit_code == -9
    assert read_rows(tmp_path / "metrics.csv")
    run(tmp_path, "epochs=1")


def test_overwrite_keeps_other_files(tmp_path):
    run(tmp_path, "epochs=2")
    (tmp_path / "notes.txt").write_text("mine")
    trainer = run(tmp_path, "epochs=1", "eval_epochs=1", overwrite=True)
    assert (trainer.steps, checkpoint.steps(tmp_path)) == (6, [2, 4, 6])
    assert [row["step"] for row in read_rows(tmp_path / "metrics.csv")] == [3, 6]
    assert (tmp_path / "notes.txt").read_text() == "mine"
    with pytest.raises(ValueError, match="overwrite: expected no --resume with it"):
        run(tmp_path, overwrite=True, resume="auto")


def test_resume_checkpoint_of_another_folder(tmp_path):
    run(tmp_path / "a", "epochs=2", "eval_epochs=1")
    run(tmp_path / "b", "epochs=2", "eval_epochs=1")
    newest = str(checkpoint.path_of(tmp_path / "a", 10))
    with pytest.raises(
        ValueError, match=r"b holds last.safetensors of another run than .*a/checkpoints/step-00000010.pt"
    ):
        run(tmp_path / "b", "epochs=2", "eval_epochs=1", resume=newest)
    with pytest.warns(UserWarning, match="best.safetensors of step 6 is lost: the best is selected again"):
        run(tmp_path / "c", "epochs=2", "eval_epochs=1", resume=newest)
    assert (tmp_path / "c" / "best.safetensors").is_file()


def test_resume_earlier_checkpoint_deletes_later(tmp_path):
    run(tmp_path, "keep=20")
    with pytest.warns(UserWarning, match="lr: 0.01 -> 0.02"):
        run(tmp_path, "keep=20", "lr=0.02", "epochs=2", resume=str(checkpoint.path_of(tmp_path, 6)))
    assert checkpoint.steps(tmp_path) == [2, 4, 6, 8, 10, 12]
