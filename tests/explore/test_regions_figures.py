"""Figures of the regions task: what is drawn is what the model and the runs have."""

import json

import numpy as np
import pytest
import torch

from ppma.data.regions import Regions, RegionsDataConfig
from ppma.explore import regions
from ppma.explore.capture import capture_image
from ppma.explore.query import query_panels
from ppma.models.checkpoints import write_checkpoint
from ppma.models.grid import GridModel, grid_config
from ppma_cli import main

DATA = {"size": 10, "cells": 8, "regions": 3}


@pytest.fixture
def study(tmp_path):
    """The folder of a study: two masks, two seeds each, random weights."""
    for mask in ("none", "2d"):
        for seed in (0, 1):
            run = tmp_path / mask / f"seed{seed}"
            run.mkdir(parents=True)
            torch.manual_seed(seed)
            model = GridModel(grid_config(5, 4, mask=mask, dims=[8]))
            facts = {"classes": list("abcd"), "config": {"data": DATA}}
            write_checkpoint(run / "best.safetensors", model.state_dict(), model.config, task="regions", facts=facts)
            rows = [f"{step},{seed + 10 * step + (mask == '2d')}" for step in (1, 2)]
            (run / "metrics.csv").write_text("\n".join(["step,val_accuracy", *rows]))
    (tmp_path / "ablation.json").write_text(json.dumps({"results": [{"mask": "none"}, {"mask": "2d"}]}))
    return tmp_path


def test_regions_decays_figure():
    torch.manual_seed(0)
    model = GridModel(grid_config(5, 4, dims=[8], decay_start="strong")).eval()
    data = Regions(RegionsDataConfig(**DATA), "test")
    figure = regions.decays_figure(model, data, 3, (2, 4))
    axes = {axis.get_title(): axis for axis in figure.axes}
    panels = query_panels(capture_image(model, data[3][0])[1], (2, 4))
    for title, values in (("α", panels.alpha), ("mask of the query", panels.mask)):
        drawn = np.ma.filled(axes[f"block 2: {title}"].images[0].get_array().astype(float), np.nan)
        np.testing.assert_array_equal(drawn, values.double().numpy())
    predicted = model(data[3][0][None])[0].argmax(0)
    labelled = data[3][1] != 255
    right = (predicted == data[3][1])[labelled].double().mean()
    assert f"prediction, {100 * right:.1f} % right" in axes


def test_learning_figure(study):
    lines = {line.get_label(): line for line in regions.learning_figure(study).axes[0].lines}
    assert lines["none"].get_ydata().tolist() == [10.5, 20.5]
    assert lines["2d"].get_ydata().tolist() == [11.5, 21.5]
    assert lines["2d"].get_xdata().tolist() == [1, 2]


def test_regions_figure_commands(study, capsys):
    for command in (
        ["regions", "--checkpoint", str(study / "2d" / "seed0" / "best.safetensors"), "--split", "scaled"],
        ["regions-sizes", "--runs", str(study)],
        ["learning", "--runs", str(study)],
    ):
        assert main(["figure", *command, "--out", str(study / f"{command[0]}.png")]) == 0
        assert (study / f"{command[0]}.png").stat().st_size > 5000
    capsys.readouterr()
    for command, message in (
        (["learning", "--runs", str(study / "2d")], "runs: expected the folder of a study"),
        (
            ["regions", "--checkpoint", str(study / "2d" / "seed0" / "best.safetensors"), "--index", "0"],
            "index: expected 1",
        ),
    ):
        assert main(["figure", *command, "--out", str(study / "x.png")]) == 2
        assert message in capsys.readouterr().err
