"""Models of timm other than ours: names, arguments, weights, files and feature pyramids."""

import pytest
import timm
import torch
from safetensors.torch import save_file

import ppma
from ppma.data.preprocessing import Preprocessing
from ppma.models import CheckpointError, open_checkpoint
from ppma.models import timm_models as names
from ppma.models.loading import load_classifier
from ppma.models.profile import count_macs, profile
from ppma.models.timm_features import TimmFeatures
from ppma.models.timm_models import TimmModel, check_model, is_timm


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("resnet81", "did you mean 'resnet18'"),
        ("ppma_tinny", "did you mean 'ppma_tiny'"),
        ("resnet18.a1_in2k", "did you mean 'resnet18.a"),
        ("hf-hub:owner/model", "or a model of timm"),
    ],
)
def test_check_model_unknown_name(name, message):
    with pytest.raises(ValueError, match=message):
        check_model(name, {})


def test_check_model_arguments():
    check_model("resnet18.a1_in1k", {"drop_rate": 0.1})
    with pytest.raises(ValueError, match="pretrained_cfg_overlay: expected no value"):
        check_model("resnet18", {"pretrained_cfg_overlay": {"file": "weights.pth"}})
    with pytest.raises(ValueError, match=r"timm cannot build test_resnet with {'dept': 3}.*dept"):
        TimmModel("test_resnet", {"dept": 3}).create()
    assert not is_timm("ppma_tiny")
    assert not is_timm(None)


def test_pretrained_without_network(monkeypatch):
    def offline(*_, **__):
        raise OSError("no route to host")

    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", offline)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: None)
    with pytest.raises(ConnectionError, match="test_resnet are not in the cache and cannot be downloaded: no route"):
        TimmModel("test_resnet").create(pretrained=True)
    monkeypatch.setattr(names, "_pretrained_cfg", lambda _: None)
    with pytest.raises(ValueError, match="timm has no weights of test_resnet"):
        TimmModel("test_resnet").create(pretrained=True)


def test_pretrained_from_cache(tmp_path, monkeypatch):
    trained = timm.create_model("test_resnet")
    save_file(trained.state_dict(), tmp_path / "model.safetensors")
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: str(tmp_path / "model.safetensors"))
    model = TimmModel("test_resnet").create(pretrained=True, num_classes=3)
    assert torch.equal(model.conv1[0].weight, trained.conv1[0].weight)
    assert model.num_classes == 3
    features = TimmFeatures(TimmModel("test_resnet"), pretrained=True)
    weights = dict(features.named_parameters())
    assert torch.equal(weights["body.conv1.0.weight"], trained.conv1[0].weight)


def test_classifier_file_round_trip(tmp_path):
    model = TimmModel("test_vit").classifier(3, 64).eval()
    preprocessing = Preprocessing(64, "bicubic", (0.5,) * 3, (0.5,) * 3, 0.9)
    ppma.save_checkpoint(model, tmp_path / "vit.safetensors", preprocessing=preprocessing, classes=("a", "b", "c"))
    checkpoint = open_checkpoint(tmp_path / "vit.safetensors")
    assert checkpoint.timm_model == TimmModel("test_vit", {"img_size": 64})
    assert checkpoint.task == "classification"
    loaded, stored, classes = load_classifier(checkpoint)
    assert (stored, classes) == (preprocessing, ("a", "b", "c"))
    image = torch.randn(1, 3, 64, 64)
    assert torch.equal(loaded(image), model(image))
    with pytest.raises(CheckpointError, match="expected one of our backbones, got timm's test_vit"):
        ppma.load_checkpoint(checkpoint)


@pytest.mark.parametrize("text", ['{"name": "no_such_model"}', '{"model": "resnet18"}', "[]"])
def test_file_unknown_model(tmp_path, text):
    save_file({"weight": torch.zeros(1)}, tmp_path / "bad.safetensors", {"ppma_timm": text})
    with pytest.raises(CheckpointError, match=r"bad.safetensors: ppma_timm"):
        load_classifier(tmp_path / "bad.safetensors")


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("test_resnet", {}),
        ("test_convnext", {}),
        ("swin_tiny_patch4_window7_224", {}),
        ("test_vit", {}),
        ("vit_small_patch14_reg4_dinov2", {"patch_size": 16}),
        ("vit_small_patch16_dinov3", {}),
    ],
)
def test_features_any_size(name, args):
    if not timm.is_model(name):
        pytest.skip(f"timm {timm.__version__} has no {name}")
    with torch.device("meta"), torch.no_grad():
        features = TimmFeatures(TimmModel(name, args)).eval()
        maps = features(torch.empty(1, 3, 50, 70))
    assert [tuple(level.shape[2:]) for level in maps] == [(13, 18), (7, 9), (4, 5), (2, 3)]
    assert [level.shape[1] for level in maps] == [info["num_chs"] for info in features.feature_info]


def test_features_vit_all_blocks():
    with torch.device("meta"):
        assert len(TimmFeatures(TimmModel("test_vit")).body.model.blocks) == len(timm.create_model("test_vit").blocks)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("vit_small_patch14_dinov2", r"or a plain ViT with patches of a multiple of 4 pixels .* with the strides 14"),
        ("maxvit_tiny_tf_224", "expected a backbone for images of any size, got maxvit_tiny_tf_224"),
    ],
)
def test_features_refused(name, message):
    with pytest.raises(ValueError, match=message):
        TimmFeatures(TimmModel(name))


def test_features_layers():
    with torch.device("meta"):
        features = TimmFeatures(TimmModel("test_convnext"))
    layer = features.group_matcher()
    ordered = [layer(name) for name, _ in features.named_parameters()]
    assert ordered == sorted(ordered)
    assert layer("body.stem_0.weight") == 0
    assert layer("body.stages_0.blocks.0.conv_dw.weight") < layer("body.stages_1.blocks.0.conv_dw.weight")


def test_count_macs_equals_profile():
    model = timm.create_model("ppma_nano")
    assert count_macs(model, (32, 32)) == profile(model, (32, 32)).total.macs
