"""A Cityscapes recipe by the commands, with a small model on a tiny tree of its layout."""

import json

import numpy as np
import pytest
from PIL import Image
from short_run import SMALL_DECODER, settings

from ppma.data.cityscapes import CLASSES, LAYOUT
from ppma.engine.logging import read_rows
from ppma_cli import main

RECIPE = "cityscapes_upernet_ppma_tiny"
QUICK = (
    *("model=ppma_nano", "init=null", "steps=1", "batch_size=2", "eval_steps=1", "workers=0", "amp=none"),
    *("data.short_side=32", "data.long_side=64", "augment.crop=32", "test.window=32", "test.stride=24"),
    *SMALL_DECODER,
)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("cityscapes")
    generator = np.random.default_rng(0)
    for split, count in (("train", 2), ("val", 1)):
        for number in range(count):
            parts = {
                "leftImg8bit": ("leftImg8bit", generator.integers(0, 256, (32, 64, 3), dtype=np.uint8)),
                "gtFine": ("gtFine_labelTrainIds", generator.choice([*range(19), 255], (32, 64)).astype(np.uint8)),
            }
            for folder, (kind, pixels) in parts.items():
                place = root / folder / split / "ulm"
                place.mkdir(parents=True, exist_ok=True)
                Image.fromarray(pixels).save(place / f"ulm_{number:06d}_000019_{kind}.png")
    return root


def test_commands(root, tmp_path, capsys):
    """Train, evaluate the same, and draw with the names and colours of Cityscapes."""
    run, out = tmp_path / "run", tmp_path / "out"
    assert main(["train", RECIPE, "--out", str(run), *settings(*QUICK, f"data.root={root}")]) == 0
    shown = capsys.readouterr().err
    assert f"{root}/gtFine/train/ulm: 2 of 2 label maps read; 0 to 18 for 19 classes, 255 ignored" in shown
    checkpoint = str(run / "best.safetensors")
    assert main(["eval", checkpoint, "--data", str(root), "--json"]) == 0
    measured = json.loads(capsys.readouterr().out)
    assert measured["mIoU"] == pytest.approx(read_rows(run / "metrics.csv")[-1]["val_mIoU"], abs=1e-6)
    image = root / "leftImg8bit" / "val" / "ulm" / "ulm_000000_000019_leftImg8bit.png"
    assert main(["predict", checkpoint, str(image), "--out", str(out), "--json"]) == 0
    (prediction,) = json.loads(capsys.readouterr().out)
    with Image.open(prediction["overlay"]) as drawn:
        colours = {tuple(colour) for colour in np.asarray(drawn)[:, 512:].reshape(-1, 3).tolist()}
    assert {LAYOUT.palette[CLASSES.index(name)] for name in prediction["shares"]} <= colours


def test_command_label_ids(root, tmp_path, capsys):
    """Values of labelIds files end the command with one line."""
    (path,) = (root / "gtFine" / "val" / "ulm").iterdir()
    before = path.read_bytes()
    Image.fromarray(np.full((32, 64), 33, np.uint8)).save(path)
    assert main(["train", RECIPE, "--out", str(tmp_path / "run"), *settings(*QUICK, f"data.root={root}")]) == 2
    path.write_bytes(before)
    *_, line = capsys.readouterr().err.splitlines()
    assert "label 33 out of range" in line
    assert "labelTrainIds" in line
    assert not (tmp_path / "run").exists()
