"""Training, evaluation and prediction by the command line, on small runs."""

import csv
import json
import re
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from short_run import SHORT, settings, summary_under_torchrun

import ppma
from ppma.data.arrays import digits
from ppma.data.source import check_classes
from ppma.engine.logging import read_rows
from ppma.models.loading import load_classifier
from ppma.tasks.classification.task import ClassificationMetrics
from ppma.tasks.run import train
from ppma_cli import main


@pytest.fixture
def folder(tmp_path):
    """Digits 0, 1 and 2 as a folder of images, eight for training and two held out of each."""
    source = digits("train")
    labels = np.array(source.labels())
    for digit, name in enumerate(("zero", "one", "two")):
        for number, index in enumerate(np.flatnonzero(labels == digit)[:10]):
            place = tmp_path / "images" / ("train" if number < 8 else "val") / name
            place.mkdir(parents=True, exist_ok=True)
            source[index][0].save(place / f"{number}.png")
    return tmp_path / "images"


def test_metrics_values():
    scores = torch.tensor([[0.9, 0.1, 0, 0, 0, 0, 0], [0.1, 0.9, 0, 0, 0, 0, 0], [7.0, 6, 5, 4, 3, 2, 1]]).double()
    metrics = ClassificationMetrics("abcdefg")
    metrics.update(lambda images: images, (scores, torch.tensor([0, 0, 6])))
    measured = metrics.compute([metrics.state(), ClassificationMetrics("abcdefg").state()])
    assert measured["top1"] == pytest.approx(100 / 3)
    assert measured["top5"] == pytest.approx(200 / 3)
    expected = torch.nn.functional.cross_entropy(scores.float(), torch.tensor([0, 0, 6]))
    assert measured["loss"] == pytest.approx(expected.item())


def test_metrics_details():
    first, second = ClassificationMetrics("abc"), ClassificationMetrics("abc")
    first.update(lambda images: images, (torch.eye(3)[[0, 0, 1]], torch.tensor([0, 1, 1])))
    second.update(lambda images: images, (torch.eye(3)[[0]], torch.tensor([0])))
    details = first.details([first.state(), second.state(), ClassificationMetrics("abc").state()])
    assert details.confusion.tolist() == [[2, 0, 0], [1, 1, 0], [0, 0, 0]]
    assert details.classes == [
        {"class": "a", "count": 2, "accuracy": 100, "precision": 100 * 2 / 3},
        {"class": "b", "count": 2, "accuracy": 50, "precision": 100},
        {"class": "c", "count": 0, "accuracy": None, "precision": None},
    ]


