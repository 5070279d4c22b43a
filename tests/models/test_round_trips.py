"""A model that is saved and loaded is the same model, through every way there is, with every mask and formulation."""

import dataclasses
import json

import pytest
import safetensors.torch
import timm
import torch
from timm.models import save_for_hf
from transcription import TINY, random_weights

import ppma
from ppma.masks import KINDS
from ppma.models import CONFIGS, CheckpointError, PolylineBackbone
from ppma_cli import main

FORMULATIONS = ("paper", "release")
TOY = {"depths": (1, 1, 1, 1), "dims": (16, 16, 32, 32), "heads": (2, 2, 2, 2), "num_classes": 7, "head_width": 24}
HEADS = CONFIGS["ppma_nano"].heads
ATTENTIONS = ("criss_cross", "criss_cross", "full", "full")
EVERY = pytest.mark.parametrize(("mask", "formulation"), [(m, f) for m in KINDS for f in FORMULATIONS])


def toy(mask="2d", formulation="paper", seed=0, **options):
    """A small model in which every weight matters: none is left where it starts."""
    torch.manual_seed(seed)
    model = timm.create_model("ppma_nano", mask=mask, formulation=formulation, **{**TOY, **options}).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@torch.no_grad()
def assert_same(again, model, architecture=True):
    assert isinstance(again, PolylineBackbone)
    if architecture:
        assert again.config == model.config
    image = torch.randn(1, model.config.in_chans, 24, 40)
    assert torch.equal(again.eval()(image), model(image))


@torch.no_grad()
def assert_same_features(features, model):
    image = torch.randn(1, model.config.in_chans, 24, 40)
    bare = features.model.config.replace(feature_norms=())
    assert bare == model.config.replace(feature_norms=()).without_head(4)
    norms = features.model.feature_norms
    for index, (ours, theirs) in enumerate(
        zip(features.eval()(image), model.forward_intermediates(image)[1], strict=True)
    ):
        expected = norms[str(index)](theirs.permute(0, 2, 3, 1)).permute(0, 3, 1, 2) if len(norms) else theirs
        assert torch.equal(ours, expected)


@EVERY
def test_timm_folder_masks(mask, formulation, tmp_path):
    model = toy(mask, formulation)
    save_for_hf(model, tmp_path, safe_serialization="both")
    name = f"local-dir:{tmp_path}"
    assert_same(timm.create_model(name, pretrained=True), model)
    assert_same_features(timm.create_model(name, pretrained=True, features_only=True), model)
    other = timm.create_model(name, pretrained=True, num_classes=3)
    assert other.config == model.config.replace(num_classes=3)
    kept, given = without_classifier(other), without_classifier(model)
    assert all(torch.equal(kept[name], given[name]) for name in given)


def without_classifier(model):
    return {name: t for name, t in model.state_dict().items() if not name.startswith(("head.fc", "_extra"))}


@EVERY
def test_save_checkpoint_masks(mask, formulation, tmp_path):
    model, path = toy(mask, formulation), tmp_path / "m.safetensors"
    ppma.save_checkpoint(model, path)
    assert_same(ppma.load_checkpoint(path), model)
    overlay = {"file": str(path)}
    assert_same(timm.create_model("ppma_nano", pretrained=True, pretrained_cfg_overlay=overlay), model)
    assert_same(timm.create_model("ppma_tiny", pretrained=True, pretrained_cfg_overlay=overlay), model)
    features = timm.create_model("ppma_nano", pretrained=True, pretrained_cfg_overlay=overlay, features_only=True)
    assert_same_features(features, model)
    assert main(["convert", str(path), str(tmp_path / "again.safetensors")]) == 0
    assert_same(ppma.load_checkpoint(tmp_path / "again.safetensors"), model)


@EVERY
def test_checkpoint_path_masks(mask, formulation, tmp_path):
    """timm does not say where the weights come from: the arguments must, and others than the file's are refused."""
    model, path = toy(mask, formulation), tmp_path / "m.safetensors"
    ppma.save_checkpoint(model, path)
    torch.save(model.state_dict(), tmp_path / "m.pth")
    same = {**TOY, "mask": mask, "formulation": formulation}
    for file in (path, tmp_path / "m.pth"):
        assert_same(timm.create_model("ppma_nano", checkpoint_path=file, **same), model)
        assert_same_features(timm.create_model("ppma_nano", checkpoint_path=file, features_only=True, **same), model)
    others = [(m, f) for m in KINDS for f in FORMULATIONS if (m, f) != (mask, formulation)]
    for number, (other_mask, other) in enumerate(others):
        options = {**TOY, "mask": other_mask, "formulation": other, "features_only": number % 2 == 1}
        with pytest.raises(RuntimeError, match=f"of a model with .*(mask='{mask}'|{formulation})"):
            timm.create_model("ppma_nano", checkpoint_path=(path, tmp_path / "m.pth")[number % 3 == 0], **options)


