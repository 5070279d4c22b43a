"""`ppma info`, `ppma convert` and `ppma export` as a user calls them."""

import dataclasses
import json
import re

import pytest
import torch
from transcription import TINY, random_weights

import ppma
from ppma.models import BackboneConfig, PolylineBackbone
from ppma_cli import main

SMALL = BackboneConfig(
    depths=(1, 1),
    dims=(16, 32),
    heads=(2, 2),
    kinds=("criss_cross", "full"),
    ffn_ratios=(2.0, 2.0),
    layer_scale=(None, None),
    fixed_decay_spans=(4.0, 4.0),
    head_width=32,
    num_classes=5,
)


@pytest.fixture
def weights(tmp_path):
    path = tmp_path / "small.safetensors"
    ppma.save_checkpoint(PolylineBackbone(SMALL), path)
    return str(path)


def test_info_parts(capsys):
    assert main(["info", "ppma_tiny", "--formulation", "release", "--mask", "none"]) == 0
    title, _, header, *lines = capsys.readouterr().out.splitlines()
    assert title.startswith("release formulation, mask none, image 224x224")
    assert header.split() == [
        "part",
        "grid",
        "channels",
        "blocks",
        "attention",
        "parameters",
        "GFLOPs",
        "M",
        "activations",
    ]
    assert lines[3].split()[:6] == ["stage", "3", "14x14", "256", "8", "full"]
    assert lines[-1].split()[:3] == ["total", "14,334,216", "2.651"]


def test_info_json(weights, capsys):
    assert main(["info", weights, "--json", "--size", "32", "48"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["size"] == [32, 48]
    assert document["parameters"] == sum(p.numel() for p in PolylineBackbone(SMALL).parameters())
    assert [part["grid"] for part in document["parts"]] == [[8, 12], [8, 12], [4, 6], None]
    assert BackboneConfig.from_dict(document["config"]) == SMALL


def test_convert_round_trip(tmp_path, capsys):
    arch = dataclasses.replace(TINY, depths=(1, 1, 1, 1), dims=(16, 16, 32, 32), heads=(2, 2, 2, 2))
    torch.save(
        {"model": random_weights(arch, classes=9), "model_ema": random_weights(arch, classes=9, seed=1)},
        tmp_path / "best.pth",
    )
    source, target = str(tmp_path / "best.pth"), str(tmp_path / "ours.safetensors")
    kinds = ["--kinds", "criss_cross", "criss_cross", "full", "full"]
    assert main(["convert", source, target, "--ema", *kinds]) == 0
    assert "mask 2d" in capsys.readouterr().out
    image = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        expected = ppma.load_checkpoint(source, ema=True, kinds=kinds[1:])(image)
        assert torch.equal(ppma.load_checkpoint(target)(image), expected)
    assert main(["convert", source, target]) == 2
    assert "no registered variant" in capsys.readouterr().err
    assert main(["convert", source, "ours.pth"]) == 2
    assert "OUT: expected a name that ends in .safetensors, got 'ours.pth'" in capsys.readouterr().err
    assert main(["convert", "nowhere.pth", target]) == 2
    assert "found none at nowhere.pth" in capsys.readouterr().err


def test_export_program_command(weights, tmp_path, capsys):
    target = tmp_path / "small.pt2"
    assert main(["export", weights, str(target), "--size", "40", "56"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{target}: image (batch, 3, height, width) to class scores; torch.export")
    assert [line.split(":")[0].strip() for line in lines[1:]] == ["40x56", "72x73"]
    assert all(float(line.split()[5]) < 1e-5 for line in lines[1:])


def test_export_onnx_command(weights, tmp_path, capsys):
    target = tmp_path / "small.onnx"
    assert main(["export", weights, str(target), "--size", "32", "40", "--static"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{target}: image (1, 3, 32, 40) to class scores; ONNX opset 20, compared in onnxruntime:"
    assert float(lines[1].split()[5]) < 1e-5


def test_export_unchecked_command(weights, tmp_path, capsys):
    target = tmp_path / "small.pt2"
    assert main(["export", weights, str(target), "--size", "32", "40", "--static", "--no-check"]) == 0
    assert capsys.readouterr().out == (
        f"{target}: image (1, 3, 32, 40) to class scores; torch.export program, not compared\n"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["info", "--size", "0", "0"], "--size: expected a height and a width from 1 to 65536, got 0 0"),
        (["info", "ppma_nano", "--size", "-5", "3"], "--size: expected .*, got -5 3"),
        (["info", "ppma_nano", "--size", "9999999", "64"], "--size: expected .*, got 9999999 64"),
        (["info", "README.md"], "README.md: not a weight file: expected torch.save or safetensors, got a"),
        (["info", "nosuch.safetensors"], "expected a weight file, found none at nosuch.safetensors"),
        (["info", "src"], "src: expected a weight file, got a folder"),
        (["export", "ppma_nano", "out.pt2", "--size", "0", "64"], "--size: expected .*, got 0 64"),
        (["export", "ppma_nano", "out.pt2", "--size", "8", "8"], "size: expected more than 16 x 16 for dynamic sizes"),
        (["export", "nosuch.pth", "out.pt2"], "expected a weight file, found none at nosuch.pth"),
        (["info", "ppma_tinny"], "MODEL: expected one of .* did you mean 'ppma_tiny'"),
        (["export", "ppma_nano", "out.tflite"], "OUT: expected a name that ends in .onnx or .pt2, got 'out.tflite'"),
        (["export", "ppma_nano", "out.onnx", "--opset", "11"], "opset: expected 20 to 23, got 11"),
    ],
)
def test_commands_usage_errors(words, message, capsys):
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(message, line)


@pytest.mark.parametrize("size", [("1", "1"), ("33", "47"), ("4096", "2000")])
def test_info_sizes(size, weights, capsys):
    assert main(["info", weights, "--size", *size]) == 0
    assert f"image {size[0]}x{size[1]}" in capsys.readouterr().out
