"""Detection on scenes by the command line, and the metrics on hand-computed cases."""

import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from short_run import (
    SHORT_DENSE,
    SMALL_DETECTOR,
    assert_resume_gives_the_same_bits,
    one_thread,
    settings,
    summary_on_scenes,
    summary_under_torchrun,
)

import ppma
from ppma.data.coco import CocoDataConfig, CocoInstances
from ppma.data.coco_file import outline_mask
from ppma.engine.logging import read_rows
from ppma.tasks.detection.metrics import CocoMetrics
from ppma.tasks.detection.weights import load_detector
from ppma.tasks.run import train
from ppma_cli import main

RECIPE = "scenes_maskrcnn_nano"
QUICK = (*SHORT_DENSE, *SMALL_DETECTOR, "augment.short_sides=[64]", "detector.short_side=64", "checkpoint_steps=2")


@pytest.fixture(scope="session")
def run(scenes, tmp_path_factory):
    """The folder of a finished short run."""
    out = tmp_path_factory.mktemp("runs") / "detection"
    with one_thread():
        assert main(["train", RECIPE, "--out", str(out), *settings(*QUICK, f"data.root={scenes}")]) == 0
    return out


def perfect(truth):
    """Detections equal to the ground truth, in the format of the model."""
    annotations = [one for one in truth["annotations"] if not one["iscrowd"]]
    boxes = torch.tensor([one["bbox"] for one in annotations], dtype=torch.float32).reshape(-1, 4)
    boxes[:, 2:] += boxes[:, :2]
    masks = torch.from_numpy(np.stack([one["mask"] for one in annotations])) if annotations else torch.zeros(0, 64, 64)
    return {
        "boxes": boxes,
        "labels": torch.tensor([truth["category_ids"].index(one["category_id"]) + 1 for one in annotations]),
        "scores": torch.full((len(annotations),), 0.9),
        "masks": masks[:, None].float(),
    }


@pytest.fixture
def truths(scenes):
    held_out = CocoInstances(CocoDataConfig(root=str(scenes)), "val2017")
    samples = [held_out[index] for index in range(len(held_out))]
    for _, truth in samples:
        for one in truth["annotations"]:
            one["mask"] = outline_mask(one["segmentation"], 64, 64)
    return sorted(samples, key=lambda sample: -len(sample[1]["annotations"]))


def measure(samples, found):
    metrics = CocoMetrics("0123456789")
    for (image, truth), detections in zip(samples, found, strict=True):
        metrics.update(lambda images, answer=detections: [answer], ([image], [truth]))
    return metrics.compute([metrics.state(), CocoMetrics("0123456789").state()])


def test_metrics_perfect_detections(truths):
    measured = measure(truths, [perfect(truth) for _, truth in truths])
    for name in ("box_AP", "box_AP50", "box_AP75", "mask_AP", "mask_AP50", "box_AP_small", "mask_AP_small"):
        assert measured[name] == pytest.approx(100)
    assert "box_AP_large" not in measured  # nothing in 64 x 64 pixels is


def test_metrics_details(truths):
    """Classes with objects are perfect, one whose objects are missed is 0, those without objects have no values."""
    missed = truths[0][1]["annotations"][0]["category_id"]
    metrics = CocoMetrics("0123456789")
    for image, truth in truths:
        kept = truth | {"annotations": [one for one in truth["annotations"] if one["category_id"] != missed]}
        metrics.update(lambda images, kept=kept: [perfect(kept)], ([image], [truth]))
    states = [CocoMetrics("0123456789").state(), metrics.state()]
    measured = metrics.compute(states)
    details = metrics.details(states)
    annotations = [one for _, truth in truths for one in truth["annotations"]]
    ids = truths[0][1]["category_ids"]
    assert len(details.predictions) == sum(one["category_id"] != missed for one in annotations)
    for category, row in zip(ids, details.classes, strict=True):
        count = sum(one["category_id"] == category for one in annotations)
        expected = None if count == 0 else pytest.approx(0 if category == missed else 100)
        assert row["count"] == count
        assert [row[f"{kind}_{name}"] for kind in ("box", "mask") for name in ("AP", "AP50", "AP75")] == [expected] * 6
        assert row["box_AP_large"] is None
    for name in ("box_AP", "mask_AP75", "box_AP_small"):
        values = [row[name] for row in details.classes if row[name] is not None]
        assert sum(values) / len(values) == pytest.approx(measured[name])


