"""Segmentation of scenes by the commands; loss, metrics and windows on cases worked out by hand."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from short_run import (
    SHORT_DENSE,
    SMALL_DECODER,
    assert_resume_gives_the_same_bits,
    one_thread,
    settings,
    summary_on_scenes,
    summary_under_torchrun,
)

import ppma
from ppma.config import ConfigError
from ppma.data import segmentation
from ppma.data.decoding import decode, decode_labels
from ppma.data.label_maps import IGNORED
from ppma.data.preprocessing import image_tensor
from ppma.data.segmentation import SegmentationDataConfig
from ppma.engine.logging import read_rows
from ppma.tasks.registry import load_config
from ppma.tasks.run import train
from ppma.tasks.segmentation.losses import pixel_loss
from ppma.tasks.segmentation.metrics import PixelMetrics, boundary_band
from ppma.tasks.segmentation.model import Scores
from ppma.tasks.segmentation.scoring import InferenceConfig, probabilities, slide, window_starts
from ppma.tasks.segmentation.weights import load_segmenter
from ppma_cli import main

RECIPE = "scenes_upernet_nano"
QUICK = (
    *SHORT_DENSE,
    *SMALL_DECODER,
    "data.short_side=64",
    "data.long_side=64",
    "augment.crop=64",
    "checkpoint_steps=2",
)
PLAIN = SegmentationDataConfig(root="", short_side=20, long_side=40, mean=(0, 0, 0), std=(1, 1, 1))


@pytest.fixture(scope="session")
def run(scenes, tmp_path_factory):
    """The folder of a finished short run."""
    out = tmp_path_factory.mktemp("runs") / "segmentation"
    with one_thread():
        assert main(["train", RECIPE, "--out", str(out), *settings(*QUICK, f"data.root={scenes}")]) == 0
    return out


def test_metrics_by_hand():
    metrics, other = (PixelMetrics("abcd", PLAIN, InferenceConfig()) for _ in range(2))
    metrics.add(torch.tensor([[0, 0, 1], [1, 1, 2]]), torch.tensor([[0, 0, 0], [1, 1, IGNORED]]))
    other.add(torch.tensor([[2, 2]]), torch.tensor([[2, 0]]))
    measured = metrics.compute([metrics.state(), other.state()])
    # class 0: 2 right, 4 labelled, 2 predicted; 1: 2, 2, 3; 2: 1, 1, 2; class 3 does not occur
    assert measured["mIoU"] == pytest.approx(100 * (2 / 4 + 2 / 3 + 1 / 2) / 3)
    assert measured["mAcc"] == pytest.approx(100 * (2 / 4 + 1 + 1) / 3)
    assert measured["aAcc"] == pytest.approx(100 * 5 / 7)
    details = metrics.details([metrics.state(), other.state()])
    assert details.confusion.tolist() == [[2, 1, 1, 0], [0, 2, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]]
    assert details.classes == [
        {"class": "a", "count": 4, "IoU": 50, "accuracy": 50, "precision": 100},
        {"class": "b", "count": 2, "IoU": 100 * 2 / 3, "accuracy": 100, "precision": 100 * 2 / 3},
        {"class": "c", "count": 1, "IoU": 50, "accuracy": 100, "precision": 50},
        {"class": "d", "count": 0, "IoU": None, "accuracy": None, "precision": None},
    ]


def test_boundary_band_by_erosion():
    """A pixel is in the band unless every pixel of the window around it has its label."""
    labels, width = torch.randint(3, (9, 12), generator=torch.Generator().manual_seed(0)).repeat_interleave(3, 1), 2
    labels = labels.repeat_interleave(4, 0)
    height, columns = labels.shape
    band = boundary_band(labels, width)
    for row in range(height):
        for column in range(columns):
            inside = width <= row < height - width and width <= column < columns - width
            window = labels[row - width : row + width + 1, column - width : column + width + 1]
            same = inside and bool((window == labels[row, column]).all())
            assert bool(band[row, column]) != same
    assert 0 < band.float().mean() < 1


def test_boundary_iou_shift():
    """A square that is shifted by one pixel: the boundary IoU is far below the IoU."""
    labels = torch.zeros(80, 60, dtype=torch.int64)  # diagonal 100, so the band is 2 pixels wide
    labels[20:60, 20:40] = 1
    metrics = PixelMetrics("ab", PLAIN, InferenceConfig())
    metrics.add(labels, labels)
    assert metrics.compute([metrics.state()])["boundary_mIoU"] == 100
    metrics = PixelMetrics("ab", PLAIN, InferenceConfig())
    metrics.add(labels.roll(1, 1), labels)
    ring = 40 * 20 - 36 * 16  # pixels of the square's band
    shared = 2 * 2 * 19 + 2 * 1 * 36  # of the bands along rows, and of those along columns
    expected = {"square": shared / (2 * ring - shared)}
    border = 80 * 60 - 76 * 56  # the image's edge belongs to the band of the background
    outer = 44 * 24 - 40 * 20
    common = border + 2 * 2 * 23 + 2 * 1 * 40
    expected["background"] = common / (2 * (border + outer) - common)
    measured = metrics.compute([metrics.state()])
    assert measured["boundary_mIoU"] == pytest.approx(50 * sum(expected.values()))
    assert measured["boundary_mIoU"] < measured["mIoU"] - 20


def test_pixel_loss_mean():
    scores = torch.randn(2, 3, 4, 5, dtype=torch.float64).float()
    labels = torch.randint(3, (2, 4, 5))
    labels[0, 0] = IGNORED
    expected = torch.nn.functional.cross_entropy(scores, labels, ignore_index=IGNORED)
    torch.testing.assert_close(pixel_loss(scores, labels), expected)
    torch.testing.assert_close(pixel_loss(scores, labels, mean="all"), expected * 35 / 40)
    assert pixel_loss(scores, torch.full((2, 4, 5), IGNORED)) == 0


def test_pixel_loss_balance():
    torch.manual_seed(0)
    scores = torch.randn(2, 4, 3, 5)
    labels = torch.tensor([0] * 20 + [1] * 6 + [2] + [IGNORED] * 3).view(2, 3, 5)  # class 3 does not occur
    each = torch.nn.functional.cross_entropy(scores, labels, ignore_index=IGNORED, reduction="none")
    means = torch.stack([each[labels == digit].mean() for digit in range(3)])
    torch.testing.assert_close(pixel_loss(scores, labels, 1.0), means.mean())
    roots = torch.tensor([20.0, 6, 1]).sqrt()  # n pixels of weight n ** -0.5 each
    torch.testing.assert_close(pixel_loss(scores, labels, 0.5), (means * roots).sum() / roots.sum())
    assert pixel_loss(scores, torch.full((2, 3, 5), IGNORED), 0.5) == 0


@pytest.mark.parametrize(
    ("length", "starts"), [(512, [0]), (300, [0]), (513, [0, 1]), (853, [0, 341]), (900, [0, 341, 388])]
)
def test_window_starts(length, starts):
    assert window_starts(length, 512, 341) == starts


class Pointwise(torch.nn.Module):
    """Scores that depend on the pixel alone, so that windows change nothing; records the sizes of its inputs."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, images):
        self.seen.append(tuple(images.shape[-2:]))
        return Scores(torch.cat((images, 1 - images), 1), None)


