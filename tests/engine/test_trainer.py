"""Files, resuming, failures and reads of the loss of a run."""

import json
import os
import signal
import sys
import time

import pytest
import torch
from safetensors.torch import load_file
from stand_in import StandIn, run

from ppma.config import ConfigError
from ppma.engine import checkpoint
from ppma.engine.errors import (
    LoaderDiedError,
    NonFiniteLossError,
    TooManyBrokenError,
)
from ppma.engine.logging import read_rows


def test_run_writes_files(tmp_path):
    trainer = run(tmp_path)
    written = {path.name for path in tmp_path.iterdir()}
    weights = {"last.safetensors", "best.safetensors"}
    assert written == weights | {"config.yaml", "metrics.csv", "checkpoints", "curves.png", "summary.json", ".lock"}
    summary = json.loads((tmp_path / "summary.json").read_text())
    rows = read_rows(tmp_path / "metrics.csv")
    assert [row["step"] for row in rows] == [3, 6, 9, 12, 15, 18, 21, 24]
    assert summary["val_accuracy"] == max(row["val_accuracy"] for row in rows if "val_accuracy" in row)
    assert summary["test_count"] == summary["val_count"] == 24
    assert summary["parameters"] == sum(p.numel() for p in trainer.learner.model.parameters())
    kept = checkpoint.steps(tmp_path)
    assert kept[-3:] == [20, 22, 24]
    assert set(kept[:-3]) <= {summary["best_step"]}
    state = checkpoint.load(checkpoint.path_of(tmp_path, 24))
    usable = load_file(tmp_path / "last.safetensors")
    assert all(torch.equal(state["ema"][name], tensor) for name, tensor in usable.items())


def test_run_keeps_earlier_run(tmp_path):
    run(tmp_path, "epochs=1")
    before = (tmp_path / "metrics.csv").read_bytes()
    with pytest.raises(ValueError, match="--resume auto continues it"):
        run(tmp_path, "epochs=1")
    assert (tmp_path / "metrics.csv").read_bytes() == before


def test_resume_changed_learning_rate(tmp_path):
    run(tmp_path, "epochs=1")
    with pytest.warns(UserWarning, match=r"epochs: 1.0 -> 2.0; lr: 0.01 -> 0.02"):
        trainer = run(tmp_path, "epochs=2", "lr=0.02", "schedule.name=constant", resume="auto")
    assert trainer.learner.optimizer.param_groups[0]["lr"] == 0.02
    assert trainer.step == 12


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["epochs=1"], r"epochs: expected at least the checkpoint's 12 steps, got 6"),
        (["epochs=null", "steps=3"], r"steps: expected at least the checkpoint's 12 steps, got 3"),
        (["optimizer.name=sgd"], r"optimizer.name: expected the checkpoint's, 'adamw', got 'sgd'"),
        (
            ["model=other"],
            r"resume: expected a checkpoint of other {}, got one of none {}: 3 weights unexpected \(5\.running",
        ),
        (
            ["model=wider"],
            r"got one of none {}: 1 weights of another shape \(7.weight \(2, 16\) instead of \(2, 32",
        ),
    ],
)
def test_resume_of_another_run(tmp_path, monkeypatch, settings, message):
    run(tmp_path, "epochs=2")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.name != ".lock"}
    if settings[0] == "model=other":
        original = StandIn.model
        monkeypatch.setattr(StandIn, "model", lambda task: _without_statistics(original(task)))
    if settings[0] == "model=wider":
        original = StandIn.model
        monkeypatch.setattr(StandIn, "model", lambda task: original(task)[:-1].append(torch.nn.Linear(32, 2).double()))
    with pytest.raises(ConfigError, match=message) as refused:
        run(tmp_path, *settings, resume="auto")
    assert "\n" not in str(refused.value)
    assert before == {path: path.read_bytes() for path in before}


def _without_statistics(model):
    model[5] = torch.nn.BatchNorm2d(4, track_running_stats=False).double()
    return model


@pytest.mark.parametrize("part", ["optimizer", "best", "schedule", "rng", "config", "model", "log"])
def test_resume_malformed_checkpoint(tmp_path, part):
    run(tmp_path, "epochs=1")
    path = checkpoint.path_of(tmp_path, 6)
    state = checkpoint.load(path)
    for wrong in (None, 3, [1], {"a": 1}):
        checkpoint.save(path, {**state, part: wrong})
        with pytest.raises(ValueError, match="resume: expected a checkpoint of ") as refused:
            run(tmp_path, "epochs=2", resume="auto")
        assert "\n" not in str(refused.value)


def test_resume_changed_data(tmp_path):
    run(tmp_path, "epochs=1")
    with pytest.warns(UserWarning, match="training samples: 24 -> 30"):
        run(tmp_path, "epochs=2", "samples=30", resume="auto")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["batch_size=25"], r"batch_size: expected at most the 24 samples, got 25"),
        (["accumulate=3"], r"batch_size: expected a multiple of 1 processes x 3 accumulated"),
    ],
)
def test_batch_size_invalid(tmp_path, settings, message):
    with pytest.raises(ConfigError, match=message):
        run(tmp_path, *settings)