def test_eval_files(digits_run, tmp_path, capsys):
    out = tmp_path / "report"
    command = ["eval", str(digits_run / "best.safetensors"), "--data", "digits", "--out", str(out)]
    assert main(command) == 0
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith("359 samples, ")
    assert first.endswith(f", details in {out}")
    assert [part.split()[0] for part in last.split(", ")] == ["top1", "top5", "loss"]
    assert {path.name for path in out.iterdir()} == {"metrics.json", "classes.csv", "confusion.csv", "confusion.png"}
    written = json.loads((out / "metrics.json").read_text())
    with open(out / "classes.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    with open(out / "confusion.csv", newline="") as file:
        confusion = np.array([row[1:] for row in csv.reader(file)][1:], int)
    assert [row["class"] for row in rows] == list("0123456789")
    assert [int(row["count"]) for row in rows] == confusion.sum(1).tolist()
    assert 100 * confusion.trace() / 359 == pytest.approx(written["metrics"]["top1"])
    assert [float(row["accuracy"]) for row in rows] == [row["accuracy"] for row in written["classes"]]
    assert main(command) == 2
    assert "out: expected a folder without metrics.json" in capsys.readouterr().err
    assert main([*command, "--overwrite", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["top1"] == written["metrics"]["top1"]


def test_run_weights_load(digits_run):
    model = ppma.load_checkpoint(digits_run / "best.safetensors")
    assert model(torch.zeros(1, 3, 32, 32)).shape == (1, 10)
    _, preprocessing, classes = load_classifier(digits_run / "last.safetensors")
    assert classes == tuple("0123456789")
    assert (preprocessing.image_size, preprocessing.crop_pct) == (32, 1.0)


def test_eval_equals_training(digits_run, capsys):
    recorded = read_rows(digits_run / "metrics.csv")[-1]
    checkpoint = str(digits_run / "best.safetensors")
    assert main(["eval", checkpoint, "--data", "digits", "--split", "val", "--batch-size", "50", "--json"]) == 0
    measured = json.loads(capsys.readouterr().out)
    assert measured["count"] == 180
    assert measured["top1"] == recorded["val_top1"]
    assert measured["loss"] == pytest.approx(recorded["val_loss"], rel=1e-5)
    assert main(["eval", checkpoint, "--data", str(digits_run / "config.yaml")]) == 0
    assert "top1" in capsys.readouterr().out


def test_predict_command(digits_run, tmp_path, capsys):
    picture = tmp_path / "digit.png"
    digits("test")[0][0].save(picture)
    checkpoint = str(digits_run / "best.safetensors")
    assert main(["predict", checkpoint, str(picture), "--json", "--top", "3"]) == 0
    (prediction,) = json.loads(capsys.readouterr().out)
    assert len(prediction["classes"]) == 3
    assert prediction["probabilities"] == sorted(prediction["probabilities"], reverse=True)
    assert main(["predict", checkpoint, str(picture)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 6
    assert main(["predict", checkpoint, str(tmp_path / "none.png")]) == 2
    assert "none.png: no such file" in capsys.readouterr().err


def test_train_command_resume(tmp_path, capsys):
    command = [
        "train",
        "digits_nano",
        "--out",
        str(tmp_path),
        *settings(*SHORT, "data.train_fraction=0.1"),
    ]
    assert main(command) == 0
    assert main(command) == 2
    assert "--resume auto continues it" in capsys.readouterr().err
    assert main([*command, "--resume", "auto", "--set", "steps=4"]) == 0
    last_line = capsys.readouterr().out.splitlines()[-1]
    measured = r"val_top1 [\d.]+, val_top5 [\d.]+, val_loss [\d.]+"
    assert re.fullmatch(rf"{tmp_path}: 4 steps in \d+ s; at step [34], the best: {measured}", last_line)
    assert [row["step"] for row in read_rows(tmp_path / "metrics.csv")] == [3, 4]


def test_eval_other_classes(digits_run, folder, capsys):
    assert main(["eval", str(digits_run / "best.safetensors"), "--data", str(folder)]) == 2
    error = capsys.readouterr().err
    assert (
        "the data has 3 and the checkpoint 10: 10 missing (0, 1, 2, 3, 4, ...); 3 unexpected (one, two, zero)" in error
    )
    with pytest.raises(ValueError, match="in another order"):
        check_classes("ab", "ba", found="x", expected="y")


def test_finetune_folder_with_broken_image(digits_run, folder, tmp_path, capsys):
    (folder / "train" / "two" / "3.png").write_bytes(b"broken")
    out = tmp_path / "tuned"
    changes = settings(
        f"data.root={folder}", f"init={digits_run}/best.safetensors", "data.image_size=32", "epochs=2", "batch_size=8",
        "workers=0", "eval_epochs=2", "data.crop_pct=1.0",
    )  # fmt: skip
    assert main(["train", "folder_finetune", "--out", str(out), *changes]) == 0
    shown = capsys.readouterr().err
    assert "its classes differ from the data's, so the last layer is new" in shown
    assert "skipped: " in shown
    assert "two/3.png" in shown
    summary = json.loads((out / "summary.json").read_text())
    assert summary["broken_samples"] == 1
    assert summary["val_count"] == 6
    assert load_classifier(out / "best.safetensors")[2] == ("one", "two", "zero")
    again = ["train", "folder_finetune", "--out", str(tmp_path / "b"), *changes, "--set", "max_broken=0"]
    assert main(again) == 1
    assert "more than max_broken = 0" in capsys.readouterr().err


def test_finetune_folder_without_validation(folder, tmp_path, capsys):
    shutil.rmtree(folder / "val")
    changes = settings(
        f"data.root={folder}", "model=ppma_nano", "data.image_size=32", "data.val_fraction=0.25", "steps=1",
        "batch_size=8", "workers=0", "balanced_sampling=true", "class_balance=1", "optimizer.layer_decay=0.9",
        "freeze=[stem.*]", "log=[csv]",
    )  # fmt: skip
    assert main(["train", "folder_finetune", "--out", str(tmp_path / "run"), *changes]) == 0
    assert capsys.readouterr().err.count("validating on 6 of 24 training images") == 1
    weights, config = str(tmp_path / "run" / "best.safetensors"), str(tmp_path / "run" / "config.yaml")
    assert main(["eval", weights, "--data", config, "--json"]) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    measured = json.loads(capsys.readouterr().out)
    assert (measured["count"], measured["top1"]) == (6, summary["val_top1"])


def test_imagenet_recipe_trains(folder, tmp_path):
    """RandAugment, erasing, mixing, repeats, bfloat16 and EMA together, on small images."""
    changes = (
        *(f"data.root={folder}", "data.image_size=64", "batch_size=4", "workers=1"),
        *("model=ppma_nano", "epochs=null", "steps=2", "log_steps=1"),
    )
    summary = train("imagenet_ppma_tiny", tmp_path / "run", assignments=changes)
    assert summary["val_count"] == 6
    rows = read_rows(tmp_path / "run" / "metrics.csv")
    assert all(np.isfinite(row["train_loss"]) for row in rows)
    assert rows[0]["lr"] == pytest.approx(1e-6)


def test_splits_other_classes(folder, tmp_path):
    (folder / "val" / "three").mkdir()
    (folder / "val" / "one" / "8.png").rename(folder / "val" / "three" / "8.png")
    changes = [f"data.root={folder}", "model=ppma_nano", "data.image_size=32"]
    with pytest.raises(ValueError, match=r"split 'val' has 4 and the training data 3: 1 unexpected \(three\)"):
        train("folder_finetune", tmp_path / "run", assignments=changes)


def test_train_memorises_few_images(tmp_path):
    changes = (
        *("epochs=null", "steps=12", "batch_size=10", "eval_steps=12", "log_steps=1"),
        *("data.train_fraction=0.008", "data.test_split=null", "augment.scale=[1,1]", "augment.ratio=[1,1]"),
        *("ema=null", "label_smoothing=0", "model_args.drop_path_rate=0"),
        *("schedule.name=constant", "schedule.warmup_epochs=0"),
    )
    train("digits_nano", tmp_path, assignments=changes)
    losses = [row["train_loss"] for row in read_rows(tmp_path / "metrics.csv")]
    assert losses[0] > 1.5
    assert losses[-1] < 0.25


def test_train_deterministic_files(tmp_path):
    for name in ("a", "b"):
        train("digits_nano", tmp_path / name, assignments=[*SHORT, "data.train_fraction=0.02"])
    for name in ("best.safetensors", "last.safetensors", "config.yaml"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name
    timed = ("seconds", "samples_per_second", "val_per_second", "last")
    first, second = (json.loads((tmp_path / name / "summary.json").read_text()) for name in ("a", "b"))
    assert {k: v for k, v in first.items() if k not in timed} == {k: v for k, v in second.items() if k not in timed}


@pytest.mark.parametrize("command", ["train", "ablate"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"- 1", "expected a mapping of keys to values, got [1]"),
        (b"", "got an empty file"),
        (b"\x89PNG", "expected text in UTF-8"),
        (b"task: [1]", "task: expected one of classification, detection, regions, segmentation, got [1]"),
        (b"lr: 1\nlr: 2", "duplicate key 'lr' (line 2, column 1)"),
        ("schlüssel: 1".encode(), "schlüssel: unknown key"),
    ],
    ids=["list", "empty", "binary", "task", "twice", "unicode"],
)
def test_train_command_invalid_recipe(tmp_path, capsys, command, content, message):
    path = tmp_path / "run.yaml"
    path.write_bytes(content)
    assert main([command, str(path), "--out", str(tmp_path / "out")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"ppma {command}: {path}: ")
    assert message in line


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("epochs=.inf", "epochs: expected a finite number, got inf"),
        ("data.image_size=1000000", "expected images resized to at most 4096 pixels, got 1000000.0"),
        ("data.crop_pct=1e-9", "expected images resized to at most 4096 pixels, got 3"),
        ("augment.auto_augment=foo", "augment: expected settings that timm accepts: Unknown AA policy foo"),
        ("augment.scale=[2,3]", "augment.scale: expected fractions of the image's area, at most 1, got (2.0, 3.0)"),
        ("augment.mixup=-1", "augment.mixup: expected 0 or more, got -1.0"),
        ("optimizer.name=adahessian", "optimizer.name: expected a first-order optimizer"),
        ("optimizer.name=fusedadam", "optimizer: fusedadam is not available: "),
        ("model_args=3", "model_args: expected a mapping, got 3"),
        ("model.depths=3", "model: expected text, got {'depths': 3}"),
        ("lr=", "lr: expected a number, got None"),
    ],
)
def test_train_command_invalid_settings(tmp_path, capsys, setting, message):
    assert main(["train", "digits_nano", "--out", str(tmp_path / "out"), "--set", setting]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_train_command_resume_another_model(digits_run, capsys):
    command = ["train", "digits_nano", "--out", str(digits_run), "--resume", "auto", *settings(*SHORT)]
    assert main([*command, "model_args.mask=none"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "expected a checkpoint of ppma_nano {'mask': 'none'}, got one of ppma_nano {}: 16 weights unexpected" in line
    assert main([*command, "steps=2"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "steps: expected at least the checkpoint's 3 steps, got 2" in line


def test_eval_unused_settings(digits_run, capsys):
    checkpoint = str(digits_run / "best.safetensors")
    assert main(["eval", checkpoint, "--data", "digits", "--set", "lr=1"]) == 2
    assert "--set: expected a recipe to change as --data, got 'digits'" in capsys.readouterr().err
    assert main(["eval", checkpoint, "--data", "digits", "--batch-size", "0"]) == 2
    assert "batch_size: expected at least 1, got 0" in capsys.readouterr().err


def test_demo_writes_files(tmp_path, capsys):
    out = tmp_path / "demo"
    changes = settings("epochs=null", "steps=1", "batch_size=8")
    assert main(["demo", "--out", str(out), *changes]) == 0
    shown = capsys.readouterr()
    assert "The V2H path from key" in shown.err
    assert "Try next" in shown.out
    for name in ("curves.png", "confusion.png", "inside.png", "photograph.png"):
        with Image.open(out / name) as image:
            assert min(image.size) > 300
    assert (out / "report.md").read_text().startswith("# Demonstration")
    assert {"test_top1", "seconds"} <= json.loads((out / "summary.json").read_text()).keys()
    assert main(["demo", "--out", str(out), *changes]) == 0  # it may be run again
    (tmp_path / "precious").write_text("kept")
    assert main(["demo", "--out", str(tmp_path)]) == 2
    assert (tmp_path / "precious").read_text() == "kept"


@pytest.mark.slow
def test_demo_accuracy(tmp_path):
    torch.set_num_threads(2)
    assert main(["demo", "--out", str(tmp_path / "demo")]) == 0
    summary = json.loads((tmp_path / "demo" / "summary.json").read_text())
    assert summary["test_count"] == 359
    assert summary["test_top1"] >= 97


@pytest.mark.slow
def test_finetune_120_images_with_ema(tmp_path):
    """60 steps with a decay of 0.99: without a warm-up the average is the random start, right by chance (33 %)."""
    source = digits("train")
    labels = np.array(source.labels())
    for digit in range(3):
        for number, index in enumerate(np.flatnonzero(labels == digit)[:60]):
            place = tmp_path / "images" / ("train" if number < 40 else "val") / str(digit)
            place.mkdir(parents=True, exist_ok=True)
            source[index][0].save(place / f"{number}.png")
    changes = (
        *(f"data.root={tmp_path}/images", "model=ppma_nano", "data.image_size=32", "data.crop_pct=1.0", "workers=0"),
        *("lr=1e-3", "augment.scale=[0.7,1.0]", "eval_epochs=20"),
    )
    accuracy = [
        train("folder_finetune", tmp_path / name, assignments=[*changes, *ema])["val_top1"]
        for name, ema in (("ema", ()), ("raw", ("ema=null",)))
    ]
    assert min(accuracy) > 90
    assert abs(accuracy[0] - accuracy[1]) < 5


@pytest.mark.slow
def test_train_command_torchrun(tmp_path):
    summary = summary_under_torchrun("digits_nano", tmp_path, SHORT)
    assert (summary["processes"], summary["val_count"]) == (2, 180)