def test_slide_pointwise_model():
    model, images = Pointwise(), torch.rand(1, 3, 20, 37)
    torch.testing.assert_close(slide(model, images, 16, 10), model(images).main)
    assert set(model.seen[:-1]) == {(16, 16)}
    assert len(model.seen) == 2 * 4 + 1
    images = torch.rand(1, 3, 10, 37)  # lower than a window
    torch.testing.assert_close(slide(model, images, 16, 10), model(images).main)


def test_probabilities_scales_and_flip():
    image = torch.rand(3, 20, 40)
    model = Pointwise()
    once = probabilities(model, image, PLAIN, InferenceConfig())
    torch.testing.assert_close(once, model(image[None]).main.softmax(1)[0])
    mirrored = probabilities(model, image, PLAIN, InferenceConfig(flip=True))
    torch.testing.assert_close(mirrored, once)  # no difference for a pointwise model
    model.seen.clear()
    several = probabilities(
        model, image, PLAIN, InferenceConfig(scales=(0.5, 1.0, 1.75), flip=True, mode="slide", window=64, stride=48)
    )
    assert model.seen == [(10, 20)] * 2 + [(20, 40)] * 2 + [(35, 64), (35, 64)] * 2
    assert several.shape == once.shape
    torch.testing.assert_close(several.sum(0), torch.ones(20, 40))
    left = torch.arange(40.0).expand(3, 20, 40) / 40
    straight = probabilities(Leaning(), left, PLAIN, InferenceConfig())
    both = probabilities(Leaning(), left, PLAIN, InferenceConfig(flip=True))
    back = probabilities(Leaning(), left.flip(-1), PLAIN, InferenceConfig()).flip(-1)
    torch.testing.assert_close(both, (straight + back) / 2)
    assert not torch.allclose(both, straight)


class Leaning(torch.nn.Module):
    """Scores that depend on the position too."""

    def forward(self, images):
        place = torch.linspace(0, 1, images.shape[-1]).expand_as(images[:, :1])
        return Scores(torch.cat((images[:, :1] * place, 1 - place), 1), None)


