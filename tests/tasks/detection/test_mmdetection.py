"""Mask R-CNN from files of MMDetection against its heads written out in `mmdetection_reference`."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from mmdetection_reference import Reference, prepare, random_heads, scaled_size
from PIL import Image
from short_run import load_transcription

import ppma
from ppma.models import CheckpointError
from ppma.tasks.dense.backbone import features
from ppma.tasks.detection import DetectorConfig, PolylineMaskRCNN
from ppma.tasks.detection.task import Detection
from ppma.tasks.detection.weights import export_mmdetection, load_detector, save_detector
from ppma_cli import main

transcription = load_transcription()

DIMS = (16, 16, 32, 32)
TOY = dataclasses.replace(transcription.TINY, depths=(1, 1, 1, 1), dims=DIMS, heads=(2, 2, 2, 2))
KINDS = ("criss_cross", "criss_cross", "full", "full")
CLASSES = ("person", "bicycle", "car", "dog")
# Odd sizes: no interpolated value lies halfway between two 8-bit values, where rounding errors would decide.
SIZE, SHORT, LONG = (37, 51), 63, 90


def state_dict(architecture=TOY):
    backbone = transcription.random_weights(architecture, task="detection")
    return {f"backbone.{name}": tensor for name, tensor in backbone.items()} | random_heads(
        architecture.dims, len(CLASSES)
    )


@pytest.fixture
def state():
    return state_dict()


def save(path, state, **meta):
    torch.save({"state_dict": state, "meta": {"epoch": 12, **meta}}, path)
    return path


@torch.no_grad()
def compare(path, state, **limits):
    """The loaded detector against the reference, in float64, with other limits than the file's detector has."""
    loaded, config, _ = load_detector(path, kinds=KINDS)
    detector = dataclasses.replace(config.detector, short_side=SHORT, long_side=LONG, **limits)
    model = PolylineMaskRCNN(loaded.backbone.body, len(CLASSES) + 1, detector)
    model.load_state_dict(loaded.state_dict())
    model.double().eval()
    image = np.random.default_rng(0).integers(0, 256, (*SIZE, 3), dtype=np.uint8)
    (found,) = model([torch.from_numpy(image).permute(2, 0, 1).double() / 255])
    heads = {name: tensor.double() for name, tensor in state.items() if not name.startswith("backbone.")}
    shape = scaled_size(*SIZE, SHORT, LONG)
    stages = features(model.backbone.body, prepare(image, shape))
    boxes, scores, labels, masks = Reference(heads, len(CLASSES), **limits)(stages, shape, SIZE)
    assert len(boxes) >= 10
    assert found["labels"].tolist() == [label + 1 for label in labels]
    # Sums of at most 588 products in float64, through a dozen layers: far below 1e-10 of their size.
    torch.testing.assert_close(found["scores"], torch.tensor(scores, dtype=torch.float64), rtol=0, atol=1e-10)
    torch.testing.assert_close(found["boxes"], torch.tensor(boxes, dtype=torch.float64), rtol=0, atol=1e-8)
    assert torch.equal(found["masks"][:, 0] >= 0.5, torch.stack(masks))
    assert 0 < torch.stack(masks).double().mean() < 1


def test_detections_match_reference(state, tmp_path):
    compare(save(tmp_path / "a.pth", state), state, candidates=60, proposals=40, detections=12)


@pytest.mark.slow
def test_detections_match_reference_default_limits(state, tmp_path):
    compare(save(tmp_path / "a.pth", state), state)


