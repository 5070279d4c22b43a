"""`ppma predict` and `ppma eval` on files that are not what they should be: a line each, and the rest is done."""

import json
import shutil

import pytest
from PIL import Image

from ppma.data.arrays import digits
from ppma.engine.evaluation import TooManyBrokenError
from ppma.models import open_checkpoint
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
    words = [str(picture), *map(str, bad), str(picture)]
    assert main(["predict", checkpoint, *words, "--top", "1"]) == 2
    printed = capsys.readouterr()
    assert printed.out.count(str(picture)) == 2
    lines = printed.err.splitlines()
    assert len(lines) == len(bad)
    for path, said in bad.items():
        (line,) = [line for line in lines if line.startswith(f"ppma predict: {path}: ")]
        assert said in line


def test_predict_json_is_whole_beside_bad_images(checkpoint, picture, bad, capsys):
    assert main(["predict", checkpoint, *map(str, bad), str(picture), str(picture), "--json"]) == 2
    assert [one["image"] for one in json.loads(capsys.readouterr().out)] == [str(picture)] * 2
    assert main(["predict", checkpoint, *map(str, bad), "--json"]) == 2
    assert json.loads(capsys.readouterr().out) == []


def test_predict_prints_each_result_as_it_is_made(checkpoint, picture, tmp_path, capsys, monkeypatch):
    """What was done before a failure that nothing foresaw is there."""
    seen = []
    real = Image.open

    def fail_later(file, *args, **kwargs):
        seen.append(file)
        if len(seen) == 3:
            raise KeyboardInterrupt
        return real(file, *args, **kwargs)

    monkeypatch.setattr(Image, "open", fail_later)
    assert main(["predict", checkpoint, *[str(picture)] * 3, "--json"]) == 130
    assert len(json.loads(capsys.readouterr().out)) == 2


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