def test_weights_of_a_run_load(run):
    model, config, classes = load_segmenter(run / "best.safetensors")
    assert classes == ("background", *"0123456789")
    assert (config.test.mode, model.decode_head.classifier[1].in_channels) == ("whole", 16)
    backbone = ppma.load_checkpoint(run / "best.safetensors")
    for name, tensor in backbone.state_dict().items():
        assert torch.equal(tensor, model.backbone.state_dict()[name])


def test_eval_equals_training(run, scenes, capsys):
    recorded = read_rows(run / "metrics.csv")[-1]
    command = ["eval", str(run / "best.safetensors"), "--data", str(scenes), "--json"]
    assert main(command) == 0
    measured = json.loads(capsys.readouterr().out)
    assert measured["count"] == 3
    for name in ("mIoU", "mAcc", "aAcc"):
        assert measured[name] == pytest.approx(recorded[f"val_{name}"], abs=1e-6)
    assert main([*command, *settings("test.scales=[0.5,1.0]", "test.flip=true", "test.mode=slide")]) == 0
    assert json.loads(capsys.readouterr().out)["count"] == 3
    assert main(["eval", str(run / "best.safetensors"), "--data", "nowhere"]) == 2
    assert "data: expected a recipe or a folder, got 'nowhere'" in capsys.readouterr().err


def test_eval_files(run, scenes, tmp_path, capsys):
    command = ["eval", str(run / "best.safetensors"), "--data", str(scenes), "--out", str(tmp_path)]
    assert main(command) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("mIoU ")
    assert {path.name for path in tmp_path.iterdir()} == {
        "metrics.json",
        "classes.csv",
        "confusion.csv",
        "confusion.png",
    }
    written = json.loads((tmp_path / "metrics.json").read_text())
    ious = [row["IoU"] for row in written["classes"] if row["IoU"] is not None]
    assert sum(ious) / len(ious) == pytest.approx(written["metrics"]["mIoU"])


def test_predict_files(run, scenes, tmp_path, capsys):
    pictures, out = [scenes / "val2017" / f"00000{number}.jpg" for number in (1, 2)], tmp_path / "out"
    command = ["predict", str(run / "best.safetensors"), *map(str, pictures)]
    assert main([*command, "--out", str(out), "--json"]) == 0
    predictions = json.loads(capsys.readouterr().out)
    assert {path.name for path in out.iterdir()} == {
        *(f"00000{number}_{kind}.png" for number in (1, 2) for kind in ("labels", "overlay")),
        "classes.txt",
    }
    classes = (out / "classes.txt").read_text().split()
    model, config, names = load_segmenter(run / "best.safetensors")
    assert tuple(classes) == names
    for picture, prediction in zip(pictures, predictions, strict=True):
        labels = decode_labels(Path(prediction["labels"]))
        with torch.inference_mode():
            image = image_tensor(decode(picture, "picture"))
            assert np.array_equal(labels, probabilities(model, image, config.data, config.test).argmax(0).numpy())
        shares = {name: float((labels == index).mean()) for index, name in enumerate(classes)}
        assert prediction["shares"] == pytest.approx({name: share for name, share in shares.items() if share})
        with Image.open(prediction["labels"]) as stored, Image.open(prediction["overlay"]) as drawn:
            assert stored.mode == "P"
            assert drawn.height == 512
            assert drawn.width > 512  # the legend


def test_predict_without_out_writes_nothing(run, scenes, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["predict", str(run / "best.safetensors"), str(scenes / "val2017" / "000001.jpg")]) == 0
    assert "%" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_training_overfits(scenes, tmp_path):
    changes = (
        *(*QUICK, f"data.root={scenes}", "steps=10", "batch_size=8", "eval_steps=10", "ema=null", "lr=0.01"),
        *("schedule.name=constant", "augment.ratio=[1,1]", "augment.photometric=false"),
        *("decoder.channels=64", "decoder.auxiliary_channels=32", "decoder.dropout=0"),
    )
    train(RECIPE, tmp_path, assignments=changes)
    losses = [row["train_decoder"] for row in read_rows(tmp_path / "metrics.csv")]
    assert len(losses) == 10
    assert losses[0] > 2.2  # ln 11 at chance
    assert losses[-1] < 0.45 * losses[0]


def test_resume_bits(run, scenes, tmp_path):
    changes = (*QUICK, f"data.root={scenes}")
    assert_resume_gives_the_same_bits(RECIPE, run, tmp_path / "run", changes, load_segmenter)