@EVERY
def test_state_dict_masks(mask, formulation, tmp_path):
    model = toy(mask, formulation)
    state = model.state_dict()
    torch.save(state, tmp_path / "state.pth")
    safetensors.torch.save_file(state, tmp_path / "state.safetensors")
    for file in ("state.pth", "state.safetensors"):
        assert_same(ppma.load_checkpoint(tmp_path / file), model)
    again = toy(mask, formulation, seed=1)
    again.load_state_dict(torch.load(tmp_path / "state.pth", weights_only=True))
    assert_same(again, model)
    half = {name: tensor.bfloat16() for name, tensor in state.items()}
    again.load_state_dict(half)  # the record of the configuration survives a cast of everything


def test_state_dict_other_model():
    state = toy("v2h").state_dict()
    with pytest.raises(RuntimeError, match="of a model with mask='v2h'; this one has mask='2d'"):
        toy("2d").load_state_dict(state)
    with pytest.raises(RuntimeError, match="of a model with mask='v2h'; this one has mask='2d'"):
        toy("2d").load_state_dict(state, strict=False)
    with pytest.raises(RuntimeError, match=r"kinds=.*this one has kinds="):
        toy("v2h", kinds=("full",) * 4).load_state_dict(state)
    with pytest.raises(RuntimeError, match="formulation='paper'; this one has formulation='release'"):
        toy("none", "release").load_state_dict(toy("none", "paper").state_dict())
    wrapped = torch.nn.ModuleDict({"backbone": toy("2d")})
    with pytest.raises(RuntimeError, match="mask='v2h'"):
        wrapped.load_state_dict({f"backbone.{name}": tensor for name, tensor in state.items()})


def test_state_dict_without_config():
    model = toy()
    state = {name: tensor for name, tensor in model.state_dict().items() if name != "_extra_state"}
    again = toy(seed=1)
    again.load_state_dict(state)
    assert_same(again, model)
    toy(seed=2).load_state_dict({**state, "_extra_state": model.to("meta").state_dict()["_extra_state"]})


def test_state_dict_damaged_config():
    state = toy().state_dict()
    state["_extra_state"] = state["_extra_state"][:-5]
    with pytest.raises(RuntimeError, match="_extra_state: expected JSON"):
        toy().load_state_dict(state)


