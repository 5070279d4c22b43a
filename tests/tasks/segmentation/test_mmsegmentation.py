"""UPerNet from files in MMSegmentation's layout, like the authors'; the tests write them."""

import dataclasses
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from short_run import load_transcription

import ppma
from ppma.data import cityscapes
from ppma.models import CONFIGS, CheckpointError
from ppma.tasks.segmentation import DecoderConfig, inference
from ppma.tasks.segmentation.task import Segmentation
from ppma.tasks.segmentation.weights import _as_tested, load_segmenter
from ppma_cli import main

transcription = load_transcription()

DIMS = (16, 16, 32, 32)
TOY = dataclasses.replace(transcription.TINY, depths=(1, 1, 1, 1), dims=DIMS, heads=(2, 2, 2, 2))
KINDS = ("criss_cross", "criss_cross", "full", "full")
CLASSES, CHANNELS, AUXILIARY = 5, 24, 12


def mmsegmentation_heads(classes=CLASSES):
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
        state[f"{head}.conv_seg.weight"] = torch.randn(classes, width, 1, 1, generator=generator)
        state[f"{head}.conv_seg.bias"] = torch.randn(classes, generator=generator)
    return state


@pytest.fixture
def state():
    backbone = transcription.random_weights(TOY, task="segmentation")
    return {f"backbone.{name}": tensor for name, tensor in backbone.items()} | mmsegmentation_heads()


def save(path, state, **meta):
    torch.save({"state_dict": state, "meta": {"epoch": 1, **meta}}, path)
    return path


def test_load_whole_model(state, tmp_path):
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
def test_load_scores(state, tmp_path):
    """Against the decoder written out with the weights of the file, on the features of the loaded backbone."""
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


@pytest.fixture
def evaluate(monkeypatch):
    """Evaluate a file; the command cannot say which attention this small backbone has in each stage."""
    monkeypatch.setattr(inference, "load_segmenter", lambda path: load_segmenter(path, kinds=KINDS))

    def evaluate(path, data, *changes):
        return Segmentation.evaluate(ppma.open_checkpoint(path), str(data), assignments=changes)

    return evaluate


@pytest.mark.parametrize("meta", [{}, {"CLASSES": ("wall", "building", "sky", "floor", "tree")}])
def test_eval_other_spelling(scenes, state, tmp_path, evaluate, meta):
    """Names of MMSegmentation, or numbers, need not be spelled as those of the data; their number has to fit."""
    path = save(tmp_path / "upernet.pth", state, **meta)
    with pytest.raises(ValueError, match=r"expected 11 names, as .*classes.txt has, got 5"):
        evaluate(path, scenes)
    root = tmp_path / "scenes"
    shutil.copytree(scenes, root)
    (root / "classes.txt").write_text("a b c d e".replace(" ", "\n"))
    for labels in (root / "annotations" / "validation").iterdir():
        Image.fromarray(np.full((64, 64), 5, np.uint8)).save(labels)
    assert evaluate(path, root, "test.mode=whole")["count"] == 3
    recipe = tmp_path / "own.yaml"
    recipe.write_text(f"base: scenes_upernet_nano\ndata: {{root: {root}}}\n")
    assert evaluate(path, recipe)["count"] == 3


def test_meta_classes_and_palette(state, tmp_path):
    names, colours = ["wall", "building", "sky", "floor", "tree"], [[index, 2 * index, 255] for index in range(5)]
    path = save(tmp_path / "upernet.pth", state, CLASSES=names, PALETTE=colours)
    _, _, classes = load_segmenter(path, kinds=KINDS)
    assert classes == tuple(names)
    assert ppma.open_checkpoint(path).palette == tuple(map(tuple, colours))


def test_predict_legend(scenes, state, tmp_path, monkeypatch):
    """The names and colours of the file are those of the drawing."""
    monkeypatch.setattr(inference, "load_segmenter", lambda path: load_segmenter(path, kinds=KINDS))
    names, colours = tuple("vwxyz"), [(10 * index + 1, 77, 200) for index in range(5)]
    checkpoint = ppma.open_checkpoint(save(tmp_path / "upernet.pth", state, CLASSES=names, PALETTE=colours))
    options = Segmentation.parse_options({"out": str(tmp_path / "out")})
    (found,) = Segmentation.predict(checkpoint, [scenes / "val2017" / "000001.jpg"], options)
    with Image.open(found.values["overlay"]) as drawn:
        shown = {tuple(colour) for colour in np.asarray(drawn)[:, 512:].reshape(-1, 3)}
    assert set(found.values["shares"]) <= set(names)
    assert {colours[names.index(name)] for name in found.values["shares"]} <= shown


