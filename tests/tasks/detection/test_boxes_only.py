"""Faster R-CNN on data without outlines, and test splits of detection."""

import json
import shutil

import pytest
import torch
from short_run import SHORT_DENSE, SMALL_DETECTOR, settings

from ppma.data.coco import CocoDataConfig, CocoInstances
from ppma.data.coco_transforms import CocoAugmentConfig, train_transform
from ppma.tasks.detection import DetectorConfig, mask_rcnn
from ppma.tasks.detection.weights import load_detector
from ppma_cli import main

TINY = {"channels": 8, "box_channels": 16, "mask_convolutions": 1, "short_side": 64, "long_side": 96}


@pytest.fixture(scope="module")
def boxes(scenes, tmp_path_factory):
    """Scenes whose annotations have no outlines; the validation images are also a test split."""
    root = tmp_path_factory.mktemp("boxes") / "scenes"
    shutil.copytree(scenes, root)
    for path in (root / "annotations").glob("instances_*.json"):
        contents = json.loads(path.read_text())
        for annotation in contents["annotations"]:
            del annotation["segmentation"]
        path.write_text(json.dumps(contents))
    shutil.copytree(root / "val2017", root / "test2017")
    shutil.copy(root / "annotations" / "instances_val2017.json", root / "annotations" / "instances_test2017.json")
    return root


def test_boxes_only_data(boxes, scenes):
    data = CocoDataConfig(root=str(boxes))
    transform = train_transform(CocoAugmentConfig(short_sides=(64,)))
    with pytest.warns(UserWarning, match="no outlines: the detector predicts boxes only"):
        source = CocoInstances(data, "train2017", transform, masks=None)
    _, target = source[0]
    assert set(target) == {"boxes", "labels"}
    assert len(target["boxes"]) == len(target["labels"]) > 0
    assert all("segmentation" not in one for one in CocoInstances(data, "val2017", masks=False)[0][1]["annotations"])
    assert CocoInstances(CocoDataConfig(root=str(scenes)), "train2017", transform, masks=None).masks
    with pytest.raises(ValueError, match=r"detector\.masks=false"):
        CocoInstances(data, "train2017", transform)


@pytest.mark.parametrize("detector", [DetectorConfig(**TINY), DetectorConfig.mmdetection(**TINY)], ids=["tv", "mm"])
def test_faster_rcnn_losses_and_results(detector):
    torch.manual_seed(0)
    model = mask_rcnn("ppma_nano", 3, detector=DetectorConfig(**{**vars(detector), "masks": False}))
    assert not [name for name, _ in model.named_parameters() if "mask" in name]
    target = {"boxes": torch.tensor([[4.0, 4.0, 40.0, 30.0]]), "labels": torch.tensor([1])}
    losses = model.train()([torch.rand(3, 64, 64), torch.rand(3, 64, 80)], [target, target])
    assert set(losses) == {"loss_classifier", "loss_box_reg", "loss_objectness", "loss_rpn_box_reg"}
    sum(losses.values()).backward()
    (found,) = model.eval()([torch.rand(3, 64, 64)])
    assert set(found) == {"boxes", "labels", "scores"}


def test_padding_anchors_depend_on_image_sizes():
    """The sizes come from the images, so losses are the same with and without masks in the targets."""
    detector = DetectorConfig.mmdetection(**TINY)
    torch.manual_seed(0)
    model = mask_rcnn("ppma_nano", 3, detector=detector).train()
    images = [torch.rand(3, 64, 64), torch.rand(3, 64, 96)]
    target = {"boxes": torch.tensor([[4.0, 4.0, 40.0, 30.0]]), "labels": torch.tensor([1])}
    scaled, targets = model.transform(images, [target, target])
    features = model.backbone(scaled.tensors)
    model.rpn(scaled, features, targets)
    anchors = model.rpn.anchor_generator(scaled, list(features.values()))
    labels, _ = model.rpn.assign_targets_to_anchors(anchors, targets)
    centres = [(of_image[:, 0] + of_image[:, 2]) / 2 for of_image in anchors]
    assert (labels[0][centres[0] >= 64] == -1).all()
    assert (labels[1][(centres[1] >= 64) & (centres[1] < 95)] >= 0).any()


def test_boxes_only_commands(boxes, tmp_path, capsys):
    changes = (*SHORT_DENSE, *SMALL_DETECTOR, "steps=1", "eval_steps=1", f"data.root={boxes}", "log=[csv]")
    changes += ("data.test_split=test2017",)
    run = tmp_path / "run"
    assert main(["train", "scenes_maskrcnn_nano", "--out", str(run), *settings(*changes)]) == 0
    shown = capsys.readouterr()
    assert "predicts boxes only" in shown.err
    summary = json.loads((run / "summary.json").read_text())
    assert "test_box_AP" in summary
    assert "val_box_AP" in summary
    assert not [key for key in summary if "mask" in key]
    path = run / "best.safetensors"
    assert load_detector(path)[1].detector.masks is False
    assert main(["eval", str(path), "--data", str(boxes)]) == 0
    assert "mask_AP" not in capsys.readouterr().out
    picture = next((boxes / "val2017").iterdir())
    out = tmp_path / "out"
    assert main(["predict", str(path), str(picture), "--threshold", "0", "--out", str(out)]) == 0
    results = json.loads((out / "predictions.json").read_text())
    assert all(set(one) == {"image_id", "category_id", "score", "bbox"} for one in results)