def test_eval_files(run, scenes, tmp_path, capsys):
    """The results load in pycocotools against the data set's own annotations."""
    command = ["eval", str(run / "best.safetensors"), "--data", str(scenes), "--out", str(tmp_path)]
    assert main(command) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("box_AP ")
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.json", "classes.csv", "predictions.json"}
    truth = COCO(scenes / "annotations" / "instances_val2017.json")
    results = truth.loadRes(str(tmp_path / "predictions.json"))
    evaluation = COCOeval(truth, results, "segm")
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    written = json.loads((tmp_path / "metrics.json").read_text())
    assert 100 * evaluation.stats[0] == pytest.approx(written["metrics"]["mask_AP"])
    assert [row["class"] for row in written["classes"]] == list("0123456789")


def test_metrics_missing_detections(truths):
    nothing = perfect({"annotations": [], "category_ids": ()})
    assert measure(truths, [nothing] * len(truths))["box_AP"] == 0
    (image, truth), *_ = truths
    category = truth["category_ids"][0]
    two = [one | {"category_id": category} for one in truth["annotations"][:2]]
    assert len(two) == 2
    sample = (image, truth | {"annotations": two})
    found = {name: values[:1] for name, values in perfect(sample[1]).items()}
    # Recall 0.5 at precision 1: 51 of the 101 recall thresholds are reached.
    assert measure([sample], [found])["box_AP50"] == pytest.approx(100 * 51 / 101)


def test_metrics_crowd_ignored(truths):
    (image, truth), *_ = truths
    first, second, *_ = (one | {"category_id": truth["category_ids"][0]} for one in truth["annotations"])
    found = perfect(truth | {"annotations": [first, second]})
    found["scores"] = torch.tensor([0.5, 0.9])  # the one that may be wrong comes first
    crowd = truth | {"annotations": [first, second | {"iscrowd": 1}]}
    missing = truth | {"annotations": [first]}
    assert measure([(image, crowd)], [found])["box_AP"] == pytest.approx(100)
    assert measure([(image, missing)], [found])["box_AP"] == pytest.approx(50)


@pytest.mark.parametrize("ids", [(0, 1), (7, 7), (None, None)])
def test_metrics_annotation_ids_ignored(truths, ids):
    """pycocotools takes an instance with the id 0 for one that was not found."""
    (image, truth), *_ = truths
    numbered = [one | {"id": identity} for one, identity in zip(truth["annotations"], ids, strict=False)]
    truth = truth | {"annotations": numbered}
    assert measure([(image, truth)], [perfect(truth)])["box_AP"] == pytest.approx(100)


def test_load_detector_and_backbone(run, scenes):
    model, config, classes = load_detector(run / "best.safetensors")
    assert classes == tuple("0123456789")
    assert config.data.root == str(scenes)
    assert not model.training
    backbone = ppma.load_checkpoint(run / "best.safetensors")
    assert backbone.config.feature_norms == (0, 1, 2, 3)
    for name, tensor in backbone.state_dict().items():
        assert torch.equal(tensor, model.backbone.body.state_dict()[name])


def test_eval_matches_training(run, scenes, capsys):
    recorded = read_rows(run / "metrics.csv")[-1]
    checkpoint = str(run / "best.safetensors")
    assert main(["eval", checkpoint, "--data", str(scenes), "--json", "--batch-size", "2"]) == 0
    measured = json.loads(capsys.readouterr().out)
    assert measured["count"] == 3
    for name in ("box_AP", "box_AP50", "mask_AP"):
        assert measured[name] == pytest.approx(recorded[f"val_{name}"], abs=1e-3)
    assert main(["eval", checkpoint, "--data", str(run / "config.yaml"), "--split", "train2017"]) == 0
    assert "box_AP" in capsys.readouterr().out
    assert main(["eval", checkpoint, "--data", "digits_nano"]) == 2
    assert "expected a detection recipe for this checkpoint, got classification" in capsys.readouterr().err


