"""What the pages show runs, and prints what they say."""

import re
from pathlib import Path

import pytest
import torch

from ppma import masks
from ppma.data import images, segmentation
from ppma.models import CONFIGS
from ppma.tasks import registry
from ppma_cli import main

DOCS = Path(__file__).parents[2] / "docs"
BACKBONES = (DOCS / "backbones.md").read_text()
PERFORMANCE = (DOCS / "performance.md").read_text()

# What a page says it prints, where that is not a comment behind the print itself.
PROMISES = {
    "backbones.md": (
        "torch.Size([1, 64, 32, 48])",
        "torch.Size([1, 512, 4, 6])",
        "torch.Size([2, 65, 64])",
        "[64, 128, 256, 512] [4, 8, 16, 32]",
        "2.708",
    )
}


def python_blocks(page):
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


WITH_PYTHON = [page.relative_to(DOCS) for page in sorted(DOCS.rglob("*.md")) if python_blocks(page)]
# A detector and a segmenter of full size on large images: what they do is tested small, in tests/tasks.
TOO_LARGE = Path("detection-segmentation.md")


@pytest.mark.parametrize("page", [page for page in WITH_PYTHON if page != TOO_LARGE], ids=str)
def test_page_python(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    registries = ((masks, "KINDS"), (registry, "TASKS"), (images, "SOURCES"), (segmentation, "LAYOUTS"))
    for module, name in registries:  # pages add some of their own
        monkeypatch.setattr(module, name, dict(getattr(module, name)))
    torch.manual_seed(0)
    code = "\n".join(python_blocks(DOCS / page))
    exec(code, {})
    printed = capsys.readouterr().out
    for promised in (*PROMISES.get(str(page), ()), *re.findall(r"print\(.*\) +# (torch\.Size.*|tensor.*)", code)):
        assert promised in printed
    assert "False" not in printed


def test_readme_python(capsys):
    """Its blocks build on one another."""
    exec("\n".join(python_blocks(DOCS.parent / "README.md")), {})
    assert "[(1, 64, 32, 32), (1, 128, 16, 16), (1, 256, 8, 8), (1, 512, 4, 4)]" in capsys.readouterr().out


def test_readme_figures_measured():
    """The figures at the top of README and home page are those of the page about performance."""
    rows = re.findall(r"^\| `((?:ppma|rmt)_(?:tiny|small|base))` \|.*\| ([\d.]+) \|$", PERFORMANCE, re.MULTILINE)
    measured = dict(rows)
    sizes = ("tiny", "small", "base")
    readme, home = (" ".join(path.read_text().split()) for path in (DOCS.parent / "README.md", DOCS / "index.md"))
    for family in ("ppma", "rmt"):
        assert " / ".join(measured[f"{family}_{size}"] for size in sizes) in readme
        assert "{}, {} and {}".format(*(measured[f"{family}_{size}"] for size in sizes)) in home


def test_backbones_table_matches_info(capsys):
    assert main(["info"]) == 0
    header, *rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert header[:5] == ["model", "formulation", "mask", "image", "parameters"]
    assert [row[0] for row in rows] == list(CONFIGS)
    for name, *_, parameters, flops, activations in (row[:7] for row in rows):
        assert f"| `{name}` | {parameters} | {flops} | {activations} |" in BACKBONES
        config = CONFIGS[name]
        assert f"| {' '.join(map(str, config.dims))} | {' '.join(map(str, config.depths))} |" in BACKBONES
