"""A test split of segmentation is evaluated once, with the best weights."""

import json
import shutil

from short_run import SHORT_DENSE, SMALL_DECODER, settings

from ppma_cli import main


def test_segmentation_test_split(scenes, tmp_path, capsys):
    root = tmp_path / "scenes"
    shutil.copytree(scenes, root)
    for kind in ("images", "annotations"):
        shutil.copytree(root / kind / "validation", root / kind / "test")
    for part in (root / "images" / "test", root / "annotations" / "test"):
        sorted(part.iterdir())[0].unlink()
    changes = (*SHORT_DENSE, *SMALL_DECODER, "steps=1", "eval_steps=1", f"data.root={root}", "data.test_split=test")
    assert main(["train", "scenes_upernet_nano", "--out", str(tmp_path / "run"), *settings(*changes, "log=[csv]")]) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["val_count"], summary["test_count"]) == (3, 2)
    assert summary["test_mIoU"] >= 0
    capsys.readouterr()
    best = str(tmp_path / "run" / "best.safetensors")
    assert main(["eval", best, "--data", str(root), "--json"]) == 0  # the test split
    assert json.loads(capsys.readouterr().out)["count"] == 2
    assert main(["eval", best, "--data", str(root), "--json", "--split", "validation"]) == 0
    assert json.loads(capsys.readouterr().out)["count"] == 3
