"""`ppma ablate`: masks compared on classification and segmentation."""

import dataclasses
import json

import pytest
import timm
from short_run import SHORT_DENSE, SMALL_DECODER, settings

import ppma
from ppma.models.profile import profile
from ppma.tasks.ablation import PAPER
from ppma.tasks.classification.task import Classification
from ppma.tasks.segmentation.task import Segmentation
from ppma.tasks.study import Result
from ppma_cli import main


def test_ablation_command(tmp_path, capsys):
    changes = settings("epochs=null", "steps=1", "batch_size=4", "eval_steps=1", "data.test_split=null")
    command = ["ablate", "digits_ablation", "--masks", "none,2d", "--seeds", "1", "--out", str(tmp_path)]
    assert main([*command, *changes]) == 0
    table = capsys.readouterr().out
    assert "| none | 915,194 |" in table
    assert "| 14.34 | 2.71 | 1034 | 82.6 | 48.73 |" in table
    before = (tmp_path / "2d" / "seed0" / "summary.json").stat().st_mtime_ns
    assert main([*command, *changes]) == 0  # finished runs stay
    assert (tmp_path / "2d" / "seed0" / "summary.json").stat().st_mtime_ns == before
    results = json.loads((tmp_path / "ablation.json").read_text())["results"]
    assert [result["mask"] for result in results] == ["none", "2d"]
    capsys.readouterr()
    assert main([*command, "--latex", *changes]) == 0
    printed = capsys.readouterr().out
    assert (tmp_path / "ablation.tex").read_text() in printed
    assert r"mask & parameters (M) & GFLOPs & images/s & top1 \\" in printed
    assert set(PAPER) == set(ppma.masks.KINDS)
    config = tmp_path / "2d" / "seed0" / "config.yaml"  # as an earlier version wrote it, without a newer key
    config.write_text("".join(line for line in config.open() if not line.startswith("sync_batch_norm_skip")))
    assert main([*command, *changes]) == 0
    capsys.readouterr()
    assert main([*command, *changes, "lr=0.1"]) == 2  # not what these runs were trained with
    assert "was trained with another configuration (lr: 0.0015 -> 0.1)" in capsys.readouterr().err
    assert main(["ablate", "digits_ablation", "--masks", "2dd"]) == 2
    assert "did you mean '2d'?" in capsys.readouterr().err


@pytest.fixture
def _quick_timing(monkeypatch):
    monkeypatch.setattr(Classification, "eval_batch_size", 1)


ABLATION = settings("epochs=null", "steps=1", "batch_size=4", "eval_steps=1", "data.test_split=null")


@pytest.mark.usefixtures("_quick_timing")
def test_ablation_seed_by_seed(tmp_path, monkeypatch):
    """An interrupted study has as many seeds of one mask as of the others."""
    trained = []

    def stop_after_three(config, out, **_):
        if len(trained) == 3:
            raise KeyboardInterrupt
        trained.append((config.model_args["mask"], config.seed))
        return {"val_top1": 50.0}

    monkeypatch.setattr("ppma.tasks.study.train", stop_after_three)
    command = ["ablate", "digits_ablation", "--masks", "none,2d", "--seeds", "3", "--out", str(tmp_path)]
    assert main([*command, *ABLATION]) != 0
    assert trained == [("none", 0), ("2d", 0), ("none", 1)]
    results = json.loads((tmp_path / "ablation.json").read_text())["results"]
    assert [len(result["values"]) for result in results] == [2, 1]