def test_predict_files(run, scenes, tmp_path, capsys):
    """The results load in pycocotools, and their masks and boxes are those of the printed instances."""
    folder, out = scenes / "val2017", tmp_path / "out"
    command = ["predict", str(run / "best.safetensors"), str(folder), "--out", str(out), "--threshold", "0"]
    assert main([*command, "--json"]) == 0
    predictions = json.loads(capsys.readouterr().out)
    assert set(predictions[0]["instances"][0]) == {"class", "score", "box", "pixels"}
    images = COCO(out / "images.json")
    results = images.loadRes(str(out / "predictions.json"))
    assert [images.imgs[number]["file_name"] for number in (1, 2, 3)] == [one["image"] for one in predictions]
    for number, prediction in enumerate(predictions, start=1):
        found = results.loadAnns(results.getAnnIds(number))
        assert [one["score"] for one in found] == [one["score"] for one in prediction["instances"]]
        assert [images.cats[one["category_id"]]["name"] for one in found] == [
            one["class"] for one in prediction["instances"]
        ]
        assert [results.annToMask(one).sum() for one in found] == [one["pixels"] for one in prediction["instances"]]
        boxes = np.array([one["bbox"] for one in found])
        boxes[:, 2:] += boxes[:, :2]
        assert np.allclose(boxes, [one["box"] for one in prediction["instances"]])
        with Image.open(prediction["overlay"]) as drawn:
            assert drawn.size == (512, 512)  # eight times 64
    assert len(list(out.iterdir())) == len(predictions) + 2


def test_predict_nothing_found(run, scenes, tmp_path, capsys):
    picture, out = scenes / "val2017" / "000001.jpg", tmp_path / "out"
    command = ["predict", str(run / "best.safetensors"), str(picture), "--out", str(out), "--threshold", "1"]
    assert main(command) == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["  nothing found", f"1 predicted, results in {out}"]
    assert json.loads((out / "predictions.json").read_text()) == []


def test_predict_annotation_ids(run, scenes, tmp_path, capsys):
    """Images are found by the end of their path and categories by name; an image without an entry is reported."""
    contents = json.loads((scenes / "annotations" / "instances_val2017.json").read_text())
    for image in contents["images"]:
        image["id"] += 100
    for category in contents["categories"]:
        category["id"] += 50
    del contents["images"][2]
    contents["annotations"] = []
    (tmp_path / "ids.json").write_text(json.dumps(contents))
    command = ["predict", str(run / "best.safetensors"), str(scenes / "val2017"), "--out", str(tmp_path / "out")]
    command += ["--threshold", "0", "--annotations"]
    assert main([*command, str(tmp_path / "ids.json")]) == 2
    assert f"000003.jpg: not an image of {tmp_path}/ids.json" in capsys.readouterr().err
    results = COCO(tmp_path / "ids.json").loadRes(str(tmp_path / "out" / "predictions.json")).dataset["annotations"]
    assert {one["image_id"] for one in results} == {image["id"] for image in contents["images"]}
    assert {one["category_id"] for one in results} <= {category["id"] for category in contents["categories"]}
    for category in contents["categories"]:
        category["name"] += "?"
    (tmp_path / "other.json").write_text(json.dumps(contents))
    assert main([*command, str(tmp_path / "other.json"), "--overwrite"]) == 2
    assert "annotations: expected the category '0' of the model" in capsys.readouterr().err


def test_predict_threshold(run, scenes, capsys):
    """A threshold only filters the detections."""
    found = {}
    for threshold in (0.0, 0.06):
        command = ["predict", str(run / "best.safetensors"), str(scenes / "val2017" / "000001.jpg"), "--json"]
        assert main([*command, "--threshold", str(threshold)]) == 0
        found[threshold] = json.loads(capsys.readouterr().out)[0]["instances"]
    scores = sorted(one["score"] for one in found[0.0])
    assert scores[0] < 0.06 < scores[-1]
    assert found[0.06] == [one for one in found[0.0] if one["score"] >= 0.06]


def test_predict_bad_images_and_same_names(run, scenes, tmp_path, capsys):
    checkpoint = str(run / "best.safetensors")
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        shutil.copy(scenes / "val2017" / "000001.jpg", tmp_path / folder / "1.jpg")
    (tmp_path / "b" / "0.jpg").touch()
    folders = [str(tmp_path / "a"), str(tmp_path / "b")]
    assert main(["predict", checkpoint, *folders, "--out", str(tmp_path / "out"), "--json"]) == 2
    printed = capsys.readouterr()
    assert printed.err.splitlines() == [
        f"ppma predict: {tmp_path}/b/0.jpg: not an image, or damaged at its beginning",
        "ppma predict: 1 failed, 2 predicted",
    ]
    drawn = [one["overlay"] for one in json.loads(printed.out)]
    assert drawn == [str(tmp_path / "out" / name) for name in ("1_overlay.png", "1_2_overlay.png")]
    assert all((tmp_path / "out" / name).is_file() for name in drawn)


