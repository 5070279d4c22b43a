"""`ppma export` writes what a checkpoint holds: the whole segmentation model, never its backbone unasked."""

import logging
import os
import re

import pytest
import torch

from ppma.data.coco import CocoDataConfig
from ppma.data.segmentation import SegmentationDataConfig
from ppma.models import BackboneConfig, PolylineBackbone
from ppma.models import export as exporting
from ppma.tasks.dense.weights import save_model
from ppma.tasks.detection.config import DetectionConfig, DetectorConfig
from ppma.tasks.detection.model import PolylineMaskRCNN
from ppma.tasks.segmentation.config import SegmentationConfig
from ppma.tasks.segmentation.model import DecoderConfig, MainScores, UPerNet
from ppma.tasks.segmentation.weights import load_segmenter
from ppma_cli import main

BACKBONE = BackboneConfig(
    depths=(1, 1, 1, 1),
    dims=(8, 8, 16, 16),
    heads=(2, 2, 2, 2),
    kinds=("criss_cross", "criss_cross", "full", "full"),
    ffn_ratios=(1.0, 1.0, 1.0, 1.0),
    stem_stride=2,
    feature_norms=(0, 1, 2, 3),
).without_head(4)
CLASSES = ("a", "b", "c")


@pytest.fixture(autouse=True)
def quiet_tracing(monkeypatch):
    """PyTorch's tracing logs every step where somebody listens, as pytest does; that would double its time."""
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "propagate", False)


@pytest.fixture(scope="module")
def segmenter(tmp_path_factory):
    torch.manual_seed(0)
    decoder = DecoderConfig(channels=8, auxiliary_channels=8, classifier_std=1.0)
    data = SegmentationDataConfig(root="", classes=CLASSES)
    config = SegmentationConfig(
        task="segmentation", model="ppma_nano", steps=1, batch_size=2, lr=1e-3, data=data, decoder=decoder
    )
    model = UPerNet(PolylineBackbone(BACKBONE), len(CLASSES), decoder)
    path = tmp_path_factory.mktemp("segmenter") / "best.safetensors"
    save_model(model, path, model.backbone, "backbone.", config, CLASSES)
    return path


@pytest.fixture(scope="module")
def detector(tmp_path_factory):
    options = DetectorConfig(channels=8, box_channels=8, mask_convolutions=1)
    config = DetectionConfig(
        task="detection",
        model="ppma_nano",
        steps=1,
        batch_size=2,
        lr=1e-3,
        data=CocoDataConfig(root=""),
        detector=options,
    )
    model = PolylineMaskRCNN(PolylineBackbone(BACKBONE), len(CLASSES) + 1, options)
    path = tmp_path_factory.mktemp("detector") / "best.safetensors"
    save_model(model, path, model.backbone.body, "backbone.body.", config, CLASSES)
    return path


def run(*words):
    return main(["export", *map(str, words)])


def differences(capsys):
    lines = capsys.readouterr().out.splitlines()[1:]
    return {line.split(":")[0].strip(): float(line.split()[5]) for line in lines}


@torch.no_grad()
def test_export_segmenter_program_at_two_sizes(segmenter, tmp_path, capsys):
    target = tmp_path / "model.pt2"
    assert run(segmenter, target, "--size", 32, 48) == 0
    found = differences(capsys)
    assert set(found) == {"32x48", "64x65"}
    assert max(found.values()) < 1e-5
    program = torch.export.load(target).module()
    model, _, classes = load_segmenter(segmenter)
    image = torch.randn(3, 3, 40, 33, generator=torch.Generator().manual_seed(0))
    scores, eager = program(image), model(image).main
    assert scores.shape == (3, len(classes), 40, 33)
    # The graph's operations are others than the eager ones: both are compared with float64.
    exact = model.double()(image.double()).main
    assert (scores - exact).abs().max() <= 4 * (eager - exact).abs().max()


@pytest.mark.slow
def test_export_segmenter_onnx_at_two_sizes(segmenter, tmp_path, capsys):
    target = tmp_path / "model.onnx"
    assert run(segmenter, target, "--size", 32, 48) == 0
    found = differences(capsys)
    assert set(found) == {"32x48", "64x65"}
    assert max(found.values()) < 1e-5
    model = MainScores(load_segmenter(segmenter)[0]).eval()
    assert max(exporting.onnx_differences(model, target, [(17, 100), (96, 96)])) < 1e-5


