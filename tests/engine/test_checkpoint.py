"""Checkpoints are written atomically and read without executing code."""

import os

import pytest
import timm
import torch
from disk import full_disk

import ppma
from ppma.engine import checkpoint


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
