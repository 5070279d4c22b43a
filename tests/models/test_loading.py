"""Weight files: the authors' layouts, our own, and files that must be refused."""

import argparse
import dataclasses
import os
import pickle

import numpy as np
import pytest
import safetensors.torch
import timm
import torch
from transcription import BASE, SMALL, TINY, random_weights

import ppma
from ppma.models import CONFIGS, CheckpointError
from ppma.models.checkpoints import release

# Small enough to be quick; the shapes are no published variant's.
TOY = dataclasses.replace(TINY, depths=(1, 1, 1, 1), dims=(16, 16, 32, 32), heads=(2, 2, 2, 2))
KINDS = ("criss_cross", "criss_cross", "full", "full")


@pytest.fixture
def toy():
    return random_weights(TOY, classes=10)


def save(path, contents):
    torch.save(contents, path)
    return path


@pytest.mark.parametrize("key", ["model", "models", None])
def test_load_checkpoint_authors_classification(key, toy, tmp_path):
    path = save(tmp_path / "best.pth", toy if key is None else {key: toy, "epoch": 3})
    model = ppma.load_checkpoint(path, kinds=KINDS)
    assert not model.training
    assert model.config.formulation == "release"
    block = model.stages[2].blocks[0]
    theirs = "layers.2.blocks.0.retention"
    assert torch.equal(
        block.attn.qkv.weight, torch.cat([toy[f"{theirs}.{which}_proj.weight"] for which in ("q", "k", "v")])
    )
    assert torch.equal(block.attn.decay.A_log, toy[f"{theirs}.path_embed.A_log"])
    assert torch.equal(model.stages[1].downsample.conv.weight, toy["layers.0.downsample.reduction.weight"])
    assert torch.equal(model.head.fc.bias, toy["head.bias"])


def test_load_checkpoint_ema(toy, tmp_path):
    ema = {f"module.{name}": tensor + 1 if name == "head.bias" else tensor for name, tensor in toy.items()}
    path = save(tmp_path / "best.pth", {"model": toy, "model_ema": ema})
    for ema, offset in ((None, 1), (True, 1), (False, 0)):
        model = ppma.load_checkpoint(path, ema=ema, kinds=KINDS)
        assert torch.equal(model.head.fc.bias, toy["head.bias"] + offset)
    with pytest.raises(CheckpointError, match=r"expected weights under 'model_ema' or 'state_dict_ema', found model"):
        ppma.load_checkpoint(save(tmp_path / "plain.pth", {"model": toy}), ema=True)


def test_load_checkpoint_openmmlab(tmp_path):
    backbone = random_weights(TOY, task="segmentation")
    state = {f"backbone.{name}": tensor for name, tensor in backbone.items()}
    state |= {
        "decode_head.conv_seg.weight": torch.zeros(150, 512, 1, 1),
        "auxiliary_head.conv_seg.bias": torch.zeros(150),
    }
    model = ppma.load_checkpoint(save(tmp_path / "seg.pth", {"state_dict": state, "meta": {}}), kinds=KINDS)
    assert model.config.feature_norms == (0, 1, 2, 3)
    assert (model.config.num_classes, model.config.head_width) == (0, None)
    assert torch.equal(model.feature_norms["2"].weight, backbone["outnorm2.weight"])
    assert model(torch.randn(1, 3, 32, 32)).shape == (1, 32)


@pytest.mark.parametrize(
    ("name", "arch"),
    [
        *((f"ppma_{size}", arch) for size, arch in (("tiny", TINY), ("small", SMALL), ("base", BASE))),
        *((f"rmt_{size}", dataclasses.replace(arch, mask="rmt")) for size, arch in (("tiny", TINY), ("base", BASE))),
    ],
)
def test_infer_config_published(name, arch):
    state = {key: tensor.to("meta") if "Relpos" not in key else tensor for key, tensor in random_weights(arch).items()}
    inferred = release.infer_config(state, source="test")
    assert inferred == CONFIGS[name].replace(formulation="release")


