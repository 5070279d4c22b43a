"""What docs/backbones.md and examples/ show runs, and prints what they say."""

import importlib.util
import re
from pathlib import Path

import torch

import ppma.cli
from ppma.models import CONFIGS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "backbones.md").read_text()


def test_python_on_the_page_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 5
    torch.manual_seed(0)
    exec("\n".join(blocks), {})
    printed = capsys.readouterr().out
    for shape in ("[1, 64, 32, 48]", "[1, 512, 4, 6]", "[2, 65, 64]"):
        assert f"torch.Size({shape})" in printed
    assert "[64, 128, 256, 512] [4, 8, 16, 32]" in printed
    assert "2.708" in printed


def test_table_on_the_page_is_what_info_prints(capsys):
    assert ppma.cli.main(["info"]) == 0
    header, *rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert header[:5] == ["model", "formulation", "mask", "image", "parameters"]
    assert [row[0] for row in rows] == list(CONFIGS)
    for name, *_, parameters, flops, activations in (row[:7] for row in rows):
        assert f"| `{name}` | {parameters} | {flops} | {activations} |" in PAGE
        config = CONFIGS[name]
        assert f"| {' '.join(map(str, config.dims))} | {' '.join(map(str, config.depths))} |" in PAGE


def test_own_vit_learns(capsys):
    specification = importlib.util.spec_from_file_location("own_vit", ROOT / "examples" / "own_vit.py")
    example = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(example)
    assert example.main() > 0.7  # of ten classes
    assert re.search(r"step  99  loss 0\.\d+", capsys.readouterr().out)
