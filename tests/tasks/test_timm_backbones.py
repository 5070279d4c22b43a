"""Models of timm in every task: training, files, evaluation, prediction and export."""

import numpy as np
import pytest
import timm
import torch
import yaml
from PIL import Image
from short_run import SHORT, SHORT_DENSE, SMALL_DECODER, SMALL_DETECTOR, settings

import ppma
from ppma.models import open_checkpoint
from ppma.models.timm_models import TimmModel
from ppma.tasks.detection.weights import load_detector
from ppma.tasks.registry import load_config
from ppma.tasks.run import train
from ppma.tasks.segmentation.weights import load_segmenter
from ppma_cli import main

DENSE = (
    *SHORT_DENSE, "log=[csv]", "ema=null", "steps=1", "eval_steps=1", "optimizer.layer_decay=0.8",
    "optimizer.backbone_lr_scale=0.1", "grad_checkpointing=true",
)  # fmt: skip


@pytest.fixture
def picture(tmp_path):
    path = tmp_path / "picture.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (50, 70, 3), dtype=np.uint8)).save(path)
    return path


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    out = tmp_path_factory.mktemp("classifier")
    changes = [*SHORT, "log=[csv]", "model=test_resnet", "data.image_size=32", "data.train_fraction=0.05"]
    train("digits_nano", out, assignments=changes)
    return out / "best.safetensors"


def test_preprocessing_from_timm(tmp_path):
    config = load_config("digits_nano", ["model=test_vit", "data.image_size=64"])
    assert (config.data.image_size, config.data.mean, config.data.crop_pct) == (64, (0.5,) * 3, 0.95)
    assert load_config("digits_nano", ["model=test_vit"]).data.image_size == 160
    assert load_config("digits_nano").data.mean == (0.3,) * 3
    (tmp_path / "mine.yaml").write_text("base: digits_nano\nmodel: test_vit\ndata: {mean: [0.1, 0.1, 0.1]}\n")
    config = load_config(tmp_path / "mine.yaml")
    assert (config.data.mean, config.data.std) == ((0.1,) * 3, (0.5,) * 3)


def test_preprocessing_from_timm_told(recwarn):
    load_config("digits_nano", ["model=test_vit", "data.image_size=64", "data.std=[0.5,0.5,0.5]"])
    (warning,) = recwarn.list
    assert str(warning.message) == (
        "data: the preprocessing is that of timm's test_vit: mean (0.5, 0.5, 0.5) instead of (0.3, 0.3, 0.3), "
        "crop_pct 0.95 instead of 1.0"
    )


def test_preprocessing_from_timm_restored(tmp_path):
    """A recipe for a model of timm, changed to a model of ours, is the recipe below it with that model."""
    (tmp_path / "theirs.yaml").write_text("base: digits_nano\nmodel: test_vit\nmodel_args: {qk_norm: true}\n")
    (tmp_path / "other.yaml").write_text("base: theirs\nmodel: test_resnet\nlr: 0.125\n")
    for recipe in ("theirs", "other"):
        config = load_config(tmp_path / f"{recipe}.yaml", ["model=ppma_nano", "lr=0.25"])
        assert config == load_config("digits_nano", ["lr=0.25"])
    assert load_config(tmp_path / "other.yaml").model_args == {}
    (tmp_path / "sized.yaml").write_text("base: digits_nano\nmodel: test_vit\ndata: {image_size: 64}\n")
    config = load_config(tmp_path / "sized.yaml", ["model=ppma_nano"])  # what the file sets is kept
    assert (config.data.image_size, config.data.mean) == (64, (0.3,) * 3)


