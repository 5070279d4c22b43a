"""What the packaged recipes train."""

import dataclasses
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image

from ppma import recipes
from ppma.data.segmentation import SegmentationImages
from ppma.models import CONFIGS
from ppma.tasks.registry import load_config

OF_THE_AUTHORS = [name for name in recipes.names() if name.startswith(("imagenet", "ade20k", "cityscapes", "coco"))]


@pytest.mark.parametrize("name", OF_THE_AUTHORS)
def test_formulation(name):
    """The authors trained the release formulation; recipes of the paper's equations are named so and say it."""
    config = load_config(name)
    backbone = CONFIGS[config.model].replace(**config.model_args)
    paper = name.endswith("_paper")
    assert backbone.formulation == ("paper" if paper else "release")
    assert backbone.mask == ("rmt" if "_rmt_" in name else "2d")
    assert ("never trained" in recipes.description(name)) == paper
    if paper:
        trained = load_config(name.removesuffix("_paper"), ["model_args.formulation=paper"])
        assert dataclasses.replace(config, init=trained.init) == trained


@pytest.mark.parametrize("family", ["ppma", "rmt"])
@pytest.mark.parametrize(("size", "stride"), [("tiny", 768), ("small", 341), ("base", 341)])
def test_cityscapes_windows(family, size, stride):
    config = load_config(f"cityscapes_upernet_{family}_{size}")
    assert (config.data.name, config.data.split("train"), config.data.split("val")) == ("cityscapes", "train", "val")
    assert (config.test.mode, config.test.window, config.test.stride) == ("slide", 1024, stride)
    assert config.data.scaled(1024, 2048) == (1024, 2048)  # tested at the size of the images
    assert (config.augment.crop, config.batch_size, config.scaled_lr) == (1024, 8, 6e-5)


def test_upernet_shared_settings():
    ade20k, cityscapes = (recipes.resolve(f"{data}_upernet_ppma_small") for data in ("ade20k", "cityscapes"))
    different = {key for key in ade20k if ade20k[key] != cityscapes[key]}
    assert different == {"batch_size", "lr_batch_size", "data", "augment", "test"}


@pytest.mark.parametrize(
    ("recipe", "base", "expected"),
    [
        (
            "imagenet_ppma_tiny",
            "_authors_imagenet",
            {"amp": "fp16", "weight_decay_groups": "authors", "per": "epoch", "warmup": False},
        ),
        (
            "cityscapes_upernet_rmt_base",
            "_authors_upernet",
            {"amp": "none", "weight_decay_groups": "authors", "loss_mean": "all", "antialias": False},
        ),
        (
            "coco_maskrcnn_ppma_small_3x",
            "_authors_maskrcnn",
            {"amp": "none", "weight_decay_groups": "authors", "sync_batch_norm": False, "antialias": False},
        ),
    ],
)
def test_authors_base(tmp_path, recipe, base, expected):
    """One base puts every switch on the authors' side and leaves the rest of the recipe."""
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({"base": [recipe, base]}))
    config, before = load_config(path), load_config(recipe)
    sections = [
        part for part in (config, config.optimizer, config.schedule, config.ema, config.data, config.augment) if part
    ]
    found = {key: getattr(part, key) for part in sections for key in expected if hasattr(part, key)}
    assert found == expected
    assert (config.model_args, config.lr, config.schedule.name) == (before.model_args, before.lr, before.schedule.name)


def switches():
    """The keys in the last column of the table of switches in docs/deviations.md, with the data sets of their rows."""
    page = (Path(__file__).parents[2] / "docs" / "deviations.md").read_text()
    table = page.partition("## With a switch")[2].partition("## Without")[0]
    for row in [line for line in table.splitlines() if line.startswith("|")][2:]:
        topic, *_, key = row.strip("| ").split(" | ")
        for recipe, words in {
            "imagenet_ppma_base": ("ImageNet",),
            "ade20k_upernet_ppma_tiny": ("ADE20K", "segmentation", "dense"),
            "coco_maskrcnn_ppma_tiny_1x": ("COCO", "dense"),
        }.items():
            if any(word in topic for word in words):
                yield recipe, key.strip("`").replace(": ", "=")


@pytest.mark.parametrize(("recipe", "switch"), list(switches()))
def test_deviations_page_switch(recipe, switch):
    """Each switch of the page exists and is on our side in the recipe."""
    assert load_config(recipe, [switch]) != load_config(recipe)


def test_cityscapes_data(tmp_path):
    """The Cityscapes recipe, pointed to a tree of its layout, reads it."""
    for folder, kind, mode in (("leftImg8bit", "leftImg8bit", "RGB"), ("gtFine", "gtFine_labelTrainIds", "L")):
        (tmp_path / folder / "val" / "ulm").mkdir(parents=True)
        Image.new(mode, (32, 16)).save(tmp_path / folder / "val" / "ulm" / f"ulm_000000_000019_{kind}.png")
    data = load_config("cityscapes_upernet_ppma_tiny", [f"data.root={tmp_path}"]).data
    _, labels = SegmentationImages(data, data.split("val"))[0]
    assert torch.equal(labels, torch.zeros(16, 32, dtype=torch.int64))