@torch.no_grad()
def test_cityscapes_150_outputs(state, tmp_path):
    """The first 19 of 150 outputs, in both heads, with the authors' windows and Cityscapes' colours."""
    wide = state | mmsegmentation_heads(150)
    path = save(tmp_path / "upernet.pth", wide, CLASSES=cityscapes.CLASSES)
    with pytest.warns(UserWarning, match=r"upernet.pth: 150 outputs for 19 classes, the first are used"):
        model, config, classes = load_segmenter(path, kinds=KINDS)
    assert classes == cityscapes.CLASSES
    assert (config.data.name, config.data.short_side, config.data.long_side) == ("cityscapes", 1024, 2048)
    assert (config.test.mode, config.test.window, config.test.stride) == ("slide", 1024, 341)
    assert config.data.layout.palette == cityscapes.LAYOUT.palette
    whole, _, _ = load_segmenter(save(tmp_path / "unnamed.pth", wide), kinds=KINDS)
    image = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model(image).main, whole(image).main[:, :19])  # other sizes of matrix products
    for head in ("decode_head", "auxiliary_head"):
        assert torch.equal(getattr(model, head).classifier[1].weight, wide[f"{head}.conv_seg.weight"][:19])
        assert torch.equal(getattr(model, head).classifier[1].bias, wide[f"{head}.conv_seg.bias"][:19])


def test_cityscapes_stride_of_tiny():
    names, decoder = ("ppma_tiny", "rmt_small"), DecoderConfig()
    strides = [_as_tested(cityscapes.CLASSES, CONFIGS[name], decoder).test.stride for name in names]
    assert strides == [768, 341]


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ({"CLASSES": ["a"] * 5}, "meta.CLASSES: expected different names"),
        ({"CLASSES": [1, 2, 3, 4, 5]}, "meta.CLASSES: expected different names, got"),
        ({"CLASSES": list("abcdefg")}, "expected an output for each of the 7 classes, found 5"),
        ({"CLASSES": list("abcde"), "PALETTE": [[1, 2]] * 5}, "meta.PALETTE: expected a colour"),
        ({"CLASSES": list("abcde"), "PALETTE": [[1, 2, 300]] * 5}, "meta.PALETTE: expected a colour"),
        ({"CLASSES": list("abcde"), "PALETTE": [[1, 2, 3]]}, "meta.PALETTE: expected a colour"),
    ],
)
def test_meta_errors(state, tmp_path, meta, message):
    path = save(tmp_path / "upernet.pth", state, **meta)
    with pytest.raises(CheckpointError, match=f"upernet.pth: {message}"):
        load_segmenter(path, kinds=KINDS)


@torch.no_grad()
def test_convert_command(state, tmp_path, capsys):
    """The converted file computes the same and keeps classes and test settings."""
    path, target = save(tmp_path / "upernet.pth", state, CLASSES=tuple("vwxyz")), tmp_path / "upernet.safetensors"
    assert main(["convert", str(path), str(target), "--kinds", *KINDS]) == 0
    assert "UPerNet, 5 classes" in capsys.readouterr().out
    (before, *settings), (after, *kept) = load_segmenter(path, kinds=KINDS), load_segmenter(target)
    assert kept == settings
    image = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(before(image).main, after(image).main)


def test_load_errors(state, tmp_path):
    del state["decode_head.fpn_convs.0.bn.bias"]
    with pytest.raises(CheckpointError, match=r"missing: decode_head\.fpn_convs\.0\.batch_norm\.bias"):
        load_segmenter(save(tmp_path / "cut.pth", state), kinds=KINDS)
    with pytest.raises(CheckpointError, match=r"found no 'decode_head\.conv_seg\.weight'"):
        load_segmenter(save(tmp_path / "other.pth", {"backbone.x": torch.zeros(1)}))


def test_load_classifier(digits_run, tmp_path, capsys):
    with pytest.raises(CheckpointError, match="expected a segmentation model, found none"):
        load_segmenter(digits_run / "best.safetensors")
    assert ppma.open_checkpoint(digits_run / "best.safetensors").task == "classification"
    assert main(["predict", str(tmp_path / "none.safetensors"), "x.png"]) == 2
    assert "expected a weight file" in capsys.readouterr().err