@pytest.mark.usefixtures("_quick_timing")
def test_ablation_custom_mask(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(ppma.masks.KINDS, "own", ppma.masks.KINDS["2d"])
    command = ["ablate", "digits_ablation", "--masks", "own", "--seeds", "1", "--out", str(tmp_path)]
    assert main([*command, *ABLATION]) == 0
    assert "| own | 915,718 |" in capsys.readouterr().out
    (row,) = (line for line in (tmp_path / "ablation.md").read_text().splitlines() if line.startswith("| own"))
    assert row.endswith("| – | – | – | – | – |")


@pytest.mark.usefixtures("_quick_timing")
def test_ablation_attention_kinds(tmp_path, capsys):
    command = ["ablate", "digits_ablation", "--seeds", "1", "--out", str(tmp_path), "--masks"]
    assert main([*command, "2d-linear,2d-decomposed", *ABLATION]) == 0
    assert "| 2d-decomposed | 915,718 |" in capsys.readouterr().out
    assert main([*command, "2d-linaer"]) == 2
    assert "did you mean 'linear'?" in capsys.readouterr().err


@pytest.mark.usefixtures("_quick_timing")
def test_ablation_checks_masks_first(tmp_path, capsys, monkeypatch):
    def broken(*_):
        raise ValueError("own mask: expected a square grid")

    monkeypatch.setitem(ppma.masks.KINDS, "own", ppma.masks.MaskKind(learned=2, build=broken))
    command = ["ablate", "digits_ablation", "--masks", "2d,own", "--seeds", "1", "--out", str(tmp_path)]
    assert main([*command, *ABLATION]) == 2
    assert "own mask: expected a square grid" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("_quick_timing")
def test_ablation_keeps_finished_runs(tmp_path, capsys):
    (tmp_path / "2d" / "seed0").mkdir(parents=True)
    (tmp_path / "2d" / "seed0" / "best.safetensors").write_bytes(b"somebody's work")
    command = ["ablate", "digits_ablation", "--masks", "none,2d", "--seeds", "1", "--out", str(tmp_path)]
    assert main([*command, *ABLATION]) == 2
    shown = capsys.readouterr()
    assert "| none | 915,194 |" in shown.out
    assert "2d/seed0 holds best.safetensors, but no checkpoint" in shown.err
    results = json.loads((tmp_path / "ablation.json").read_text())["results"]
    assert [result["mask"] for result in results] == ["none"]


def test_result_latex_scores():
    seeds = Result("2d", 915_718, 10**7, (32, 32), 100.0, "top1", (90.0, 91.0, 92.0), {})
    assert seeds.latex_scores() == [r"$91.00 \pm 1.00$"]
    assert dataclasses.replace(seeds, values=(90.0,), others={"far": (80.0,)}).latex_scores() == ["$90.00$", "$80.00$"]


@pytest.mark.parametrize("mask", PAPER)
def test_paper_cost(mask):
    """Table 4 for PPMA-T, whose V2H row counts two paths in the criss-cross stages, where V2H has one.

    Each of our two scans is a full attention of its own; the table counts one.
    """
    ours = profile(timm.create_model("ppma_tiny", mask=mask, formulation="release"), (224, 224)).total
    second_path = sum(2 * side**3 * 2 * dim for side, dim in ((56, 64), (28, 128)))  # N (H + W) C in two blocks each
    second_scan = sum(blocks * 2 * side**4 * dim for blocks, side, dim in ((8, 14, 256), (2, 7, 512)))  # 2 N^2 C each
    macs = ours.macs + second_path * (mask == "v2h") - second_scan * (mask in ("cross", "hilbert"))
    assert round(ours.parameters / 1e6, 2) == PAPER[mask].parameters
    assert round(macs / 1e9, 2) == PAPER[mask].gflops


@pytest.fixture
def ablate_scenes(scenes, tmp_path, monkeypatch):
    """Ablate on a few small scenes; takes masks and changes of the recipe."""
    monkeypatch.setattr(Segmentation, "eval_batch_size", 1)
    small = (*SHORT_DENSE, *SMALL_DECODER, "steps=1", "eval_steps=1", f"data.root={scenes}")
    sizes = ("data.short_side=32", "data.long_side=32", "augment.crop=32")

    def ablate(masks, *changes):
        command = ["ablate", "scenes_ablation", "--masks", masks, "--seeds", "1", "--out", str(tmp_path / "out")]
        return main([*command, *settings(*small, *sizes, *changes)])

    return ablate


def test_ablation_segmentation(ablate_scenes, tmp_path, capsys):
    """The same table with mIoU, and the paper's mIoU beside it."""
    assert ablate_scenes("none,2d") == 0
    header, _, *rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert "| mIoU, mean ± sd (each seed) |" in header
    assert [row.split(" | ")[-1] for row in rows] == ["47.78 |", "48.73 |"]
    document = json.loads((tmp_path / "out" / "ablation.json").read_text())
    summary = json.loads((tmp_path / "out" / "2d" / "seed0" / "summary.json").read_text())
    none, both = document["results"]
    assert (both["metric"], both["values"]) == ("mIoU", [summary["val_mIoU"]])
    assert both["parameters"] == summary["parameters"] > none["parameters"]  # the learned decays
    assert both["macs"] > none["macs"]


def test_ablation_segmentation_init(ablate_scenes, tmp_path, capsys):
    """Each mask starts from the classifier that was trained with it."""
    for mask in ("none", "2d"):
        model = timm.create_model("ppma_nano", stem_stride=4, num_classes=2, mask=mask)
        ppma.save_checkpoint(model, tmp_path / f"{mask}0.safetensors")
    assert ablate_scenes("none,2d", f"init={tmp_path}/{{mask}}{{seed}}.safetensors") == 0
    trained = ppma.open_checkpoint(tmp_path / "out" / "none" / "seed0" / "best.safetensors")
    assert trained.backbone.mask == "none"
    assert ablate_scenes("v2h", f"init={tmp_path}/{{mask}}{{seed}}.safetensors") == 2
    assert f"found none at {tmp_path}/v2h0.safetensors" in capsys.readouterr().err


def test_ablation_other_task(tmp_path, capsys, monkeypatch):
    monkeypatch.delattr(Classification, "macs")
    assert main(["ablate", "digits_ablation", "--out", str(tmp_path)]) == 2
    assert "task: expected one that counts and times its models, got classification" in capsys.readouterr().err


def test_ablation_timm_model(tmp_path, capsys):
    assert main(["ablate", "digits_ablation", "--out", str(tmp_path), "model=test_resnet"]) == 2
    assert "model: expected one of 'ppma_nano'" in capsys.readouterr().err
