"""What a run writes, and how it ends when something goes wrong."""

import contextlib
import json
import math
import os
import resource
import signal
import time

import pytest
import timm
import torch
from processes import Program, program
from safetensors.torch import load_file
from stand_in import StandIn, make, run

import ppma
from ppma.config import ConfigError
from ppma.engine import checkpoint
from ppma.engine.errors import (
    IncompleteRunError,
    LoaderDiedError,
    NonFiniteLossError,
    StoppedError,
    TooManyBrokenError,
)
from ppma.engine.logging import MetricsLog, read_rows
from ppma.engine.optim import make_ema


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
    assert summary["parameters"] == sum(p.numel() for p in trainer.model.parameters())
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
    assert trainer.optimizer.param_groups[0]["lr"] == 0.02
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


def test_ema_short_run(tmp_path):
    """Without a warm-up, 94 % of the average would be the random start, which guesses."""
    settings = ("samples=200", "batch_size=20", "epochs=6", "eval_epochs=6", "dropout=0")
    trainer = run(tmp_path / "ema", *settings, "ema.decay=0.999")
    run(tmp_path / "raw", *settings, "ema=null")
    averaged, raw = (json.loads((tmp_path / name / "summary.json").read_text()) for name in ("ema", "raw"))
    assert raw["val_accuracy"] > 0.7
    assert averaged["val_accuracy"] >= raw["val_accuracy"] - 0.1
    start = run(tmp_path / "start", "epochs=null", "steps=1", "lr=1e-9", "ema=null", "dropout=0").model
    weights = [model[0].weight.detach() for model in (start, trainer.model, trainer.eval_model)]
    assert (weights[2] - weights[1]).norm() < 0.3 * (weights[1] - weights[0]).norm()


def test_ema_warm_up():
    ema = make_ema(make("ema.decay=0.99").config, torch.nn.Linear(2, 2))
    decays = [ema.get_decay(step) for step in range(1, 2000)]
    assert decays == [min(0.99, (1 + t) / (10 + t)) for t in range(1, 2000)]
    assert decays[890] == 0.99


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
            return run(tmp_path / name, "clip_grad=0.1", *settings).model[1].weight
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