@torch.no_grad()
def test_probe_matches_reference(state, tmp_path):
    """The outputs of all heads for one region, of which `ppma weights --verify` prints a checksum."""
    path = save(tmp_path / "a.pth", state)
    model, config, classes = load_detector(path, kinds=KINDS)
    save_detector(model, tmp_path / "ours.safetensors", config, classes)
    image = torch.randn(1, 3, 64, 96, dtype=torch.float64)
    found = Detection.probe(ppma.open_checkpoint(tmp_path / "ours.safetensors"), image)
    reference = Reference({name: tensor.double() for name, tensor in state.items()}, len(CLASSES))
    levels = reference.pyramid(features(model.double().backbone.body, image))
    hidden = [reference.conv("rpn_head.rpn_conv", level).relu() for level in levels]
    parts = [reference.conv(f"rpn_head.rpn_{name}", x).flatten() for name in ("cls", "reg") for x in hidden]
    region = (0.0, 0.0, 96.0, 64.0)
    pooled = reference.pool(levels, region, 7).flatten()
    for index in (0, 1):
        pooled = reference.linear(f"roi_head.bbox_head.shared_fcs.{index}", pooled).relu()
    parts.append(reference.linear("roi_head.bbox_head.fc_cls", pooled).roll(1))
    parts += [torch.zeros(4), reference.linear("roi_head.bbox_head.fc_reg", pooled), torch.zeros(28 * 28)]
    parts += [reference.mask(levels, region, label).logit().flatten() for label in range(len(CLASSES))]
    torch.testing.assert_close(found[0], torch.cat(parts), rtol=1e-7, atol=1e-7)  # the logit of a sigmoid


def test_load_config_and_class_names(state, tmp_path):
    path = save(tmp_path / "a.pth", state, CLASSES=CLASSES)
    assert ppma.open_checkpoint(path).task == "detection"
    model, config, classes = load_detector(path, kinds=KINDS)
    assert config.detector == DetectorConfig.mmdetection(channels=12, box_channels=16, mask_convolutions=2)
    assert (classes, model.training) == (CLASSES, False)
    assert model.backbone.body.config.formulation == "release"
    predictor = model.roi_heads.box_predictor
    assert torch.equal(predictor.cls_score.weight[0], state["roi_head.bbox_head.fc_cls.weight"][-1])
    assert torch.equal(predictor.bbox_pred.weight, state["roi_head.bbox_head.fc_reg.weight"])
    assert model.roi_heads.mask_predictor.mask_fcn_logits.out_channels == len(CLASSES)
    assert load_detector(save(tmp_path / "b.pth", state), kinds=KINDS)[2] == ("0", "1", "2", "3")


@pytest.mark.parametrize("mask", ["2d", "rmt"])
def test_convert_round_trip(tmp_path, capsys, mask):
    architecture = dataclasses.replace(TOY, mask=mask, scaled=(False, False, True, True))
    state = state_dict(architecture)
    source, ours, target = (str(tmp_path / name) for name in ("a.pth", "ours.safetensors", "back.pth"))
    save(source, state, CLASSES=CLASSES)
    assert main(["convert", source, ours, "--kinds", *KINDS]) == 0
    assert "ours.safetensors: Mask R-CNN, 4 classes" in capsys.readouterr().out
    (first, config, _), (second, stored, names) = load_detector(source, kinds=KINDS), load_detector(ours)
    assert (stored, names) == (config, CLASSES)
    assert all(torch.equal(tensor, second.state_dict()[name]) for name, tensor in first.state_dict().items())
    assert main(["convert", ours, target]) == 0
    contents = torch.load(target, weights_only=True)
    assert contents["meta"]["CLASSES"] == CLASSES
    restored = contents["state_dict"]
    assert restored.keys() == state.keys()
    for name, tensor in state.items():
        if ".Relpos." in name:  # constants, which our models compute in another order
            torch.testing.assert_close(restored[name], tensor, rtol=4 * torch.finfo(torch.float32).eps, atol=0)
        else:
            assert torch.equal(restored[name], tensor), name


def test_export_other_detectors_refused(tmp_path):
    with torch.device("meta"):
        model = ppma.tasks.detection.mask_rcnn("ppma_nano")
    with pytest.raises(ValueError, match="expected background_outputs=False and formulation='release'"):
        export_mmdetection(model, tmp_path / "x.pth", CLASSES)


def test_convert_other_detector_backbone_only(state, tmp_path, capsys):
    del state["roi_head.bbox_head.fc_cls.weight"]
    path = save(tmp_path / "a.pth", state)
    assert main(["convert", str(path), str(tmp_path / "b.safetensors"), "--kinds", *KINDS]) == 0
    assert capsys.readouterr().out.startswith("converted: the backbone of a detection model, without its heads\n")