def test_recipes_command_timm(capsys):
    assert main(["recipes", "digits_nano", "model=test_vit"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert (printed["model"], printed["data"]["mean"]) == ("test_vit", [0.5, 0.5, 0.5])
    assert "_replaced" not in printed


def test_other_models_arguments_dropped():
    assert "stem_stride" in load_config("scenes_upernet_nano").model_args
    config = load_config("scenes_upernet_nano", ["model=test_convnext", "model_args.drop_path_rate=0.1"])
    assert config.model_args == {"drop_path_rate": 0.1}
    assert config.data.short_side == load_config("scenes_upernet_nano").data.short_side
    assert load_config("coco_maskrcnn_ppma_tiny_1x").init is not None
    assert load_config("coco_maskrcnn_ppma_tiny_1x", ["model=resnet18"]).init is None


def test_pretrained_of_ours():
    assert load_config("folder_finetune", ["pretrained=true"]).start == "ppma_tiny.authors_in1k"
    with pytest.raises(ValueError, match="expected a model with published weights, one of ppma_nano, ppma_tiny"):
        load_config("imagenet_rmt_tiny", ["pretrained=true"])
    assert load_config("digits_nano", ["pretrained=true"]).start == "ppma_nano.cifar10"
    with pytest.raises(ValueError, match="init, pretrained: expected one of the two"):
        load_config("folder_finetune", ["pretrained=true", "init=x.safetensors"])


def test_classification(classifier, picture, tmp_path, capsys):
    assert open_checkpoint(classifier).timm_model == TimmModel("test_resnet")
    assert main(["eval", str(classifier), "--data", "digits"]) == 0
    assert main(["predict", str(classifier), str(picture), "--top", "2"]) == 0
    assert main(["export", str(classifier), str(tmp_path / "net.pt2"), "--size", "32", "32"]) == 0
    assert "image (batch, 3, 32, 32) to class scores" in capsys.readouterr().out
    assert main(["info", str(classifier)]) == 2
    assert "expected one of our backbones, got timm's test_resnet" in capsys.readouterr().err


def test_classification_backbone_only(classifier, tmp_path, capsys):
    target = tmp_path / "net.pt2"
    assert main(["export", str(classifier), str(target), "--backbone-only", "--size", "64", "96", "--static"]) == 0
    features = torch.export.load(target).module()(torch.randn(1, 3, 64, 96))
    assert [tuple(level.shape[2:]) for level in features] == [(16, 24), (8, 12), (4, 6), (2, 3)]


def test_eval_device(classifier, monkeypatch, capsys):
    assert main(["eval", str(classifier), "--data", "digits", "--device", "cpu"]) == 0
    assert main(["eval", str(classifier), "--data", "digits", "--device", "gpu"]) == 2
    assert "device: expected one that PyTorch can use, such as cpu, got 'gpu'" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert main(["eval", str(classifier), "--data", "digits", "--device", "cpu"]) == 2
    assert "device: expected none under torchrun" in capsys.readouterr().err


def test_demo(tmp_path, capsys):
    changes = [*SHORT, "model=test_resnet", "data.image_size=32", "data.train_fraction=0.05"]
    assert main(["demo", "--out", str(tmp_path / "demo"), *changes]) == 2
    assert "data.test_split: expected a split" in capsys.readouterr().err
    assert main(["demo", "--out", str(tmp_path / "demo"), *changes, "data.test_split=test"]) == 0
    assert "inside.png" not in capsys.readouterr().out
    assert (tmp_path / "demo" / "confusion.png").is_file()


def test_classification_init(classifier, tmp_path):
    changes = [*SHORT, "steps=1", "eval_steps=1", "log=[csv]", f"init={classifier}", "model_args.mask=none"]
    train("digits_nano", tmp_path, assignments=[*changes, "data.train_fraction=0.05"])
    assert open_checkpoint(tmp_path / "best.safetensors").timm_model == TimmModel("test_resnet")


def test_segmentation(scenes, picture, tmp_path, capsys):
    changes = (*DENSE, *SMALL_DECODER, f"data.root={scenes}", "model=test_convnext", "freeze=[backbone.body.stem*]")
    assert main(["train", "scenes_upernet_nano", "--out", str(tmp_path / "run"), *settings(*changes)]) == 0
    path = tmp_path / "run" / "best.safetensors"
    assert main(["eval", str(path), "--data", str(scenes)]) == 0
    assert main(["predict", str(path), str(picture), "--out", str(tmp_path / "drawn")]) == 0
    assert main(["export", str(path), str(tmp_path / "net.pt2"), "--size", "64", "96"]) == 0
    assert "image (batch, 3, 64, 96)" in capsys.readouterr().out
    assert load_segmenter(path)[0].backbone.timm_model == TimmModel("test_convnext")


def test_detection_from_classifier(scenes, classifier, picture, tmp_path, capsys):
    changes = (*DENSE, *SMALL_DETECTOR, f"data.root={scenes}", f"init={classifier}", "lr=1e-12", "workers=0")
    assert main(["train", "scenes_maskrcnn_nano", "--out", str(tmp_path / "run"), *settings(*changes)]) == 0
    path = tmp_path / "run" / "best.safetensors"
    assert main(["eval", str(path), "--data", str(scenes)]) == 0
    assert main(["predict", str(path), str(picture), "--out", str(tmp_path / "drawn")]) == 0
    body = load_detector(path)[0].backbone.body
    assert main(["export", str(path), str(tmp_path / "net.pt2")]) == 2
    assert "--backbone-only exports its backbone" in capsys.readouterr().err
    assert main(["export", str(path), str(tmp_path / "net.pt2"), "--backbone-only", "--size", "64", "96"]) == 0
    stages = ", ".join(f"features of stage {stage}" for stage in (1, 2, 3, 4))
    assert f"image (batch, 3, 64, 96) to {stages}" in capsys.readouterr().out
    started = open_checkpoint(classifier).contents["layer1.0.conv1.weight"]
    assert torch.allclose(body.get_parameter("body.layer1.0.conv1.weight"), started, atol=1e-6)


def test_segmentation_of_vit(scenes, picture, tmp_path):
    changes = (*DENSE, *SMALL_DECODER, f"data.root={scenes}", "model=test_vit", "freeze=[backbone.body.*]")
    assert main(["train", "scenes_upernet_nano", "--out", str(tmp_path / "run"), *settings(*changes)]) == 0
    path = tmp_path / "run" / "best.safetensors"
    assert main(["eval", str(path), "--data", str(scenes)]) == 0
    assert main(["predict", str(path), str(picture)]) == 0
    assert load_segmenter(path)[0].backbone.pyramid is not None


def test_segmentation_of_vit_refused(scenes, tmp_path, capsys):
    changes = settings(*DENSE, f"data.root={scenes}", "model=vit_small_patch14_dinov2")
    assert main(["train", "scenes_upernet_nano", "--out", str(tmp_path), *changes]) == 2
    assert "got vit_small_patch14_dinov2 with the strides 14" in capsys.readouterr().err.splitlines()[-1]


def test_retrofitted_vit_named(picture, tmp_path, capsys):
    ppma.save_retrofit(ppma.retrofit(timm.create_model("test_vit")), tmp_path / "vit.safetensors")
    assert main(["predict", str(tmp_path / "vit.safetensors"), str(picture)]) == 2
    assert "`ppma.load_retrofit` loads retrofitted ViTs, got 'retrofit'" in capsys.readouterr().err
