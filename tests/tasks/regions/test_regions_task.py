"""`ppma train regions`, `ppma eval` and `ppma ablate` on small grids."""

import json

import pytest
import torch
from short_run import assert_resume_gives_the_same_bits, one_thread, settings

import ppma
from ppma.data.label_maps import IGNORED
from ppma.explore.regions import training_data
from ppma.models.grid import load_grid
from ppma.tasks.ablation import Ablation
from ppma.tasks.regions.task import PixelAccuracy
from ppma.tasks.registry import load_config
from ppma_cli import main

SMALL = (
    "steps=3", "batch_size=4", "eval_steps=3", "checkpoint_steps=1", "keep=3", "log=[csv]", "model_args.dims=[8]",
    "data.size=8", "data.cells=6", "data.regions=2", "data.eval_images=4", "schedule.warmup_steps=1",
)  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "regions"
    with one_thread():
        assert main(["train", "regions", "--out", str(out), *settings(*SMALL)]) == 0
    return out


def test_training_evaluates_every_split(run):
    summary = json.loads((run / "summary.json").read_text())
    assert {"val_accuracy", "test_accuracy", "larger_accuracy", "scaled_accuracy"} <= set(summary)
    assert (summary["test_count"], summary["scaled_count"]) == (4, 1)


def test_resume_same_bits(run, tmp_path):
    with one_thread():
        assert_resume_gives_the_same_bits(
            "regions", run, tmp_path / "again", SMALL, lambda path: (load_grid(ppma.open_checkpoint(path)),)
        )


def test_eval_repeats_training(run, capsys):
    summary = json.loads((run / "summary.json").read_text())
    for split in ("test", "scaled"):
        command = ["eval", str(run / "best.safetensors"), "--data", "regions", "--split", split, "--json"]
        assert main([*command, *settings(*SMALL)]) == 0
        assert json.loads(capsys.readouterr().out)["accuracy"] == pytest.approx(summary[f"{split}_accuracy"])


def test_pathfinder_trains(tmp_path):
    """The recipe of curves trains, and its weights remember what they were trained on."""
    assert main(["train", "pathfinder", "--out", str(tmp_path), *settings(*SMALL)]) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["test_count"], summary["scaled_count"]) == (4, 1)
    trained = training_data(ppma.open_checkpoint(tmp_path / "best.safetensors"))
    assert (trained.shape, trained.length, trained.size) == ("curves", 30, 8)


@pytest.mark.parametrize("command", [["predict", "cat.png"], ["export", "x.onnx"]])
def test_other_commands_refuse(run, command, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([command[0], str(run / "best.safetensors"), *command[1:]]) == 2
    message = capsys.readouterr().err
    assert "expected a model of photographs, got one of the regions task" in message
    assert message.count("\n") == 1


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("model=ppma_nano", "model: expected 'grid', the model of this task, got 'ppma_nano'"),
        ("model_args.stem_stride=2", "model argument: expected one of"),
        ("model_args.depths=[1,1]", "expected one entry for each of 2 stages"),
        ("model_args.decay_start=weak", "decay_start: expected one of 'release', 'strong', got 'weak'"),
        ("data.regions=99", "data.regions: expected at most the 30 cells, got 99"),
    ],
)
def test_configuration_mistakes(assignment, message, capsys):
    assert main(["train", "regions", "--out", "unused", assignment]) == 2
    assert message in capsys.readouterr().err


def test_pixel_accuracy():
    """Over labelled pixels, summed over batches and processes."""
    labels = torch.tensor([[[0, 1], [IGNORED, 1]]])
    scores = torch.nn.functional.one_hot(torch.tensor([[[0, 0], [1, 1]]]), 2).movedim(-1, 1).float()
    first, second = PixelAccuracy(), PixelAccuracy()
    first.update(lambda images: scores, (None, labels))
    second.update(lambda images: scores, (None, torch.zeros_like(labels)))
    assert first.compute([first.state()]) == {"accuracy": pytest.approx(100 * 2 / 3)}
    assert first.compute([first.state(), second.state()]) == {"accuracy": pytest.approx(100 * 4 / 7)}


def test_ablation_table(tmp_path, capsys):
    """A column for each split, a row for each mask and formulation, p-values against "none" of the same row."""
    command = ["ablate", "regions", "--masks", "none,2d,2d-linear", "--seeds", "2", "--out", str(tmp_path)]
    assert main([*command, "--vary", "model_args.formulation=paper,release", *settings(*SMALL)]) == 0
    header, _, *rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert header.endswith("| accuracy, mean ± sd (each seed) | larger | scaled |")
    names = ["none", "2d", "2d-linear"]
    labels = [f"{name},formulation={one}" for one in ("paper", "release") for name in names]
    assert [row.split(" | ")[0] for row in rows] == [f"| {label}" for label in labels]
    compared = [row.count(", p ") for row in rows]
    assert compared == [0, 3, 0] * 2  # there is no "none-linear" to compare with
    results = json.loads((tmp_path / "ablation.json").read_text())["results"]
    assert [len(result["others"]["scaled"]) for result in results] == [2] * 6
    stored = load_config(tmp_path / "2d-linear,formulation=release" / "seed1" / "config.yaml")
    assert (stored.grid.kinds, stored.grid.formulation, stored.seed) == (("linear",), "release", 1)
    assert main([*command, "--vary", "formulation", *settings(*SMALL)]) == 2
    assert "vary: expected KEY=VALUE,VALUE,..., got 'formulation'" in capsys.readouterr().err


def test_vary_lists(tmp_path):
    """A value may be a list, and every combination of two settings is trained."""
    study = Ablation(
        load_config("regions", SMALL), ["2d"], 1, tmp_path,
        ["model_args.decay_start=[0.3,0.8,0.3],strong", "optimizer.decay_lr_scale=1,10"],
    )  # fmt: skip
    found = {
        name: (runs[0][0].grid.decay_start, runs[0][0].optimizer.decay_lr_scale) for name, runs in study.runs.items()
    }
    assert found == {
        "2d,decay_start=[0.3,0.8,0.3],decay_lr_scale=1": ((0.3, 0.8, 0.3), 1.0),
        "2d,decay_start=[0.3,0.8,0.3],decay_lr_scale=10": ((0.3, 0.8, 0.3), 10.0),
        "2d,decay_start=strong,decay_lr_scale=1": ("strong", 1.0),
        "2d,decay_start=strong,decay_lr_scale=10": ("strong", 10.0),
    }
