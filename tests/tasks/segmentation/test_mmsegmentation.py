"""UPerNet from files in MMSegmentation's layout, which the authors' are; those of the tests are made here."""

import dataclasses
import importlib.util
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import ppma
from ppma.models import CheckpointError
from ppma.tasks.segmentation import inference
from ppma.tasks.segmentation.task import Segmentation
from ppma.tasks.segmentation.weights import load_segmenter, numbered
from ppma_cli import main

_PATH = Path(__file__).parents[2] / "models" / "transcription.py"
_SPEC = importlib.util.spec_from_file_location("transcription_for_segmentation", _PATH)
transcription = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(transcription)

DIMS = (16, 16, 32, 32)
TOY = dataclasses.replace(transcription.TINY, depths=(1, 1, 1, 1), dims=DIMS, heads=(2, 2, 2, 2))
KINDS = ("criss_cross", "criss_cross", "full", "full")
CLASSES, CHANNELS, AUXILIARY = 5, 24, 12


def mmsegmentation_heads():
    """Random weights of both heads in MMSegmentation's names: ConvModules with `conv` and `bn`, and `conv_seg`."""
    generator = torch.Generator().manual_seed(1)
    state = {}

    def module(name, fan_in, fan_out, kernel):
        state[f"{name}.conv.weight"] = torch.randn(fan_out, fan_in, kernel, kernel, generator=generator) * 0.1
        for part in ("weight", "bias", "running_mean"):
            state[f"{name}.bn.{part}"] = torch.randn(fan_out, generator=generator)
        state[f"{name}.bn.running_var"] = 1 + torch.rand(fan_out, generator=generator)
        state[f"{name}.bn.num_batches_tracked"] = torch.tensor(3)

    for index in range(4):
        module(f"decode_head.psp_modules.{index}.1", DIMS[3], CHANNELS, 1)
    module("decode_head.bottleneck", DIMS[3] + 4 * CHANNELS, CHANNELS, 3)
    for index in range(3):
        module(f"decode_head.lateral_convs.{index}", DIMS[index], CHANNELS, 1)
        module(f"decode_head.fpn_convs.{index}", CHANNELS, CHANNELS, 3)
    module("decode_head.fpn_bottleneck", 4 * CHANNELS, CHANNELS, 3)
    module("auxiliary_head.convs.0", DIMS[2], AUXILIARY, 3)
    for head, width in (("decode_head", CHANNELS), ("auxiliary_head", AUXILIARY)):
        state[f"{head}.conv_seg.weight"] = torch.randn(CLASSES, width, 1, 1, generator=generator)
        state[f"{head}.conv_seg.bias"] = torch.randn(CLASSES, generator=generator)
    return state


@pytest.fixture
def state():
    backbone = transcription.random_weights(TOY, task="segmentation")
    return {f"backbone.{name}": tensor for name, tensor in backbone.items()} | mmsegmentation_heads()


def save(path, state):
    torch.save({"state_dict": state, "meta": {"epoch": 1}}, path)
    return path


def test_the_whole_model_loads(state, tmp_path):
    path = save(tmp_path / "upernet.pth", state)
    assert ppma.open_checkpoint(path).task == "segmentation"
    model, config, classes = load_segmenter(path, kinds=KINDS)
    assert classes == tuple("01234")
    assert [head.classifier[1].in_channels for head in (model.decode_head, model.auxiliary_head)] == [
        CHANNELS,
        AUXILIARY,
    ]
    assert config.test.mode == "slide"
    assert model.backbone.config.formulation == "release"
    heads = model.decode_head, model.auxiliary_head
    assert torch.equal(heads[0].classifier[1].weight, state["decode_head.conv_seg.weight"])
    assert torch.equal(heads[1].classifier[1].bias, state["auxiliary_head.conv_seg.bias"])
    pooled = getattr(getattr(heads[0].psp_modules, "2"), "1")
    assert torch.equal(pooled.batch_norm.running_mean, state["decode_head.psp_modules.2.1.bn.running_mean"])
    assert torch.equal(heads[0].fpn_convs[1].conv.weight, state["decode_head.fpn_convs.1.conv.weight"])
    assert torch.equal(model.backbone.feature_norms["3"].bias, state["backbone.outnorm3.bias"])