def test_training_broken_label_maps(scenes, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(segmentation, "SAMPLED_MAPS", 1)  # the bad maps are not in the sample
    root = tmp_path / "scenes"
    shutil.copytree(scenes, root)
    Image.fromarray(np.full((64, 64), 99, np.uint8)).save(root / "annotations" / "training" / "000003.png")
    Image.fromarray(np.ones((60, 64), np.uint8)).save(root / "annotations" / "validation" / "000002.png")
    command = ["train", RECIPE, "--out", str(tmp_path / "run")]
    command += settings(*QUICK, f"data.root={root}", "steps=2", "eval_steps=2", "batch_size=8", "amp=bf16")
    assert main(command) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["broken_samples"], summary["val_count"]) == (2, 2)
    shown = capsys.readouterr().err
    assert "label 99 out of range" in shown
    assert "64 x 60 labels, but the image has 64 x 64 pixels" in shown


def test_labels_histogram_and_contradiction(run, scenes, tmp_path, capsys):
    changes = (*QUICK, f"data.root={scenes}", "steps=1", "eval_steps=1")
    assert main(["train", RECIPE, "--out", str(tmp_path / "a"), *settings(*changes)]) == 0
    shown = capsys.readouterr().err
    for split, count in (("training", 8), ("validation", 3)):
        assert f"{scenes}/annotations/{split}: {count} of {count} label maps read; 1 to 11 for 11 classes" in shown
    assert "%" in shown.split("background")[0].splitlines()[-1]
    assert main(["train", RECIPE, "--out", str(tmp_path / "b"), *settings(*changes, "data.labels=plain")]) == 2
    shown = capsys.readouterr().err
    assert "label 11 out of range, expected 0 to 10 for 11 classes, 255 ignored (labels: plain)" in shown
    assert shown.count("\n") == 1
    assert not (tmp_path / "b").exists()
    checkpoint = str(run / "best.safetensors")
    assert main(["eval", checkpoint, "--data", str(scenes), "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["count"] == 3
    assert "3 of 3 label maps read" in printed.err
    assert main(["eval", checkpoint, "--data", str(scenes), "--split", "training", *settings("data.labels=plain")]) == 2
    assert "label 11 out of range" in capsys.readouterr().err


def test_labels_plain_stored(scenes, tmp_path, capsys):
    root = tmp_path / "scenes"
    shutil.copytree(scenes, root)
    for path in (root / "annotations").glob("*/*.png"):
        with Image.open(path) as image:
            values = np.asarray(image) - np.uint8(1)
        Image.fromarray(values).save(path)
    changes = (*QUICK, f"data.root={root}", "data.labels=plain", "steps=1", "eval_steps=1")
    assert main(["train", RECIPE, "--out", str(tmp_path / "run"), *settings(*changes)]) == 0
    recorded = read_rows(tmp_path / "run" / "metrics.csv")[-1]
    capsys.readouterr()
    assert main(["eval", str(tmp_path / "run" / "best.safetensors"), "--data", str(root), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["mIoU"] == pytest.approx(recorded["val_mIoU"], abs=1e-6)


@pytest.mark.parametrize(
    ("assignments", "message"),
    [
        (["batch_size=4", "accumulate=4"], "a micro-batch of 2 or more"),
        (["class_balance=2"], r"class_balance: expected a number in \[0, 1\]"),
        (["loss_mean=none"], "loss_mean: expected one of 'labelled', 'all'"),
        (["test.stride=900"], "test.stride: expected 1 to window"),
        (["test.window=100000"], "test.window: expected at most 16384"),
        (["test.scales=[1,1000]"], "test.scales: expected at most 16384 pixels, data.long_side times .*, got 96000"),
        (["augment.ratio=[1,1000]"], "augment.ratio: expected at most 16384 pixels"),
        (["decoder.channels=100000000"], "decoder.channels: expected 1 to 16384"),
        (["decoder.pool_scales=[1,100000]"], "decoder.pool_scales: expected numbers from 1 to 1024"),
        (["model_args.num_classes=3"], "model_args.num_classes: expected no value, the task sets it"),
        (["model=ppma_nanno"], r"did you mean 'ppma_nano'\?"),
    ],
)
def test_config_errors(assignments, message):
    with pytest.raises(ConfigError, match=message):
        load_config(RECIPE, assignments)


@pytest.mark.slow
@pytest.mark.parametrize("skip", ["[]", "[backbone]"])
def test_training_torchrun(scenes, tmp_path, skip):
    changes = (*QUICK, f"data.root={scenes}", f"sync_batch_norm_skip={skip}")
    summary = summary_under_torchrun(RECIPE, tmp_path, changes)
    assert (summary["processes"], summary["val_count"]) == (2, 3)


@pytest.mark.slow
def test_recipe_reaches_miou(tmp_path):
    summary = summary_on_scenes(RECIPE, tmp_path)
    assert summary["val_count"] == 200
    assert summary["val_mIoU"] >= 50