def test_load_checkpoint_overrides(toy, tmp_path):
    path = save(tmp_path / "best.pth", {"model": toy})
    model = ppma.load_checkpoint(path, kinds=KINDS, mask="v2h", drop_path_rate=0.2)
    assert (model.config.mask, model.config.drop_path_rate) == ("v2h", 0.2)
    with pytest.raises(ValueError, match="did you mean 'drop_path_rate'"):
        ppma.load_checkpoint(path, kinds=KINDS, drop_path=0.2)


def test_infer_config_unknown_shapes(toy, tmp_path):
    with pytest.raises(CheckpointError, match=r"blocks \(1, 1, 1, 1\).*fit no registered variant; give .* kinds="):
        ppma.load_checkpoint(save(tmp_path / "best.pth", {"model": toy}))


def test_infer_config_shared_decays(toy, tmp_path):
    toy = {name: t[:1] if name.endswith("dt_linear.weight") else t for name, t in toy.items()}
    assert ppma.load_checkpoint(save(tmp_path / "best.pth", toy), kinds=KINDS).config.mask == "shared"


def test_load_checkpoint_mismatch(toy, tmp_path):
    del toy["layers.0.blocks.0.retention.q_proj.bias"]
    toy["layers.1.blocks.0.ffn.fc2.weight"] = torch.zeros(16, 5)
    toy["extra.weight"] = torch.zeros(1)
    path = save(tmp_path / "best.pth", {"model": toy})
    with pytest.raises(CheckpointError) as error:
        ppma.load_checkpoint(path, kinds=KINDS)
    for part in (
        "missing: stages.0.blocks.0.attn.qkv.bias",
        "unexpected: extra.weight",
        "mis-shaped: stages.1.blocks.0.ffn.reduce.weight (16, 5) instead of (16, 48)",
    ):
        assert part in str(error.value)
    with pytest.warns(UserWarning, match=r"unexpected: extra\.weight"):
        model = ppma.load_checkpoint(path, kinds=KINDS, strict=False)
    assert torch.equal(model.head.fc.bias, toy["head.bias"])


@pytest.mark.parametrize("kind", ["angle", "decay"])
def test_load_checkpoint_other_constants(kind, tmp_path):
    state = random_weights(dataclasses.replace(TOY, mask="rmt"))
    state[f"layers.3.Relpos.{kind}"] = state[f"layers.3.Relpos.{kind}"] * 1.01
    with pytest.raises(CheckpointError, match=rf"layers\.3\.Relpos\.{kind}: expected"):
        ppma.load_checkpoint(save(tmp_path / "best.pth", {"model": state}), kinds=KINDS)


def test_load_checkpoint_training_arguments(toy, tmp_path):
    beside = {"args": argparse.Namespace(lr=1e-3), "best": np.float64(82.6), "curve": np.arange(3.0)}
    assert ppma.load_checkpoint(save(tmp_path / "best.pth", {"model": toy, **beside}), kinds=KINDS)


class Payload:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("how", ["torch", "pickle"])
def test_load_checkpoint_pickled_code(how, toy, tmp_path):
    trap, path = str(tmp_path / "ran"), tmp_path / "best.pth"
    contents = {"model": toy, "optimizer": Payload(trap)}
    if how == "torch":
        torch.save(contents, path)
    else:
        path.write_bytes(pickle.dumps({"model": {}, "optimizer": Payload(trap)}))
    with pytest.raises(CheckpointError, match="refused, because it holds more than tensors"):
        ppma.load_checkpoint(path)
    assert not os.path.exists(trap)


@pytest.mark.parametrize("part", [0.0, 0.001, 0.5, 0.99])
@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
def test_load_checkpoint_truncated(suffix, part, toy, tmp_path):
    path = tmp_path / f"best.{suffix}"
    if suffix == "pth":
        torch.save({"model": toy}, path)
    else:
        ppma.save_checkpoint(timm.create_model("ppma_nano"), path)
    contents = path.read_bytes()
    path.write_bytes(contents[: int(part * len(contents))])
    with pytest.raises(CheckpointError, match="not a weight file, or damaged"):
        ppma.load_checkpoint(path)