def test_predict_invalid_output(run, scenes, tmp_path, capsys):
    checkpoint, picture = str(run / "best.safetensors"), tmp_path / "1.jpg"
    shutil.copy(scenes / "val2017" / "000001.jpg", picture)
    content = picture.read_bytes()
    (tmp_path / "file").touch()
    for out, said in ((picture, "out: expected a folder"), (tmp_path / "file" / "x", "out: ")):
        assert main(["predict", checkpoint, str(picture), "--out", str(out)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert said in line
    assert picture.read_bytes() == content


def test_predict_extreme_sizes(run, tmp_path, capsys):
    sizes = ((1, 1), (1, 100), (100, 1), (1, 101))
    for width, height in sizes:
        Image.new("RGB", (width, height)).save(tmp_path / f"{width}x{height}.png")
    paths = [str(tmp_path / f"{width}x{height}.png") for width, height in sizes]
    assert main(["predict", str(run / "best.safetensors"), *paths, "--out", str(tmp_path / "out")]) == 2
    printed = capsys.readouterr()
    assert printed.out.endswith(f"3 predicted, results in {tmp_path}/out\n")
    assert printed.err.endswith("ppma predict: 1 failed, 3 predicted\n")
    assert "1x101.png: expected sides in a ratio of at most 100 to 1" in printed.err


def test_train_overfits_few_scenes(scenes, tmp_path):
    changes = (
        *(*QUICK, f"data.root={scenes}", "steps=10", "batch_size=8", "eval_steps=10", "ema=null", "lr=0.004"),
        *("schedule.name=constant", "detector.region_samples=64"),
    )
    train(RECIPE, tmp_path, assignments=changes)
    losses = [row["train_loss"] for row in read_rows(tmp_path / "metrics.csv")]
    assert len(losses) == 10
    assert losses[-1] < 0.55 * losses[0]


def test_resume_bitwise_identical(run, scenes, tmp_path):
    changes = (*QUICK, f"data.root={scenes}")
    assert_resume_gives_the_same_bits(RECIPE, run, tmp_path / "run", changes, load_detector)


def test_train_broken_images_bf16(scenes, tmp_path, capsys):
    root = tmp_path / "scenes"
    shutil.copytree(scenes, root)
    (root / "train2017" / "000003.jpg").write_bytes(b"broken")
    (root / "val2017" / "000002.jpg").unlink()
    command = ["train", RECIPE, "--out", str(tmp_path / "run")]
    command += settings(*QUICK, f"data.root={root}", "steps=2", "eval_steps=2", "batch_size=8", "amp=bf16")
    assert main(command) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["broken_samples"], summary["val_count"]) == (2, 2)
    shown = capsys.readouterr().err
    assert "train2017/000003.jpg" in shown
    assert "val2017/000002.jpg" in shown


def test_train_init_from_classifier(digits_run, scenes, tmp_path):
    changes = (*QUICK, f"data.root={scenes}", f"init={digits_run}/best.safetensors", "model_args={}", "lr=1e-9")
    train(RECIPE, tmp_path, assignments=(*changes, "steps=1", "eval_steps=1", "ema=null"))
    tuned, start = (ppma.load_checkpoint(path / "last.safetensors") for path in (tmp_path, digits_run))
    torch.testing.assert_close(tuned.stages[2].blocks[0].attn.qkv.weight, start.stages[2].blocks[0].attn.qkv.weight)
    assert tuned.config.stem_stride == 2  # the file's architecture, not the recipe's


def test_errors_missing_data_and_other_classes(run, scenes, tmp_path, capsys):
    assert main(["train", RECIPE, "--out", str(tmp_path / "a"), *settings("data.root=nowhere")]) == 2
    assert "expected annotations in nowhere/annotations/instances_train2017.json" in capsys.readouterr().err
    command = ["eval", str(run / "best.safetensors"), "--data", str(scenes), *settings("data.classes=['1','2']")]
    assert main(command) == 2
    assert "the data has 2 and the checkpoint 10" in capsys.readouterr().err


@pytest.mark.slow
def test_train_torchrun(scenes, tmp_path):
    summary = summary_under_torchrun(RECIPE, tmp_path, (*QUICK, f"data.root={scenes}"))
    assert (summary["processes"], summary["val_count"]) == (2, 3)


@pytest.mark.slow
def test_recipe_finds_digits(tmp_path):
    summary = summary_on_scenes(RECIPE, tmp_path)
    assert summary["val_count"] == 200
    assert summary["val_box_AP50"] >= 50
    assert summary["val_mask_AP50"] >= 50
