"""`ppma predict` and `ppma eval` on files that are not what they should be: a line each, and the rest is done."""

import csv
import json
import shutil

import pytest
import torch
from PIL import Image

from ppma.data.arrays import digits
from ppma.engine.evaluation import TooManyBrokenError
from ppma.models import open_checkpoint
from ppma.models.loading import load_classifier
from ppma.tasks.classification.task import Classification
from ppma_cli import main


@pytest.fixture
def checkpoint(digits_run):
    return str(digits_run / "best.safetensors")


@pytest.fixture
def picture(tmp_path):
    path = tmp_path / "digit.png"
    digits("test")[0][0].save(path)
    return path


@pytest.fixture
def bad(tmp_path):
    """Arguments that are no images, with what is said about each."""
    (tmp_path / "README.md").write_text("# no image")
    (tmp_path / "cut.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    (tmp_path / "link.png").symlink_to("nowhere.png")
    (tmp_path / "empty").mkdir()
    (tmp_path / "nested" / "inner").mkdir(parents=True)
    (tmp_path / "nested" / "notes.txt").touch()
    return {
        tmp_path / "README.md": "not an image",
        tmp_path / "cut.png": "cut.png: ",
        tmp_path / "link.png": "a link to nowhere.png, which does not exist",
        tmp_path / "none.png": "no such file",
        tmp_path / "empty": "found 0 other files and 0 folders",
        tmp_path / "nested": "found 1 other files and 1 folders",
    }


def test_predict_bad_images_are_lines_and_the_rest_is_done(checkpoint, picture, bad, capsys):
    again = shutil.copy(picture, picture.with_name("again.png"))
    assert main(["predict", checkpoint, str(picture), *map(str, bad), str(again), "--top", "1"]) == 2
    printed = capsys.readouterr()
    assert printed.out.splitlines()[::2] == [str(picture), str(again)]
    *lines, last = printed.err.splitlines()
    assert last == f"ppma predict: {len(bad)} failed, 2 predicted"
    assert len(lines) == len(bad)
    for path, said in bad.items():
        (line,) = [line for line in lines if line.startswith(f"ppma predict: {path}: ")]
        assert said in line


def test_predict_json_is_whole_beside_bad_images(checkpoint, picture, bad, capsys):
    assert main(["predict", checkpoint, *map(str, bad), str(picture), "--json"]) == 2
    assert [one["image"] for one in json.loads(capsys.readouterr().out)] == [str(picture)]
    assert main(["predict", checkpoint, *map(str, bad), "--json"]) == 2
    assert json.loads(capsys.readouterr().out) == []


def test_predict_interrupted_keeps_results(checkpoint, picture, tmp_path, capsys, monkeypatch):
    seen = []
    real = Image.open

    def fail_later(file, *args, **kwargs):
        seen.append(file)
        if len(seen) == 3:
            raise KeyboardInterrupt
        return real(file, *args, **kwargs)

    copies = [shutil.copy(picture, tmp_path / f"{number}.png") for number in range(3)]
    monkeypatch.setattr(Image, "open", fail_later)
    words = ["--json", "--batch-size", "1", "--top", "2", "--out", str(tmp_path / "out")]
    assert main(["predict", checkpoint, *map(str, copies), *words]) == 130
    assert len(json.loads(capsys.readouterr().out)) == 2
    assert [row["file"] for row in table(tmp_path / "out")] == [str(path) for path in copies[:2] for _ in range(2)]


def table(out):
    with open(out / "predictions.csv", newline="") as file:
        return list(csv.DictReader(file))


def test_predict_table(checkpoint, tmp_path, capsys):
    """Every batch size gives the same probabilities, which are those of the model."""
    (tmp_path / "digits").mkdir()
    for index in range(5):
        digits("test")[index][0].save(tmp_path / "digits" / f"{index}.png")
    command = ["predict", checkpoint, str(tmp_path / "digits"), "--top", "3"]
    tables = {}
    for size in (1, 2, 16):
        out = tmp_path / f"batches of {size}"
        assert main([*command, "--out", str(out), "--batch-size", str(size)]) == 0
        assert capsys.readouterr().out.splitlines()[-1] == f"5 predicted, results in {out}"
        tables[size] = table(out)
    assert list(tables[1][0]) == ["file", "rank", "class", "probability"]
    assert [(row["file"], row["rank"]) for row in tables[2]] == [
        (str(tmp_path / "digits" / f"{index}.png"), str(rank)) for index in range(5) for rank in (1, 2, 3)
    ]
    model, preprocessing, classes = load_classifier(checkpoint)
    images = torch.stack([preprocessing.transform()(digits("test")[index][0]) for index in range(5)])
    with torch.inference_mode():
        best = model(images).softmax(-1).topk(3)
    for rows in tables.values():
        assert [row["class"] for row in rows] == [classes[index] for index in best.indices.flatten().tolist()]
        assert [float(row["probability"]) for row in rows] == pytest.approx(best.values.flatten().tolist(), rel=1e-5)


def test_predict_existing_results(checkpoint, picture, tmp_path, capsys):
    command = ["predict", checkpoint, str(picture), "--out", str(tmp_path / "out"), "--top"]
    assert main([*command, "1"]) == 0
    assert main([*command, "2"]) == 2
    assert capsys.readouterr().err == (
        f"ppma predict: out: expected a folder without predictions.csv, got {tmp_path}/out; --overwrite replaces it\n"
    )
    assert len(table(tmp_path / "out")) == 1
    assert main([*command, "2", "--overwrite"]) == 0
    assert len(table(tmp_path / "out")) == 2


def test_predict_pattern(checkpoint, picture, tmp_path, capsys):
    assert main(["predict", checkpoint, str(tmp_path / "d*t.png"), str(tmp_path / "x*.png"), "--json"]) == 2
    printed = capsys.readouterr()
    assert [one["image"] for one in json.loads(printed.out)] == [str(picture)]
    assert "x*.png: expected images" in printed.err


@pytest.mark.parametrize("device", ["cuda:99", "gpu"])
def test_predict_unusable_device(checkpoint, picture, device, capsys):
    assert main(["predict", checkpoint, str(picture), "--device", device]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"ppma predict: device: expected one that PyTorch can use, such as cpu, got '{device}' (")


def test_predict_takes_the_images_of_a_folder(checkpoint, picture, tmp_path, capsys):
    folder = tmp_path / "pictures"
    folder.mkdir()
    for name in ("b.png", "a.png"):
        shutil.copy(picture, folder / name)
    (folder / "notes.txt").touch()
    assert main(["predict", checkpoint, str(folder), "--json"]) == 0
    assert [one["image"] for one in json.loads(capsys.readouterr().out)] == [
        str(folder / "a.png"),
        str(folder / "b.png"),
    ]


def test_predict_huge_images_are_lines(checkpoint, picture, tmp_path, capsys, monkeypatch):
    Image.new("1", (80, 60)).save(tmp_path / "large.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 4000)  # Pillow warns above it, and refuses above twice of it
    assert main(["predict", checkpoint, str(tmp_path / "large.png"), "--top", "1"]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: Image size (4800 pixels) exceeds limit of 4000 pixels")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 2000)
    assert main(["predict", checkpoint, str(tmp_path / "large.png"), str(picture), "--top", "1"]) == 2
    printed = capsys.readouterr()
    assert "large.png: Image size (4800 pixels) exceeds limit of 4000 pixels" in printed.err
    assert printed.out.count("digit.png") == 1


@pytest.mark.parametrize("name", ["nowhere", "README.md", "link.png", "empty", "nested"])
def test_eval_wrong_data_is_one_line(checkpoint, bad, tmp_path, capsys, name):
    assert main(["eval", checkpoint, "--data", str(tmp_path / name)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert line.startswith("ppma eval: data")
    assert name in line


def test_eval_broken_images_are_told_on_stderr_and_too_many_end_it(checkpoint, tmp_path, capsys):
    for digit in range(10):
        (tmp_path / "val" / str(digit)).mkdir(parents=True)
        for number in range(6):
            (tmp_path / "val" / str(digit) / f"{number}.png").symlink_to("nowhere.png")
    with pytest.raises(TooManyBrokenError, match="more than max_broken = 50"):
        Classification.evaluate(open_checkpoint(checkpoint), str(tmp_path))
    printed = capsys.readouterr()
    assert printed.out == ""  # which is for the results
    assert printed.err.count("skipped: ") == 60