@contextlib.contextmanager
def full_disk(room):
    """A write beyond `room` bytes fails half-way."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


FULL = OSError(28, "No space left on device")


def test_full_disk_keeps_checkpoint(tmp_path):
    path = tmp_path / "checkpoints" / "step-00000001.pt"
    state = {"step": 1, "model": {}, "optimizer": {}, "rng": [], "weights": torch.zeros(1000)}
    checkpoint.save(path, state)
    before = path.read_bytes()
    with full_disk(2000), pytest.raises(OSError, match="large"):
        checkpoint.save(path, {**state, "step": 2})
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_full_disk_keeps_weights(tmp_path):
    model = timm.create_model("ppma_nano", num_classes=10)
    path = tmp_path / "best.safetensors"
    ppma.save_checkpoint(model, path)
    before = path.read_bytes()
    with full_disk(2000), pytest.raises(OSError, match="large"):
        ppma.save_checkpoint(model, path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_metrics_log_full_disk(tmp_path):
    log = MetricsLog(tmp_path, 0, tensorboard=False)
    rows = [{"step": step, "loss": 0.1 * step} for step in range(1, 5)]
    log.add(rows[0])
    with full_disk(len("step,loss\n1,0.1\n") + 3):
        for row in rows[1:3]:
            with pytest.warns(UserWarning, match="a row of metrics.csv not written yet"):
                log.add(row)
    log.add(rows[3])
    assert read_rows(tmp_path / "metrics.csv") == rows


def test_metrics_log_events_full_disk(tmp_path):
    class Events:
        def add_scalar(self, *_):
            raise FULL

    log = MetricsLog(tmp_path, 0, tensorboard=False)
    log.events = Events()
    with pytest.warns(UserWarning, match="TensorBoard's events end here: .*No space left"):
        log.add({"step": 1, "loss": 0.5})
    log.add({"step": 2, "loss": 0.4})
    log.close()
    assert [row["step"] for row in read_rows(tmp_path / "metrics.csv")] == [1, 2]


def test_full_disk_weights_retried(tmp_path, monkeypatch):
    save, calls = StandIn.save_weights, []

    def full(task, model, path):
        calls.append(path)
        if len(calls) == 1:
            raise OSError(28, "No space left on device")
        save(task, model, path)

    monkeypatch.setattr(StandIn, "save_weights", full)
    with pytest.warns(UserWarning, match="weights not written, the earlier ones are kept: .*No space left"):
        run(tmp_path, "epochs=2", "eval_epochs=1")
    assert (tmp_path / "last.safetensors").is_file()


def test_full_disk_checkpoint_skipped(tmp_path, monkeypatch):
    save = checkpoint.save

    def full(path, state):
        if state["step"] in (4, 6):
            raise OSError(28, "No space left on device")
        save(path, state)

    monkeypatch.setattr(checkpoint, "save", full)
    with pytest.warns(UserWarning, match="earlier ones are kept: .*No space left"):
        run(tmp_path, "epochs=2", "keep=10")
    assert checkpoint.steps(tmp_path) == [2, 8, 10, 12]


def full_for(monkeypatch, *names):
    """Files of these names cannot be written."""
    write, save = os.replace, StandIn.save_weights

    def replace(source, target):
        if any(name in str(target) for name in names):
            raise FULL
        write(source, target)

    def save_weights(task, model, path):
        if path.name in names:
            raise FULL
        save(task, model, path)

    monkeypatch.setattr(os, "replace", replace)
    monkeypatch.setattr(StandIn, "save_weights", save_weights)


@pytest.mark.parametrize(
    "name", ["last.safetensors", "best.safetensors", "summary.json", "curves.png", "checkpoints/step-00000012.pt"]
)
@pytest.mark.filterwarnings("ignore:.*not written")
def test_full_disk_at_the_end(tmp_path, monkeypatch, name):
    with monkeypatch.context() as full:
        full_for(full, name)
        with pytest.raises(IncompleteRunError) as failed:
            run(tmp_path, "epochs=2")
    assert str(failed.value) == (
        f"{tmp_path}: all 12 steps are done, but {name} could not be written (No space left on device); "
        f"make room, then --resume auto continues from step {10 if 'step' in name else 12}"
    )
    assert not (tmp_path / name).exists()
    run(tmp_path, "epochs=2", resume="auto")
    assert (tmp_path / name).exists()


@pytest.mark.filterwarnings("ignore:.*not written")
def test_full_disk_names_all_missing(tmp_path, monkeypatch):
    full_for(monkeypatch, "safetensors", "last.safetensors", "best.safetensors", "step-", "summary", "curves")
    with pytest.raises(IncompleteRunError) as failed:
        run(tmp_path, "epochs=2")
    names = "last.safetensors, best.safetensors, checkpoints/step-00000012.pt, summary.json, curves.png"
    assert f"but {names} could not be written" in str(failed.value)
    assert str(failed.value).endswith("make room, then --overwrite trains again")


@pytest.mark.filterwarnings("ignore:.*not written")
def test_full_disk_best_weights_retried(tmp_path, monkeypatch):
    save, accuracies = StandIn.save_weights, iter([0.9, 0.1])

    def refuse_the_first(task, model, path):
        if path.name == "best.safetensors" and first:
            first.clear()
            best.update({name: tensor.clone() for name, tensor in model.state_dict().items()})
            raise FULL
        save(task, model, path)

    first, best = [True], {}
    monkeypatch.setattr(StandIn, "save_weights", refuse_the_first)
    monkeypatch.setattr("stand_in.Accuracy.compute", lambda *_: {"accuracy": next(accuracies, 0.5)})
    run(tmp_path, "epochs=2", "eval_epochs=1")
    assert json.loads((tmp_path / "summary.json").read_text())["best_step"] == 6
    written = load_file(tmp_path / "best.safetensors")
    assert all(torch.equal(best[name], tensor) for name, tensor in written.items())


@pytest.mark.filterwarnings("ignore:.*not written")
def test_full_disk_at_a_stop(tmp_path, monkeypatch):
    full_for(monkeypatch, "step-00000004")
    learn, calls = StandIn.loss, []

    def loss(task, model, batch):
        calls.append(1)
        if len(calls) == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return learn(task, model, batch)

    monkeypatch.setattr(StandIn, "loss", loss)
    with pytest.raises(StoppedError, match="not saved: stopped at step 4; --resume auto continues from step 2") as stop:
        run(tmp_path)
    assert stop.value.exit_code == 143


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


def test_checkpoint_code_is_not_executed(tmp_path):
    class Hostile:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path}/ran",)

    path = checkpoint.path_of(tmp_path, 1)
    path.parent.mkdir()
    torch.save({"step": 1, "model": {}, "optimizer": {}, "rng": [Hostile()]}, path)
    with pytest.raises(checkpoint.UnreadableCheckpointError):
        checkpoint.load(path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["cosine", "poly", "multistep", "constant"])
def test_schedule_learning_rates(tmp_path, name):
    run(
        tmp_path, f"schedule.name={name}", "epochs=4", "log_steps=1", "schedule.warmup_epochs=0",
        "schedule.warmup_steps=4", "schedule.milestones=[2,3]", "schedule.min_lr=0.001",
    )  # fmt: skip
    rates = [row["lr"] for row in read_rows(tmp_path / "metrics.csv")]
    assert rates[:4] == pytest.approx([0, 0.0025, 0.005, 0.0075])
    expected = {
        "cosine": lambda t: 0.001 + 0.0045 * (1 + math.cos(math.pi * t / 24)),
        "poly": lambda t: 0.001 + 0.009 * (1 - t / 24),
        "multistep": lambda t: 0.01 * 0.1 ** ((t >= 12) + (t >= 18)),
        "constant": lambda t: 0.01,
    }[name]
    assert rates[4:] == pytest.approx([expected(t) for t in range(4, 24)])


def test_read_rows_truncated(tmp_path):
    path = tmp_path / "metrics.csv"
    path.write_text("step,lr,train_loss\n3,0.1,0.5\n6,0.1,\n9,1e-")
    assert read_rows(path) == [{"step": 3, "lr": 0.1, "train_loss": 0.5}, {"step": 6, "lr": 0.1}]
