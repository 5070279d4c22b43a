"""Two processes over gloo do what one does with the same global batch."""

import json
import os
import socket
from pathlib import Path

import pytest
import torch
from processes import Program
from stand_in import ShiftedNorm, run
from torch import nn

from ppma.engine import checkpoint, distributed, folder
from ppma.engine.logging import read_rows

# 25: the last evaluation batches of the two processes differ in size. Biases before a batch norm have no gradient but
# rounding, which AdamW would divide by its eps, 1e-8.
PLAIN = ("dropout=0", "samples=25", "freeze=[0.bias, 4.bias]")


def two_processes(outs: tuple[Path, Path], resume: str, *arguments: str, expected: int = 0) -> list[str]:
    """Train on two processes, as torchrun would start them; they normally share one folder. Returns their output."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    started = [
        Program(str(out), resume, *arguments, environment={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank, out in enumerate(outs)
    ]
    ended = [process.wait() for process in started]
    expected = -9 if "--kill-at-step" in arguments else expected
    assert [end.exit_code for end in ended] == [expected, expected], ended
    return [end.output for end in ended]


def final(out: Path, step: int = 24) -> dict:
    return checkpoint.load(checkpoint.path_of(out, step))


def assert_close(ours: dict, theirs: dict) -> None:
    """Equal but for the order of float64 sums."""
    for part in ("model", "ema"):
        for name, tensor in ours[part].items():
            torch.testing.assert_close(tensor, theirs[part][name], rtol=1e-9, atol=24e-10)
    for ours_moments, theirs_moments in zip(
        ours["optimizer"]["state"].values(), theirs["optimizer"]["state"].values(), strict=True
    ):
        torch.testing.assert_close(ours_moments["exp_avg"], theirs_moments["exp_avg"], rtol=1e-8, atol=1e-11)


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> tuple[Path, Path]:
    """A finished run on two processes; the second was given another folder."""
    folder = tmp_path_factory.mktemp("pair")
    outs = (folder / "main", folder / "other")
    two_processes(outs, "none", *PLAIN)
    return outs


def test_two_processes_equal_weights(tmp_path, pair):
    run(tmp_path, *PLAIN)
    assert_close(final(pair[0]), final(tmp_path))


def test_two_processes_folder_in_use(tmp_path):
    with folder.reserve(tmp_path, distributed.World()):
        printed = two_processes((tmp_path, tmp_path), "none", expected=1)
    assert all(f"is in use by another run (process {os.getpid()} on" in text for text in printed)


def test_two_processes_equal_gradient(tmp_path):
    # After one step the first moment of AdamW is 0.1 times the gradient.
    settings = (*PLAIN, "epochs=null", "steps=1", "checkpoint_steps=1")
    run(tmp_path / "one", *settings)
    two_processes((tmp_path / "two", tmp_path / "two"), "none", *settings)
    assert_close(final(tmp_path / "two", 1), final(tmp_path / "one", 1))


def test_two_processes_accumulation_and_clipping(tmp_path):
    settings = (*PLAIN, "batch_size=8", "accumulate=2", "clip_grad=0.05", "checkpoint_steps=12")
    run(tmp_path / "one", *settings)
    two_processes((tmp_path / "two", tmp_path / "two"), "none", *settings)
    assert_close(final(tmp_path / "two", 12), final(tmp_path / "one", 12))


def test_two_processes_frozen_and_seldom_read(tmp_path):
    settings = (
        *PLAIN,
        "freeze=[0.*, 1.*, 4.bias]",
        "checkpoint_steps=12",
        "log_steps=null",
        "early_stopping.patience=9",
    )
    run(tmp_path / "one", *settings)
    two_processes((tmp_path / "two", tmp_path / "two"), "none", *settings, "--read-steps", "100")
    assert_close(final(tmp_path / "two"), final(tmp_path / "one"))
    losses = [[row["train_loss"] for row in read_rows(tmp_path / name / "metrics.csv")] for name in ("one", "two")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-9)


def test_two_processes_evaluation_counts(pair):
    summary = json.loads((pair[0] / "summary.json").read_text())
    assert summary["processes"] == 2
    for split in ("val", "test"):
        assert summary[f"{split}_count"] == summary[f"{split}_distinct"] == 25


def test_two_processes_only_main_writes(pair):
    main, other = pair
    assert (main / "summary.json").is_file()
    assert not other.exists()


def test_sync_batch_norm_off_differs(tmp_path, pair):
    two_processes((tmp_path, tmp_path), "none", *PLAIN, "sync_batch_norm=false")
    with pytest.raises(AssertionError, match="not close"):
        assert_close(final(tmp_path), final(pair[0]))


def test_two_processes_killed_and_resumed(tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    two_processes((whole, whole), "none")  # with dropout: every process has its own generators
    two_processes((broken, broken), "none", "--kill-at-step", "9")
    two_processes((broken, broken), "auto")
    for part in ("model", "ema"):
        assert all(torch.equal(tensor, final(whole)[part][name]) for name, tensor in final(broken)[part].items())


def test_sync_batch_norm_one_process(monkeypatch):
    # With one process the all-reduce is the identity, and the module must do exactly what it replaces.
    monkeypatch.setattr(distributed.dist, "all_reduce", lambda tensor: None)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 5, 3, 4, generator=generator, dtype=torch.float64) + 2
    for kind in (nn.BatchNorm2d, ShiftedNorm):
        plain = kind(5).double()
        synchronised = distributed.synchronise_batch_norm(kind(5).double(), torch.device("cpu"))
        assert isinstance(synchronised, distributed.SyncBatchNorm2d)
        assert isinstance(synchronised, kind)
        inputs = [x.clone().requires_grad_() for _ in range(2)]
        outs = [norm(value) for norm, value in zip((plain, synchronised), inputs, strict=True)]
        for out in outs:
            out.square().sum().backward()
        torch.testing.assert_close(outs[1], outs[0])
        torch.testing.assert_close(inputs[1].grad, inputs[0].grad, rtol=1e-7, atol=1e-9)
        torch.testing.assert_close(dict(synchronised.named_buffers()), dict(plain.named_buffers()))
        torch.testing.assert_close(synchronised.eval()(x), plain.eval()(x))


def test_sync_batch_norm_cuda_uses_pytorch():
    model = nn.Sequential(nn.BatchNorm2d(5), nn.Sequential(ShiftedNorm(5))).eval()
    x = torch.randn(2, 5, 3, 4, generator=torch.Generator().manual_seed(0))
    for norm in (model[0], model[1][0]):
        norm.running_mean.fill_(0.5)
    expected, weight = model(x), model[0].weight
    converted = distributed.synchronise_batch_norm(model, torch.device("cuda"))
    assert isinstance(converted[0], nn.SyncBatchNorm)
    assert isinstance(converted[1][0], nn.SyncBatchNorm)
    assert isinstance(converted[1][0], ShiftedNorm)
    assert converted[0].weight is weight
    torch.testing.assert_close(converted(x), expected)
