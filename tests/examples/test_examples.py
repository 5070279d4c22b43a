"""The scripts in examples/ do what they say, in a small setting."""

import importlib.util
import re
from pathlib import Path

import pytest
import torch

import ppma
from ppma.testing import random_log_decay

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name):
    specification = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    example = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(example)
    return example


def test_own_vit_training(capsys):
    assert load("own_vit").main() > 0.7  # of ten classes
    assert re.search(r"step  99  loss 0\.\d+", capsys.readouterr().out)


def test_retrofit_vit(capsys):
    losses = load("retrofit_vit").main(pretraining=60, steps=30)
    assert losses["retrofitted"] == pytest.approx(losses["trained"], abs=1e-4)
    assert losses["tuned"] < losses["retrofitted"]
    assert losses["loaded"] == losses["tuned"]
    assert "of the decay rates are positive" in capsys.readouterr().out


def test_finetune_default(capsys):
    accuracies = load("finetune_folder").main(["--steps", "2", "--first-steps", "2", "--size", "16"])
    assert all(0 <= accuracy <= 100 for accuracy in accuracies.values())
    printed = capsys.readouterr().out
    assert re.search(r"from the checkpoint: \d+\.\d % of the validation images right after 2 steps", printed)
    assert re.search(r"val/5/\d+\.png shows '[5-9]' with probability", printed)


def test_finetune_folder_and_checkpoint(tmp_path):
    example = load("finetune_folder")
    folder = example.write_digits(tmp_path / "images", (3, 8), train_images=30)
    assert len(list(folder.glob("train/*/*.png"))) == 60
    example.tune(folder, tmp_path / "run", steps=1, size=16, init=None)
    accuracies = example.main(
        [str(folder), "--checkpoint", str(tmp_path / "run" / "best.safetensors"), "--steps", "1", "--size", "16"]
    )
    assert set(accuracies) == {"from the checkpoint", "from random weights"}


@pytest.mark.parametrize("masked", [True, False])
def test_video_attention_matches_definition(masked):
    """The scan against N x N numbers, in float64."""
    generator = torch.Generator().manual_seed(0)
    shape = (2, 3, 2, 3, 4)
    q, k, v = (torch.rand(*shape, 5, generator=generator, dtype=torch.float64) for _ in range(3))
    log_decays = [random_log_decay(*shape, generator=generator, dtype=torch.float64) for _ in range(3)]
    weights = q.flatten(2, 4) @ k.flatten(2, 4).mT
    if masked:
        weights = weights * ppma.polyline_mask_nd(log_decays)
    expected = (weights / weights.sum(-1, keepdim=True)) @ v.flatten(2, 4)
    out = load("video_3d").linear_attention_3d(q, k, v, log_decays if masked else None)
    torch.testing.assert_close(out.flatten(2, 4), expected)


def test_video_labels():
    example = load("video_3d")
    digits = torch.ones(4, 8, 8)
    video, moves = example.make_videos(digits, 3, torch.Generator().manual_seed(0))
    assert video.shape == (3, 6, 16, 16)
    assert moves.shape == (3, *example.GRID)
    assert (example.patches(video).amax(-1) >= moves).all()  # a full square drifts: every token called so has a 1
    assert (moves[:, 0] != moves[:, -1]).flatten(1).any(1).all()


def test_video_training(capsys):
    results = load("video_3d").main(["--steps", "12", "--batch", "4", "--test", "4"])
    for losses, overlap in results.values():
        assert min(losses[-3:]) < losses[0]
        assert 0 <= overlap <= 1
    assert capsys.readouterr().out.count("overlap with the drifting digit") == 2