def test_export_segmenter_onnx_static(segmenter, tmp_path, capsys):
    target = tmp_path / "model.onnx"
    assert run(segmenter, target, "--size", 32, 40, "--static") == 0
    assert max(differences(capsys).values()) < 1e-5
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]


@pytest.mark.parametrize("extent", [1, 2, 5, 6, 7, 13])
def test_adaptive_pooling_for_export(extent):
    x = torch.randn(2, 3, extent, 9, dtype=torch.float64)
    for bins in (1, 2, 3, 6):
        expected = torch.nn.functional.adaptive_avg_pool2d(x, bins)
        torch.testing.assert_close(exporting._adaptive_average(x, (bins, bins)), expected)


def test_export_detector_is_refused_with_a_way_out(detector, tmp_path, capsys):
    assert run(detector, tmp_path / "model.pt2") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "got a detector" in line
    assert "--backbone-only exports its backbone" in line
    assert list(tmp_path.iterdir()) == []


@torch.no_grad()
def test_export_backbone_only_gives_every_stage(detector, tmp_path, capsys):
    target = tmp_path / "model.pt2"
    assert run(detector, target, "--backbone-only", "--size", 32, 40, "--static") == 0
    out = capsys.readouterr().out
    assert "to features of stage 1, features of stage 2, features of stage 3, features of stage 4;" in out
    features = torch.export.load(target).module()(torch.randn(1, 3, 32, 40))
    assert [tuple(f.shape) for f in features] == [(1, 8, 16, 20), (1, 8, 8, 10), (1, 16, 4, 5), (1, 16, 2, 3)]


def test_export_mmdetection_file_is_refused(tmp_path, capsys):
    state = {"backbone.patch_embed.proj.0.weight": torch.zeros(1), "roi_head.bbox_head.fc_cls.bias": torch.zeros(1)}
    torch.save({"state_dict": state}, tmp_path / "epoch_12.pth")
    assert run(tmp_path / "epoch_12.pth", tmp_path / "model.onnx") == 2
    assert "got a detector" in capsys.readouterr().err


def test_export_segmenter_with_another_mask_is_refused(segmenter, tmp_path, capsys):
    assert run(segmenter, tmp_path / "model.pt2", "--mask", "v2h") == 2
    assert "--mask: expected no such option for a file of `ppma train`" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["export", "convert"])
@pytest.mark.parametrize("case", ["folder", "missing", "suffix", "unwritable", "read-only", "under a file"])
def test_target_is_checked_before_the_work(command, case, segmenter, tmp_path, monkeypatch, capsys):
    for work in ("ppma_cli.export._subject", "ppma.models.loading.load_checkpoint"):
        monkeypatch.setattr(work, lambda *_, **__: pytest.fail("worked first"))
    suffix = ".pt2" if command == "export" else ".safetensors"
    (tmp_path / f"folder{suffix}").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / f"old{suffix}").touch()
    path, message = {
        "folder": (f"folder{suffix}", "expected a file, got the folder"),
        "missing": (f"none/out{suffix}", "expected a folder at .*none, found none"),
        "suffix": ("out.txt", "expected a name that ends in .*, got '.*out.txt'"),
        "unwritable": (f"out{suffix}", "cannot write to .*: Permission denied"),
        "read-only": (f"old{suffix}", "cannot write .*: it is read-only"),
        "under a file": (f"file/out{suffix}", "expected a folder at .*file, found none"),
    }[case]
    if case == "unwritable":

        def refuse(dir):
            raise PermissionError(13, os.strerror(13), str(dir))

        monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    if case == "read-only":
        monkeypatch.setattr(os, "access", lambda *_: False)
    before = sorted(tmp_path.rglob("*"))
    assert main([command, str(segmenter), str(tmp_path / path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(f"OUT: {message}", line)
    assert sorted(tmp_path.rglob("*")) == before


def test_info_and_convert_say_that_heads_are_left_out(segmenter, tmp_path, capsys):
    assert main(["info", str(segmenter)]) == 0
    assert capsys.readouterr().out.startswith("the backbone of a segmentation model; its heads are not counted\n")
    assert main(["convert", str(segmenter), str(tmp_path / "out.safetensors")]) == 0
    assert capsys.readouterr().out.startswith("converted: the backbone of a segmentation model, without its heads\n")
