"""One reader for every format: how often it opens a file, and what it says of one."""

import json
import os
import sys

import pytest
import timm
import torch
from PIL import Image

import ppma
from ppma.data.preprocessing import Preprocessing
from ppma.models.checkpoints import reader
from ppma_cli import main

opened = []  # paths that Python opened while a test looked; an audit hook cannot be removed
sys.addaudithook(lambda event, arguments: opened.append(str(arguments[0])) if event == "open" else None)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return timm.create_model("ppma_nano", num_classes=3)


@pytest.fixture
def files(model, tmp_path):
    """The same classifier in our format, with and without the suffix, and as `torch.save` writes it."""
    preprocessing = Preprocessing.from_timm({**model.pretrained_cfg, "input_size": (3, 32, 32)})
    native = tmp_path / "native.safetensors"
    ppma.save_checkpoint(model, native, preprocessing=preprocessing, classes="abc")
    torch.save(model.state_dict(), tmp_path / "state.pth")
    return {"native": native, "state": tmp_path / "state.pth"}


@pytest.fixture
def count_opens(monkeypatch):
    """How often a path was opened, by Python or by safetensors."""
    real = reader.safe_open

    def counted(path, **options):
        opened.append(str(path))
        return real(path, **options)

    monkeypatch.setattr(reader, "safe_open", counted)
    opened.clear()
    return lambda path: opened.count(str(path))


@pytest.mark.parametrize("command", ["predict", "info", "convert"])
@pytest.mark.parametrize("kind", ["native", "state"])
def test_commands_open_once(command, kind, files, tmp_path, count_opens, capsys):
    path = str(files[kind])
    Image.new("RGB", (32, 32)).save(tmp_path / "image.png")
    rest = {"predict": [str(tmp_path / "image.png")], "info": [], "convert": [str(tmp_path / "out.safetensors")]}
    assert main([command, path, *rest[command]]) == 0
    assert count_opens(path) == 1
    assert capsys.readouterr().out


def test_checkpoint_properties(files, model):
    checkpoint = ppma.open_checkpoint(files["native"])
    assert (checkpoint.native, checkpoint.task, checkpoint.larger) == (True, "classification", False)
    assert checkpoint.backbone == model.config
    assert checkpoint.classes == ("a", "b", "c")
    assert checkpoint.preprocessing.image_size == 32
    state = ppma.open_checkpoint(files["state"])
    assert (state.native, state.task, state.larger) == (False, "classification", False)
    assert state.backbone == model.config
    assert state.classes is None
    assert state.preprocessing is None


def test_checkpoint_contents_lazy(files, model):
    checkpoint = ppma.open_checkpoint(files["native"])
    os.replace(files["state"], files["native"])  # the open file is what is read, whatever takes its place
    expected = model.state_dict()
    assert checkpoint.contents.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in checkpoint.contents.items())


def test_open_checkpoint_safetensors_other_suffix(files, tmp_path):
    path = files["native"].rename(tmp_path / "weights.bin")
    assert ppma.open_checkpoint(path).classes == ("a", "b", "c")


def test_save_checkpoint_classes_without_preprocessing(model, tmp_path):
    with pytest.raises(ValueError, match="expected both or neither"):
        ppma.save_checkpoint(model, tmp_path / "x.safetensors", classes=("a", "b", "c"))


def test_predict_option_of_another_task(files, tmp_path, capsys):
    Image.new("RGB", (32, 32)).save(tmp_path / "image.png")
    assert main(["predict", str(files["native"]), str(tmp_path / "image.png"), "--threshold", "0.3"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--threshold: not an option of classification" in line


def test_predict_options_by_set(files, tmp_path, capsys):
    Image.new("RGB", (32, 32)).save(tmp_path / "image.png")
    words = ["predict", str(files["native"]), str(tmp_path / "image.png"), "--json", "--set"]
    assert main([*words, "top=2"]) == 0
    assert len(json.loads(capsys.readouterr().out)[0]["classes"]) == 2
    assert main([*words, "tob=2"]) == 2
    assert "tob" in capsys.readouterr().err


def test_predict_unknown_task(model, tmp_path, capsys):
    path = tmp_path / "other.safetensors"
    ppma.models.checkpoints.write_checkpoint(path, model.state_dict(), model.config, task="captioning")
    assert main(["predict", str(path), str(tmp_path)]) == 2
    expected = "expected one of classification, detection, regions, segmentation, got 'captioning'"
    assert expected in capsys.readouterr().err