@torch.no_grad()
def test_it_computes_what_the_layout_means(state, tmp_path):
    """The decoder written out here from the weights of the file, over the features of the loaded backbone."""
    model, _, _ = load_segmenter(save(tmp_path / "upernet.pth", state), kinds=KINDS)
    image = torch.randn(1, 3, 64, 96, generator=torch.Generator().manual_seed(0))
    backbone = ppma.load_checkpoint(tmp_path / "upernet.pth", kinds=KINDS)
    stages = backbone.forward_intermediates(image, intermediates_only=True)
    functional = torch.nn.functional

    def module(name, x):
        weight = state[f"decode_head.{name}.conv.weight"]
        x = functional.conv2d(x, weight, padding=weight.shape[-1] // 2)
        norm = [state[f"decode_head.{name}.bn.{part}"] for part in ("running_mean", "running_var", "weight", "bias")]
        return functional.batch_norm(x, *norm).relu()

    def resize(x, like):
        return functional.interpolate(x, like.shape[-2:], mode="bilinear")

    pooled = [functional.adaptive_avg_pool2d(stages[3], scale) for scale in (1, 2, 3, 6)]
    pooled = [resize(module(f"psp_modules.{i}.1", x), stages[3]) for i, x in enumerate(pooled)]
    levels = [module(f"lateral_convs.{i}", stages[i]) for i in range(3)]
    levels.append(module("bottleneck", torch.cat([stages[3], *pooled], 1)))
    for i in (2, 1, 0):
        levels[i] = levels[i] + resize(levels[i + 1], levels[i])
    out = [module(f"fpn_convs.{i}", levels[i]) for i in range(3)] + [levels[3]]
    x = module("fpn_bottleneck", torch.cat([resize(level, out[0]) for level in out], 1))
    x = functional.conv2d(x, state["decode_head.conv_seg.weight"], state["decode_head.conv_seg.bias"])
    expected = resize(x, image)
    # float32 sums of at most 9 x 96 products: far below 1e-4 of the largest score
    torch.testing.assert_close(model(image).main, expected, rtol=0, atol=1e-4 * expected.abs().max().item())


def test_unnamed_classes_are_measured_by_any_names(scenes, state, tmp_path, monkeypatch):
    model, config, _ = load_segmenter(save(tmp_path / "upernet.pth", state), kinds=KINDS)
    stored = dataclasses.replace(config, data=dataclasses.replace(config.data, classes=None))
    monkeypatch.setattr(inference, "load_segmenter", lambda path: (model, stored, numbered(CLASSES)))
    with pytest.raises(ValueError, match="the data has 11 and the checkpoint 5"):
        Segmentation.evaluate("x", str(scenes))
    root = tmp_path / "scenes"
    shutil.copytree(scenes, root)
    (root / "classes.txt").write_text("a b c d e".replace(" ", "\n"))
    for path in (root / "annotations" / "validation").iterdir():
        Image.fromarray(np.full((64, 64), 5, np.uint8)).save(path)
    assert Segmentation.evaluate("x", str(root), assignments=["test.mode=whole"])["count"] == 3


def test_what_does_not_fit_is_named(state, tmp_path):
    del state["decode_head.fpn_convs.0.bn.bias"]
    with pytest.raises(CheckpointError, match=r"missing: decode_head\.fpn_convs\.0\.batch_norm\.bias"):
        load_segmenter(save(tmp_path / "cut.pth", state), kinds=KINDS)
    with pytest.raises(CheckpointError, match=r"found no 'decode_head\.conv_seg\.weight'"):
        load_segmenter(save(tmp_path / "other.pth", {"backbone.x": torch.zeros(1)}))


def test_classifiers_are_no_segmenters(digits_run, tmp_path, capsys):
    with pytest.raises(CheckpointError, match="expected a segmentation model, found none"):
        load_segmenter(digits_run / "best.safetensors")
    assert ppma.open_checkpoint(digits_run / "best.safetensors").task == "classification"
    assert main(["predict", str(tmp_path / "none.safetensors"), "x.png"]) == 2
    assert "expected a weight file" in capsys.readouterr().err