def test_predict_and_eval_class_names(scenes, tmp_path, capsys):
    digits = tuple("0123456789")
    state = {name: tensor for name, tensor in state_dict().items() if name.startswith("backbone.")}
    state |= random_heads(DIMS, len(digits))
    path = save(tmp_path / "a.pth", state, CLASSES=digits)
    model, config, classes = load_detector(path, kinds=KINDS)
    detector = dataclasses.replace(config.detector, short_side=SHORT, long_side=LONG, detections=5)
    save_detector(model, tmp_path / "small.safetensors", dataclasses.replace(config, detector=detector), classes)
    picture, out = scenes / "val2017" / "000001.jpg", tmp_path / "out"
    command = ["predict", str(tmp_path / "small.safetensors"), str(picture), "--out", str(out), "--json"]
    assert main([*command, "--threshold", "0"]) == 0
    (prediction,) = json.loads(capsys.readouterr().out)
    assert {one["class"] for one in prediction["instances"]} <= set(digits)
    assert Image.open(prediction["overlay"]).size == (512, 512)
    assert main(["eval", str(tmp_path / "small.safetensors"), "--data", str(scenes), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["count"] == 3
    changed = ["eval", str(tmp_path / "small.safetensors"), "--data", str(scenes), "--set", "detector.detections=3"]
    assert main(changed) == 2
    assert "detector.detections=3: expected changes of data only" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("rpn_head.rpn_cls.bias"), r"missing: rpn\.head\.cls_logits\.bias"),
        (lambda s: s.pop("roi_head.bbox_head.fc_cls.weight"), r"found no weight 'roi_head\.bbox_head\.fc_cls\.weight'"),
        (lambda s: s.pop("neck.fpn_convs.0.conv.weight"), r"found no weight 'neck\.fpn_convs\.0\.conv\.weight'"),
        (lambda s: s.update({"roi_head.mask_iou_head.x": torch.zeros(1)}), r"unexpected: roi_head\.mask_iou_head\.x"),
        (
            lambda s: s.update({"roi_head.bbox_head.fc_reg.weight": torch.zeros(4, 16)}),
            r"mis-shaped: .*bbox_pred\.weight \(4, 16\) instead of \(16, 16\)",
        ),
        (lambda s: [s.pop(name) for name in list(s) if "mask_head" in name], "mask_convolutions: expected 1 to 1024"),
    ],
)
def test_load_other_layouts_refused(state, tmp_path, change, message):
    change(state)
    with pytest.raises(CheckpointError, match=message):
        load_detector(save(tmp_path / "a.pth", state), kinds=KINDS)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (CLASSES[:3], "expected 4 names in meta.CLASSES, got 3"),
        (("a", "a", "b", "c"), "meta.CLASSES: expected different names"),
        (7, "meta.CLASSES: expected different names"),
    ],
)
def test_load_wrong_class_names_refused(state, tmp_path, names, message):
    with pytest.raises(CheckpointError, match=message):
        load_detector(save(tmp_path / "a.pth", state, CLASSES=names), kinds=KINDS)


@pytest.mark.slow
def test_predict_published_shapes(scenes, tmp_path, capsys):
    """A file with the shapes of the authors' Mask R-CNN of PPMA-T, by the command, without any option."""
    backbone = transcription.random_weights(transcription.TINY, task="detection")
    state = {f"backbone.{name}": tensor for name, tensor in backbone.items()}
    state |= random_heads(transcription.TINY.dims, 80, channels=256, box_channels=1024, convolutions=4)
    path = save(tmp_path / "epoch_12.pth", state, CLASSES=tuple(f"class {index}" for index in range(80)))
    picture = scenes / "val2017" / "000001.jpg"
    assert main(["predict", str(path), str(picture), "--out", str(tmp_path / "out"), "--json"]) == 0
    (prediction,) = json.loads(capsys.readouterr().out)
    assert all(one["class"].startswith("class ") for one in prediction["instances"])
    assert sum(parameter.numel() for parameter in load_detector(path)[0].parameters()) / 1e6 == pytest.approx(
        32.94, abs=0.01
    )