def test_load_checkpoint_other_files(tmp_path):
    with pytest.raises(FileNotFoundError, match="expected a weight file"):
        ppma.load_checkpoint(tmp_path / "none.pth")
    (tmp_path / "text.pth").write_text("hello")
    with pytest.raises(CheckpointError, match="not a weight file"):
        ppma.load_checkpoint(tmp_path / "text.pth")
    with pytest.raises(CheckpointError, match="expected a dictionary, got list"):
        ppma.load_checkpoint(save(tmp_path / "list.pth", [1, 2]))
    with pytest.raises(CheckpointError, match=r"found no 'patch_embed\.proj\.0\.weight'"):
        ppma.load_checkpoint(save(tmp_path / "resnet.pth", {"model": {"conv1.weight": torch.zeros(1)}}))
    with pytest.raises(CheckpointError, match=r"expected weights under .*'model' or 'models' or .*, found epoch"):
        ppma.load_checkpoint(save(tmp_path / "log.pth", {"epoch": 1}))


@pytest.mark.parametrize("options", [{}, {"formulation": "release", "mask": "shared"}, {"mask": "rmt", "in_chans": 1}])
@torch.no_grad()
def test_save_checkpoint_round_trip(options, tmp_path):
    model = timm.create_model("ppma_nano", num_classes=9, **options).eval()
    ppma.save_checkpoint(model, tmp_path / "m.safetensors")
    again = ppma.load_checkpoint(tmp_path / "m.safetensors")
    assert again.config == model.config
    image = torch.randn(1, model.config.in_chans, 32, 32)
    assert torch.equal(again(image), model(image))
    assert again.pretrained_cfg["architecture"] == "ppma_nano"
    assert [path.name for path in tmp_path.iterdir()] == ["m.safetensors"]
    with pytest.raises(CheckpointError, match="expected weights under 'model_ema'"):
        ppma.load_checkpoint(tmp_path / "m.safetensors", ema=True)
    with pytest.raises(CheckpointError, match=r"mis-shaped: head\.fc\.bias \(9,\) instead of \(4,\)"):
        ppma.load_checkpoint(tmp_path / "m.safetensors", num_classes=4)


def test_load_checkpoint_timm_script(tmp_path):
    """Checkpoints of timm's train.py: weights, their average, and arguments."""
    model, average = (timm.create_model("ppma_nano", mask="v2h", num_classes=3) for _ in range(2))
    contents = {"arch": "ppma_nano", "state_dict": model.state_dict(), "args": argparse.Namespace(lr=1.0)}
    path = save(tmp_path / "last.pth.tar", {**contents, "state_dict_ema": average.state_dict()})
    for ema, expected in ((None, average), (False, model)):
        loaded = ppma.load_checkpoint(path, ema=ema)
        assert loaded.config == model.config
        assert torch.equal(loaded.head.fc.weight, expected.head.fc.weight)


def test_load_checkpoint_authors_safetensors(toy, tmp_path):
    safetensors.torch.save_file(toy, tmp_path / "best.safetensors")
    assert torch.equal(ppma.load_checkpoint(tmp_path / "best.safetensors", kinds=KINDS).head.fc.bias, toy["head.bias"])


def test_save_checkpoint_other_module(tmp_path):
    with pytest.raises(ValueError, match="model: expected a PolylineBackbone, got Linear"):
        ppma.save_checkpoint(torch.nn.Linear(1, 1), tmp_path / "m.safetensors")


@torch.no_grad()
def test_create_model_authors_checkpoint_path(tmp_path):
    path = save(tmp_path / "best.pth", {"model": random_weights(TINY)})
    overlay = {"file": str(path)}
    model = timm.create_model("ppma_tiny", pretrained=True, formulation="release", pretrained_cfg_overlay=overlay)
    image = torch.randn(1, 3, 32, 32)
    torch.testing.assert_close(model.eval()(image), ppma.load_checkpoint(path)(image))
