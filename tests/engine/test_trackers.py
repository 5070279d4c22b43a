"""Trackers beside metrics.csv: opened by name, dropped when they fail, named when they are not installed."""

import sys
import types

import pytest
from stand_in import run

from ppma.config import ConfigError
from ppma.engine.logging import read_rows
from ppma.engine.trackers import Trackers, check_installed


class Recorder:
    """The interface that wandb and trackio share."""

    def __init__(self, name):
        self.module = types.ModuleType(name)
        self.module.__spec__ = types.SimpleNamespace(name=name)
        self.module.init = self.init
        self.rows, self.options, self.finished = [], [], 0

    def init(self, **options):
        self.options.append(options)
        return self

    def log(self, values, step):
        self.rows.append((step, values))

    def finish(self):
        self.finished += 1


@pytest.mark.parametrize("name", ["trackio", "wandb"])
def test_trackers_receive_every_row(tmp_path, monkeypatch, name):
    recorder = Recorder(name)
    monkeypatch.setitem(sys.modules, name, recorder.module)
    out = tmp_path / "first"
    run(out, f"log=[csv, {name}]", "epochs=2")
    rows = read_rows(out / "metrics.csv")
    assert [step for step, _ in recorder.rows] == [row["step"] for row in rows]
    assert recorder.rows[-1][1]["val_accuracy"] == rows[-1]["val_accuracy"]
    (options,) = recorder.options
    assert (options["project"], options["name"], options["resume"]) == ("ppma", "first", "never")
    assert options["config"]["lr"] == 0.01
    assert ("dir" in options) == (name == "wandb")
    assert recorder.finished == 1
    (out / "wandb").mkdir()
    (out / "wandb" / "latest-run").symlink_to("offline-run-20260101_000000-ab12cd34")
    with pytest.warns(UserWarning, match="epochs"):
        run(out, f"log=[csv, {name}]", "epochs=4", resume="auto")
    assert recorder.options[1]["resume"] == "allow"
    assert recorder.options[1].get("id") == ("ab12cd34" if name == "wandb" else None)


def test_trackers_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    run(tmp_path, "log=[csv, tensorboard]", "epochs=1")
    assert list((tmp_path / "tensorboard").glob("events*"))


def test_trackers_not_installed(tmp_path):
    with pytest.raises(ConfigError, match="log: nosuch is not installed: pip install nosuch, or leave it out of log"):
        check_installed(["csv", "nosuch"])


def test_trackers_unknown_name(tmp_path):
    with pytest.raises(ConfigError, match=r"log\[1\]: expected one of 'csv', .*did you mean 'tensorboard'"):
        run(tmp_path, "log=[csv, tensorbord]")


def test_trackers_failure_does_not_end_the_run(tmp_path, monkeypatch):
    recorder = Recorder("wandb")
    monkeypatch.setitem(sys.modules, "wandb", recorder.module)

    def fail(values, step):
        raise OSError(28, "No space left on device")

    recorder.log = fail
    with pytest.warns(UserWarning, match="log: wandb gets no more rows: .*No space left"):
        run(tmp_path, "log=[csv, wandb]", "epochs=1")
    assert len(read_rows(tmp_path / "metrics.csv")) == 2


def test_trackers_not_started(tmp_path, monkeypatch):
    recorder = Recorder("trackio")
    recorder.module.init = lambda **_: 1 / 0
    monkeypatch.setitem(sys.modules, "trackio", recorder.module)
    with pytest.raises(ConfigError, match="log: trackio does not start: division by zero"):
        Trackers(["trackio"], tmp_path, 0, {})
