"""`ppma data`."""

import json

import numpy as np
import pytest
from PIL import Image

from ppma.data.scenes import SEMANTIC_CLASSES, compose
from ppma.data.scenes_files import write_scenes
from ppma_cli import main


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    out = tmp_path_factory.mktemp("data") / "scenes"
    write_scenes(out, train=8, val=2, size=64)
    return out


@pytest.fixture
def photos(tmp_path):
    """Six red and four blue training images, one of each colour to validate on."""
    for split, red, blue in (("train", 6, 4), ("val", 1, 1)):
        for name, count in (("red", red), ("blue", blue)):
            folder = tmp_path / "photos" / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                Image.new("RGB", (40 + number, 30), name).save(folder / f"{number}.png")
    return tmp_path / "photos"


def check(capsys, *words):
    """The exit code, the rows of stdout split into words, and stderr."""
    code = main(["data", "check", *map(str, words)])
    printed = capsys.readouterr()
    return code, [line.split() for line in printed.out.splitlines()], printed.err


def folder_words(photos, *more):
    return "folder_finetune", f"data.root={photos}", "batch_size=4", *more


def test_check_classification_counts(photos, capsys):
    (photos / "train" / "red" / "3.png").write_text("no image")
    code, rows, _ = check(capsys, *folder_words(photos))
    assert code == 0
    sizes = ["width", "40", "to", "45,", "height", "30", "to", "30,", "most", "often"]
    assert rows[1][:-4] == ["train", "10", "10", "1", *sizes]
    assert rows[2] == ["val", "2", "2", "0", "all", "40", "x", "30"]
    assert rows[5:7] == [["blue", "4", "44.4%", "1", "50.0%"], ["red", "5", "55.6%", "1", "50.0%"]]
    assert rows[7][:2] == ["broken:", str(photos / "train" / "red" / "3.png") + ":"]


def test_check_detection_counts(scenes, capsys):
    code, rows, _ = check(capsys, "scenes_maskrcnn_nano", f"data.root={scenes}")
    assert code == 0
    digits = [label for index in range(8) for label in compose("train", index, size=64).labels.tolist()]
    table = {row[0]: row for row in rows if len(row) == 5 and row[0].isdigit()}
    assert [int(table[str(digit)][1]) for digit in range(10)] == np.bincount(digits, minlength=10).tolist()


def test_check_segmentation_counts(scenes, capsys):
    code, rows, err = check(capsys, "scenes_upernet_nano", f"data.root={scenes}")
    assert (code, err) == (0, "")
    maps = np.concatenate([compose("train", index, size=64).semantic.ravel() for index in range(8)])
    table = {row[0]: int(row[1].replace(",", "")) for row in rows if len(row) == 5 and row[2].endswith("%")}
    assert [table[name] for name in SEMANTIC_CLASSES] == np.bincount(maps, minlength=11).tolist()
    assert table["(ignored)"] == 0


def test_check_too_many_broken(photos, capsys):
    (photos / "train" / "red" / "3.png").write_text("no image")
    _, rows, _ = check(capsys, *folder_words(photos, "max_broken=0"))
    assert " ".join(rows[-1]) == "1 broken samples: the training fails after max_broken=0"


def test_check_limit(photos, capsys):
    _, rows, _ = check(capsys, *folder_words(photos, "--limit", 3))
    assert rows[1][:4] == ["train", "10", "3", "0"]


@pytest.mark.parametrize("recipe", ["scenes_maskrcnn_nano", "scenes_upernet_nano"])
def test_check_sheet_dense(recipe, scenes, capsys, tmp_path):
    out = tmp_path / "sheet.png"
    code, rows, _ = check(capsys, recipe, f"data.root={scenes}", "--out", out, "--panels", 4)
    assert (code, rows[-1]) == (0, ["wrote", str(out)])
    with Image.open(out) as sheet:
        assert sheet.size == (530, 562)
        captions = np.asarray(sheet.convert("L"))[262:278]
    assert (captions < 128).any()


def test_check_sheet_classification(photos, capsys, tmp_path):
    """Colours survive the normalisation and its inverse."""
    out = tmp_path / "sheet.png"
    settings = ("augment.color_jitter=0", "augment.erasing=0", "--out", out, "--panels", 4)
    assert check(capsys, *folder_words(photos, *settings))[0] == 0
    with Image.open(out) as sheet:
        colours = {sheet.getpixel((6 + 128 + 262 * column, 6 + 128 + 278 * row)) for row in (0, 1) for column in (0, 1)}
    assert colours <= {(255, 0, 0), (0, 0, 255)}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data.root=nowhere"], "data.root: expected a folder"),
        (["batch_size=11"], "batch_size: expected at most the 10 samples, got 11"),
        (["--limit", "0"], "--limit: expected at least 1, got 0"),
        (["--out", "sheet.gif"], "--out: expected a name that ends in .png, got 'sheet.gif'"),
    ],
)
def test_check_refused(photos, capsys, words, message):
    code, rows, err = check(capsys, *folder_words(photos, *words))
    assert (code, rows, err.count("\n")) == (2, [], 1)
    assert message in err


def test_check_all_broken(photos, capsys):
    for path in (photos / "train").rglob("*.png"):
        path.write_text("no image")
    code, rows, err = check(capsys, *folder_words(photos))
    assert (code, rows, err.count("\n")) == (2, [], 1)
    assert "split 'train', found all 10 that were read are broken, the first: " in err


def test_check_reader_warning(scenes, capsys, tmp_path):
    """What a reader leaves out is one line."""
    contents = json.loads((scenes / "annotations" / "instances_train2017.json").read_text())
    contents["annotations"][0]["bbox"] = [0, 0, 0, 0]
    copy = tmp_path / "scenes"
    (copy / "annotations").mkdir(parents=True)
    (copy / "annotations" / "instances_train2017.json").write_text(json.dumps(contents))
    validation = (scenes / "annotations" / "instances_val2017.json").read_text()
    (copy / "annotations" / "instances_val2017.json").write_text(validation)
    for split in ("train2017", "val2017"):
        (copy / split).symlink_to(scenes / split)
    code, _, err = check(capsys, "scenes_maskrcnn_nano", f"data.root={copy}")
    assert code == 0
    assert "left out: 1 degenerate boxes" in err
