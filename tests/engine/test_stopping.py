"""Runs that end before their last step: signals and early stopping."""

import json
import os
import signal
import time

import pytest
import torch
from disk import full_for
from processes import Program, program
from stand_in import StandIn, run

from ppma.config import ConfigError
from ppma.engine import checkpoint
from ppma.engine.errors import StoppedError
from ppma.engine.logging import read_rows


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_saves(tmp_path, number):
    started = Program(str(tmp_path), "none", "workers=1", "--slow")
    while started.process.is_alive() and started.output.read_text().count("step") < 3:
        time.sleep(0.02)
    os.kill(started.process.pid, number)
    ended = started.wait()
    assert ended.exit_code == 1
    assert "StoppedError: stopped at step" in ended.output
    (step,) = checkpoint.steps(tmp_path)[-1:]
    assert f"stopped at step {step} of 24" in ended.output
    assert program(tmp_path, "auto").exit_code == 0


def stop_in_step(monkeypatch, step):
    """SIGTERM arrives in this step."""
    learn, calls = StandIn.loss, []

    def loss(task, model, batch):
        calls.append(1)
        if len(calls) == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return learn(task, model, batch)

    monkeypatch.setattr(StandIn, "loss", loss)


@pytest.mark.filterwarnings("ignore:.*not written")
def test_full_disk_at_a_stop(tmp_path, monkeypatch):
    full_for(monkeypatch, "step-00000004")
    stop_in_step(monkeypatch, 4)
    with pytest.raises(StoppedError, match="not saved: stopped at step 4; --resume auto continues from step 2") as stop:
        run(tmp_path)
    assert stop.value.exit_code == 143


def accuracies(monkeypatch, *values):
    """Evaluations return these values in turn, then repeat the last."""
    left = list(values)
    monkeypatch.setattr("stand_in.Accuracy.compute", lambda *_: {"accuracy": left.pop(0) if len(left) > 1 else left[0]})


def test_early_stopping_patience(tmp_path, monkeypatch, capsys):
    accuracies(monkeypatch, 0.5, 0.6, 0.6, 0.55)
    trainer = run(tmp_path, "epochs=10", "eval_epochs=1", "early_stopping.patience=2")
    assert trainer.step == 24  # 6 steps in each of 4 epochs
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["steps"], summary["best_step"], summary["stopped_early"]) == (24, 12, True)
    assert "stopping early: val_accuracy did not improve in 2 evaluations" in capsys.readouterr().err
    assert (tmp_path / "last.safetensors").is_file()
    run(tmp_path, "epochs=10", "eval_epochs=1", "early_stopping.patience=2", resume="auto")  # ends where it ended
    assert checkpoint.steps(tmp_path)[-1] == 24


def test_early_stopping_min_delta(tmp_path, monkeypatch):
    accuracies(monkeypatch, 0.5, 0.52, 0.56, 0.58)
    trainer = run(tmp_path, "epochs=10", "eval_epochs=1", "early_stopping={patience: 2, min_delta: 0.05}")
    assert trainer.step == 30  # 0.56 improves on 0.5, the two evaluations after it do not
    assert trainer.best_step == 24  # the best weights are still those of the largest value


def test_early_stopping_resume(tmp_path, monkeypatch):
    settings = ("epochs=10", "eval_epochs=1", "early_stopping.patience=3")
    accuracies(monkeypatch, 0.9, 0.5)
    run(tmp_path, *settings[1:], "epochs=3")  # two evaluations without improvement, then its planned end
    accuracies(monkeypatch, 0.5)
    with pytest.warns(UserWarning, match="epochs"):
        trainer = run(tmp_path, *settings, resume="auto")
    assert trainer.step == 24


def test_early_stopping_without_validation(tmp_path, monkeypatch):
    monkeypatch.setattr(StandIn, "eval_data", lambda task: {})
    with pytest.raises(ConfigError, match="early_stopping: expected validation data to monitor"):
        run(tmp_path, "early_stopping.patience=1")


def test_early_stopping_off_trains_to_the_end(tmp_path, monkeypatch):
    accuracies(monkeypatch, 0.5, 0.1)
    assert run(tmp_path, "epochs=4", "eval_epochs=1").step == 24
    assert json.loads((tmp_path / "summary.json").read_text())["stopped_early"] is False


def test_signal_between_reads_of_the_loss(tmp_path, monkeypatch):
    """A stop reads pending losses, so the log of the resumed run is that of an uninterrupted one."""
    settings = ("log_steps=null", "checkpoint_steps=null", "epochs=2")
    run(tmp_path / "whole", *settings, read_steps=100)
    with monkeypatch.context() as patch:
        stop_in_step(patch, 4)
        with pytest.raises(StoppedError, match="stopped at step 4 of 12; saved"):
            run(tmp_path / "stopped", *settings, read_steps=100)
    run(tmp_path / "stopped", *settings, resume="auto", read_steps=100)
    rows = [read_rows(tmp_path / name / "metrics.csv")[0]["train_loss"] for name in ("whole", "stopped")]
    assert rows[0] == rows[1]
    ends = [checkpoint.load(checkpoint.path_of(tmp_path / name, 12))["model"] for name in ("whole", "stopped")]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