def test_accumulate_equals_whole_batch(tmp_path):
    # Without batch norm in the way the gradient of a batch is the mean of its parts' gradients.
    def weights(name, *settings):
        from stand_in import StandIn

        original = StandIn.model
        StandIn.model = lambda self: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 2)).double()
        try:
            return run(tmp_path / name, "clip_grad=0.1", *settings).learner.model[1].weight
        finally:
            StandIn.model = original

    torch.testing.assert_close(weights("two", "accumulate=2"), weights("one"), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("amp", ["bf16", "fp16"])
def test_mixed_precision_loss_decreases(tmp_path, amp):
    run(tmp_path, f"amp={amp}", "epochs=10", "dropout=0")
    rows = read_rows(tmp_path / "metrics.csv")
    assert rows[-1]["train_loss"] < 0.7 * rows[0]["train_loss"]


def test_non_finite_loss_saves_state(tmp_path):
    with pytest.raises(NonFiniteLossError) as caught:
        run(tmp_path, "nan_at=7", "schedule.name=constant")
    message = str(caught.value)
    assert "at step 7 (epoch 1, samples " in message
    assert "learning rate 0.01;" in message
    saved = checkpoint.load(tmp_path / "checkpoints" / "failed-00000007.pt")
    assert saved["step"] == 7
    assert all(tensor.isfinite().all() for tensor in saved["model"].values())
    assert checkpoint.newest(tmp_path)["step"] == 6  # --resume auto does not walk into it again


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_loader_process_killed(tmp_path, monkeypatch, number):
    learn, calls = StandIn.loss, []

    def loss(task, model, batch):
        calls.append(1)
        if len(calls) == 5:
            os.kill(torch.multiprocessing.active_children()[0].pid, number)
            time.sleep(0.5)
        return learn(task, model, batch)

    monkeypatch.setattr(StandIn, "loss", loss)
    with pytest.raises(LoaderDiedError) as failed:
        run(tmp_path, "workers=1", "epochs=20")
    message = str(failed.value)
    assert "\n" not in message
    assert "a loader process died: (pid" in message
    assert (
        "try fewer workers or a smaller batch_size; stopped at step 4; --resume auto continues from step 4" in message
    )
    assert failed.value.exit_code == 2
    assert checkpoint.steps(tmp_path) == [2, 4]


@pytest.mark.parametrize("workers", [0, 1])
def test_broken_samples_only(tmp_path, workers):
    broken = f"broken={list(range(24))}"
    with pytest.raises(
        TooManyBrokenError, match=r"20 broken samples in a row, the last: train/\d+: cannot be read; stop"
    ):
        run(tmp_path / "all", broken, f"workers={workers}", "max_broken=1000")
    run(tmp_path / "some", "epochs=1")
    with pytest.warns(UserWarning, match="broken"), pytest.raises(TooManyBrokenError, match="continues from step 6"):
        run(tmp_path / "some", broken, f"workers={workers}", resume="auto")


def test_broken_samples_counted(tmp_path):
    run(tmp_path / "few", "broken=[3,4]")
    summary = json.loads((tmp_path / "few" / "summary.json").read_text())
    assert summary["broken_samples"] == 6  # two in each split
    assert summary["test_count"] == 22
    with pytest.raises(TooManyBrokenError, match="max_broken = 1"):
        run(tmp_path / "many", "broken=[3,4]", "max_broken=1")


READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__")


@pytest.fixture
def host_reads(monkeypatch):
    """The lines of the engine that read a tensor's value on the host, which would wait for a GPU."""
    found = []

    def watch(name, original):
        def read(self, *args, **kwargs):
            caller = sys._getframe(1).f_code
            if "ppma/engine/" in caller.co_filename and "sampling" not in caller.co_filename:  # that is on the CPU
                found.append(f"{caller.co_name}: {name}")
            return original(self, *args, **kwargs)

        return read

    for name in READS:
        monkeypatch.setattr(torch.Tensor, name, watch(name, getattr(torch.Tensor, name)))
    return found


def test_step_reads_nothing_between_reads(tmp_path, host_reads, monkeypatch):
    monkeypatch.setattr("stand_in.Accuracy.update", lambda *_: None)
    monkeypatch.setattr("stand_in.Accuracy.compute", lambda *_: {"accuracy": 0.5})
    settings = ("log_steps=6", "checkpoint_steps=null", "clip_grad=1", "ema.decay=0.9")
    run(tmp_path, *settings, read_steps=1000)
    assert host_reads == ["read: tolist"] * 4  # steps 6, 12, 18 and 24


def test_step_reads_change_no_result(tmp_path):
    settings = ("log_steps=6", "checkpoint_steps=null")
    run(tmp_path / "each", *settings)
    run(tmp_path / "seldom", *settings, read_steps=1000)
    each, seldom = (checkpoint.load(checkpoint.path_of(tmp_path / name, 24)) for name in ("each", "seldom"))
    assert all(torch.equal(each["model"][name], seldom["model"][name]) for name in each["model"])
    losses = [[row["train_loss"] for row in read_rows(tmp_path / name / "metrics.csv")] for name in ("each", "seldom")]
    assert losses[0] == losses[1]


def test_non_finite_loss_between_reads(tmp_path):
    settings = ("nan_at=7", "log_steps=null", "checkpoint_steps=6", "eval_epochs=4", "schedule.name=constant")
    with pytest.raises(NonFiniteLossError) as caught:
        run(tmp_path, *settings, read_steps=1000)
    message = str(caught.value)
    assert "at step 7 (epoch 1, samples " in message
    assert "stopped at step 11; --resume auto continues from step 6, and log_steps=1 would stop before" in message
    assert checkpoint.steps(tmp_path) == [6]
    with pytest.raises(NonFiniteLossError, match=r"the state before this step is in .*failed-00000007.pt") as again:
        run(tmp_path / "again", "nan_at=7", "schedule.name=constant", "checkpoint_steps=6")
    assert message.split("(")[1].split(")")[0] == str(again.value).split("(")[1].split(")")[0]  # the same samples
