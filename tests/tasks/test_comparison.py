"""`ppma compare`: models compared on classification and detection."""

import json

import pytest
import timm
from short_run import SHORT_DENSE, SMALL_DETECTOR, settings

from ppma.tasks import study
from ppma_cli import main

CHANGES = settings(
    "epochs=null", "steps=1", "batch_size=4", "eval_steps=1", "data.test_split=null", "data.image_size=32"
)


def test_comparison_command(tmp_path, capsys):
    command = [
        "compare",
        "digits_ablation",
        "--models",
        "ppma_nano,test_resnet",
        "--seeds",
        "2",
        "--out",
        str(tmp_path),
    ]
    assert main([*command, *CHANGES]) == 0
    header, _, *rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert header == "| model | image | M parameters | GFLOPs | images/s | top1, mean ± sd (each seed) |"
    counts = [
        sum(parameter.numel() for parameter in timm.create_model(name, num_classes=10).parameters())
        for name in ("ppma_nano", "test_resnet")
    ]
    assert [row.split(" | ")[:3] for row in rows] == [
        ["| ppma_nano", "32 x 32", f"{counts[0] / 1e6:.2f}"],
        ["| test_resnet", "32 x 32", f"{counts[1] / 1e6:.2f}"],
    ]
    results = json.loads((tmp_path / "comparison.json").read_text())["results"]
    assert [result["model"] for result in results] == ["ppma_nano", "test_resnet"]
    summaries = [tmp_path / "test_resnet" / f"seed{seed}" / "summary.json" for seed in (0, 1)]
    assert results[1]["values"] == [json.loads(path.read_text())["val_top1"] for path in summaries]
    assert results[1]["parameters"] == json.loads(summaries[0].read_text())["parameters"]
    before = [path.stat().st_mtime_ns for path in summaries]
    assert main([*command, *CHANGES]) == 0  # finished runs stay
    assert [path.stat().st_mtime_ns for path in summaries] == before
    capsys.readouterr()
    assert main([*command, *CHANGES, "lr=0.1"]) == 2
    assert "was trained with another configuration (lr: 0.0015 -> 0.1)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("models", "message"),
    [
        ("ppma_nano,resnet81", "did you mean 'resnet18'?"),
        ("ppma_nano,ppma_nano", "models: expected different names"),
    ],
)
def test_comparison_wrong_models(tmp_path, capsys, models, message):
    assert main(["compare", "digits_ablation", "--models", models, "--out", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_comparison_interrupted(tmp_path, capsys, monkeypatch):
    trained = study.train

    def stop(config, run, **options):
        if config.model == "test_resnet":
            raise KeyboardInterrupt
        return trained(config, run, **options)

    monkeypatch.setattr(study, "train", stop)
    command = [
        "compare",
        "digits_ablation",
        "--models",
        "ppma_nano,test_resnet",
        "--seeds",
        "1",
        "--out",
        str(tmp_path),
    ]
    assert main([*command, *CHANGES]) == 130
    shown = capsys.readouterr()
    assert "| ppma_nano |" in shown.out
    assert "run the same command again to continue" in shown.err


def test_comparison_detection(scenes, tmp_path, capsys):
    changes = settings(*SHORT_DENSE, *SMALL_DETECTOR, "steps=1", "eval_steps=1", f"data.root={scenes}")
    command = ["compare", "scenes_maskrcnn_nano", "--models", "test_resnet", "--seeds", "1", "--out", str(tmp_path)]
    assert main([*command, *changes]) == 0
    assert "box_AP, mean ± sd" in capsys.readouterr().out
