"""A segmentation model from inside: the figure of a photograph, and the prediction in the explorer."""

import base64
import io

import numpy as np
import pytest
import torch
from PIL import Image

from ppma.explore import record, subject
from ppma.explore.images import find_image
from ppma.tasks.segmentation.inside import look_figure, segmenter_subject
from ppma_cli import main

PETS = "upernet_ppma_nano.pets"


def test_look_figure_packaged():
    figure = look_figure(PETS, find_image("dog"))
    panels = {axis.get_title(): axis for axis in figure.axes if axis.images}
    assert [*panels] == [
        "image and query", "decay α (horizontal)", "decay β (vertical)",
        "prediction", "mask of the query", "attention with the mask",
    ]  # fmt: skip
    for name in ("decay α (horizontal)", "decay β (vertical)", "mask of the query", "attention with the mask"):
        assert panels[name].images[0].get_array().shape == (32, 39)  # 128 x 154 pixels at stride 4
    weights = panels["mask of the query"].images[0].get_array()
    assert (weights.min(), weights.max()) == (-3, pytest.approx(0, abs=1e-6))
    assert [text.get_text() for text in panels["prediction"].get_legend().get_texts()] == ["pet", "border"]


def test_look_figure_unknown_class():
    with pytest.raises(ValueError, match="wanted: expected one of 'pet', 'background', 'border', got 'dog'"):
        look_figure(PETS, find_image("dog"), "dog")


def test_figure_command(tmp_path, capsys):
    out = tmp_path / "dog.png"
    assert main(["figure", "segmentation", "--class", "border", "--width", "3.4", "--out", str(out)]) == 0
    assert Image.open(out).width == 680
    assert f"wrote {out}" in capsys.readouterr().out


def test_explorer_prediction():
    """The explorer's shares and colours are those of the model's labels."""
    opened = segmenter_subject(subject.from_checkpoint(PETS), PETS)
    made = record.image_record(opened, find_image("dog"), "dog")
    with torch.no_grad():
        labels = opened.model(opened.prepare(find_image("dog"))[None])[0].argmax(0)
    shares = {name: (labels == index).double().mean().item() for index, name in enumerate(opened.classes)}
    assert dict(made["prediction"]) == pytest.approx(shares, abs=5e-5)
    assert made["prediction"][0][0] == "background"
    with Image.open(io.BytesIO(base64.b64decode(made["overlay"].partition(",")[2]))) as overlay:
        pixels = np.array(overlay)
    assert pixels.shape == (*labels.shape, 4)
    assert (pixels[labels == opened.classes.index("pet")] == (255, 140, 0, record.OPACITY)).all()
    assert (pixels[labels == opened.classes.index("background")] == 0).all()
    assert [layer["label"] for layer in made["layers"]][:2] == ["stage 1, block 1", "stage 2, block 1"]