@pytest.mark.parametrize("channels", [1, 4])
def test_timm_folder_in_chans(channels, tmp_path):
    options = {"in_chans": channels, "drop_path_rate": 0.3, "global_pool": "", "layer_scale": (None, None, 0.1, 0.1)}
    model = toy("shared", "release", **options)
    model.reset_classifier(5)
    save_for_hf(model, tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["architecture"] == "ppma_nano"
    assert saved["pretrained_cfg"]["model_args"]["mask"] == "shared"
    assert_same(timm.create_model(f"local-dir:{tmp_path}", pretrained=True), model)
    with pytest.raises(CheckpointError, match="of a model with mask='shared'; this one has mask='2d'"):
        timm.create_model(f"local-dir:{tmp_path}", pretrained=True, mask="2d")


def test_timm_folder_model_args(tmp_path):
    """As `push_to_hf_hub(..., model_args=...)` writes it, which other programs read too."""
    model = toy("hilbert", "release")
    save_for_hf(model, tmp_path, model_args=model.pretrained_cfg["model_args"], safe_serialization=True)
    assert_same(timm.create_model(f"local-dir:{tmp_path}", pretrained=True), model)


def test_timm_folder_transformers(tmp_path):
    """Of the arguments it knows only those that `save_for_hf` was given; without them it must not guess."""
    transformers = pytest.importorskip("transformers")
    model, image = toy("v2h", "release"), torch.randn(1, 3, 24, 24)
    save_for_hf(model, tmp_path, model_args=model.pretrained_cfg["model_args"], safe_serialization=True)
    again = transformers.AutoModelForImageClassification.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        torch.testing.assert_close(again(pixel_values=image).logits, model(image))
    model = toy("v2h", depths=CONFIGS["ppma_nano"].depths, dims=CONFIGS["ppma_nano"].dims, head_width=256, heads=HEADS)
    save_for_hf(model, tmp_path, safe_serialization=True)
    with pytest.raises(Exception, match="of a model with mask='v2h'; this one has mask='2d'"):
        transformers.AutoModelForImageClassification.from_pretrained(tmp_path)


def test_timm_folder_unregistered_model(tmp_path):
    model = PolylineBackbone(toy("v2h", dims=(8, 16, 16, 24)).config).eval()
    save_for_hf(model, tmp_path)
    assert_same(timm.create_model(f"local-dir:{tmp_path}", pretrained=True), model)


def test_timm_folder_without_arguments(tmp_path):
    save_for_hf(toy("v2h"), tmp_path)
    path = tmp_path / "config.json"
    saved = json.loads(path.read_text())
    del saved["pretrained_cfg"]["model_args"]["mask"]
    path.write_text(json.dumps(saved))
    for features_only in (False, True):
        with pytest.raises(CheckpointError, match="of a model with mask='v2h'"):
            timm.create_model(f"local-dir:{tmp_path}", pretrained=True, features_only=features_only)


def test_features_from_classifier(tmp_path):
    model = toy()
    torch.save(model.state_dict(), tmp_path / "m.pth")
    features = timm.create_model(
        "ppma_nano", features_only=True, out_indices=(0, 2), checkpoint_path=tmp_path / "m.pth", **TOY
    )
    assert torch.equal(features.model.stages[2].blocks[0].attn.qkv.weight, model.stages[2].blocks[0].attn.qkv.weight)
    again = timm.create_model("ppma_nano", features_only=True, out_indices=(0, 2), **TOY)
    again.load_state_dict(features.state_dict())
    image = torch.randn(1, 3, 24, 24)
    assert all(torch.equal(a, b) for a, b in zip(again(image), features(image), strict=True))
    with pytest.raises(RuntimeError, match=r"Unexpected key.*extra"):
        features.load_state_dict({**model.state_dict(), "extra.weight": torch.zeros(1)})


def test_features_foreign_weights(tmp_path):
    torch.save({"conv1.weight": torch.zeros(1)}, tmp_path / "resnet.pth")
    overlay = {"file": str(tmp_path / "resnet.pth")}
    with pytest.raises(CheckpointError, match="expected the weights of a PPMA or RMT backbone"):
        timm.create_model("ppma_nano", pretrained=True, features_only=True, pretrained_cfg_overlay=overlay)


@pytest.mark.parametrize(("mask", "theirs"), [("2d", "2d"), ("v2h", "2d"), ("rmt", "rmt"), ("none", "none")])
@torch.no_grad()
def test_authors_layout_all_loaders(mask, theirs, tmp_path):
    arch = dataclasses.replace(TINY, depths=TOY["depths"], dims=TOY["dims"], heads=TOY["heads"], mask=theirs)
    state, path = random_weights(arch, classes=7), tmp_path / "best.pth"
    torch.save({"model": state}, path)
    model = ppma.load_checkpoint(path, kinds=ATTENTIONS, mask=mask)
    assert model.config.mask == mask
    options = {**TOY, "head_width": 1024, "mask": mask, "formulation": "release", "kinds": ATTENTIONS}
    assert_same(timm.create_model("ppma_tiny", checkpoint_path=path, **options), model, architecture=False)
    features = timm.create_model("ppma_tiny", checkpoint_path=path, features_only=True, **options)
    assert torch.equal(features.model.stem.layers[0].weight, model.stem.layers[0].weight)
    overlay = {"file": str(path), "num_classes": 7}
    loaded = timm.create_model("ppma_tiny", pretrained=True, pretrained_cfg_overlay=overlay, **options)
    assert_same(loaded, model, architecture=False)
    paper = {**options, "formulation": "paper"}
    with pytest.raises(RuntimeError, match="formulation='release'; this one has formulation='paper'"):
        timm.create_model("ppma_tiny", checkpoint_path=path, **paper)
    if mask != "2d":
        other = {**options, "mask": {"rmt": "none", "none": "rmt", "v2h": "rmt"}[mask]}
        with pytest.raises(RuntimeError):
            timm.create_model("ppma_tiny", checkpoint_path=path, **other)
    target = tmp_path / "ours.safetensors"
    assert main(["convert", str(path), str(target), "--mask", mask, "--kinds", *ATTENTIONS]) == 0
    assert_same(ppma.load_checkpoint(target), model)


def test_img_size_data_config(tmp_path):
    model = timm.create_model("ppma_nano", img_size=48, **TOY)
    assert timm.data.resolve_data_config({}, model=model)["input_size"] == (3, 48, 48)
    save_for_hf(model, tmp_path)
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True)
    assert again.pretrained_cfg["input_size"] == [3, 48, 48]
    assert timm.create_model("ppma_nano", img_size=(32, 64)).pretrained_cfg["input_size"] == (3, 32, 64)
    with pytest.raises(ValueError, match=r"img_size: expected a whole number > 0 or two of them, got 0"):
        timm.create_model("ppma_nano", img_size=0)
    with pytest.raises(ValueError, match="takes images of any size"):
        model.config.replace(img_size=48)
