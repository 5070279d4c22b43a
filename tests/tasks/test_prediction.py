"""The folder of result files, and the choice of the device."""

import os
from pathlib import Path

import pytest
import torch
from PIL import Image

from ppma.engine.distributed import select_device
from ppma.tasks.prediction import ResultFolder


def names(folder, paths, suffix="_x.png"):
    return [folder.target(path, suffix).name for path in paths]


def test_result_folder_same_stems(tmp_path):
    paths = [Path(name) for name in ("a/1.jpg", "b/1.jpg", "c/1_2.jpg", "a/1.png", "IMG.jpg", "img.jpg")]
    found = names(ResultFolder(str(tmp_path), paths, ["_x.png"]), paths)
    assert found == ["1_x.png", "1_2_x.png", "1_2_2_x.png", "1_3_x.png", "IMG_x.png", "img_2_x.png"]


def test_result_folder_none():
    folder = ResultFolder(None, [Path("1.jpg")], ["_x.png"], ["all.csv"])
    folder.write("all.csv", b"")
    assert folder.target(Path("1.jpg"), "_x.png") is None
    assert not Path("all.csv").exists()


def test_result_folder_existing(tmp_path):
    (tmp_path / "1_x.png").touch()
    arguments = (str(tmp_path), [Path("1.jpg")], ["_x.png"], ["all.csv"])
    with pytest.raises(ValueError, match=r"out: expected a folder without 1_x\.png"):
        ResultFolder(*arguments)
    folder = ResultFolder(*arguments, overwrite=True)
    assert folder.write_image(Path("1.jpg"), "_x.png", Image.new("L", (2, 1))) == str(tmp_path / "1_x.png")
    with Image.open(tmp_path / "1_x.png") as image:
        assert image.size == (2, 1)


def test_result_folder_image_is_not_replaced(tmp_path):
    for name in ("1.png", "1_x.png"):
        (tmp_path / name).touch()
    with pytest.raises(ValueError, match=r"expected a folder in which 1_x\.png is not one of the images"):
        ResultFolder(str(tmp_path), [tmp_path / "1.png", tmp_path / "1_x.png"], ["_x.png"], overwrite=True)


@pytest.mark.parametrize("out", ["new.png", "file", "file/inside"])
def test_result_folder_no_folder(out, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"^out: "):
        ResultFolder(str(tmp_path / out), [Path("1.jpg")], ["_x.png"])


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root may write everywhere")
def test_result_folder_read_only(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(ValueError, match=r"out: .*: Permission denied"):
        ResultFolder(str(tmp_path))


@pytest.mark.parametrize(("available", "chosen"), [(True, "cuda"), (False, "cpu")])
def test_select_device_default(available, chosen, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    assert select_device(None) == torch.device(chosen)
