"""`ppma bench targets` and `ppma bench render`: rows, resuming, tables."""

import json
import re

import pytest

from ppma.bench import render, targets
from ppma.bench.models import Variant
from ppma_cli import main

ENVIRONMENT = {"native": "avx512", "cpu": "a CPU", "threads": 2, "torch": "2", "emulated": ""}


@pytest.fixture
def measured(monkeypatch):
    """Rows are measured in no time; returns their names in order."""
    names = []

    def measure(row):
        names.append(row.name)
        return {"ms": 12.0, "over_plain": 2.345, "spread_plain": 0.05}

    for kind in (targets.Row, targets.DenseRow):
        monkeypatch.setattr(kind, "measure", measure)
    return names


def test_row_measure():
    baselines = ("none", "floor", "raw", "plain")
    row = targets.Row("row", Variant("ppma_nano", batch=1, size=32), baselines, rounds=1)
    result = row.measure()
    ratios = {f"{what}_{name}" for what in ("over", "spread") for name in baselines}
    assert set(result) == {"ms", "images_per_second"} | ratios
    assert all(value > 0 for name, value in result.items() if not name.startswith("spread"))


def test_rows_complete():
    names = set(targets.rows())
    assert {f"ppma_tiny/{f}/{what}" for f in ("paper", "release") for what, *_ in render.TARGETS} <= names
    assert {name.partition("/")[0] for name in names} == {"ppma_tiny", "dense", *render.MODELS}
    assert all(row.quick for row in map(targets.rows().get, targets.selected(quick=True)))


def test_targets_resumed(measured, tmp_path, capsys):
    path = tmp_path / "out.json"
    assert main(["bench", "targets", "--only", "nano-32", "--json", str(path)]) == 0
    assert len(measured) == 3
    assert json.loads(path.read_text())["complete"] is False
    assert main(["bench", "targets", "--only", "nano", "--json", str(path)]) == 0
    assert len(measured) == len(set(measured)) == 6
    printed = capsys.readouterr().out
    assert "holds 3 of 6 rows" in printed
    assert "ppma_nano-64/train-64: 12.0 ms, 2.35 ± 0.05x plain" in printed
    assert "| `ppma_nano-64` | 2.35 ± 0.05 / 2.35 ± 0.05 / 2.35 ± 0.05 |" in printed


def test_targets_interrupted_keeps_rows(measured, monkeypatch, tmp_path):
    path = tmp_path / "out.json"
    monkeypatch.setattr(targets.DenseRow, "measure", lambda row: (_ for _ in ()).throw(KeyboardInterrupt))
    assert main(["bench", "targets", "--only", "nano-32", "dense", "--json", str(path)]) == 130
    assert len(json.loads(path.read_text())["rows"]) == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["targets", "--only", "nosuch"], "--only: expected a part of one of .*, got 'nosuch'"),
        (["models", "--quick"], "--only, --quick, --isa: expected with `ppma bench targets`"),
        (["render"], "render: expected result files of `ppma bench targets`, got nothing"),
        (["render", "nosuch.json"], "nosuch.json: expected a result file .*"),
        (["targets", "more"], "suite: expected nothing after 'targets', got more"),
        (["targets", "--json", "{other}"], "--json: expected a new file or results of this machine and version, .*"),
    ],
)
def test_targets_errors(words, message, measured, tmp_path, capsys):
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"environment": ENVIRONMENT, "rows": {}}))
    assert main(["bench", *(word.format(other=other) for word in words)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(f"ppma bench: {message}", line)
    assert not measured


def test_render_vendors(tmp_path, capsys):
    """Columns of one instruction set are told apart by the CPU's vendor."""
    files = []
    for cpu in ("AMD EPYC, 2 cores", "Intel(R) Xeon(R) Processor, 2 cores"):
        rows = {"ppma_tiny/paper/train-8": {"over_plain": 1.8}}
        files.append(tmp_path / f"{len(files)}.json")
        files[-1].write_text(json.dumps({"environment": {**ENVIRONMENT, "cpu": cpu}, "rows": rows}))
    assert main(["bench", "render", *map(str, files)]) == 0
    printed = capsys.readouterr().out
    assert "|  | target | AMD, AVX-512 | Intel, AVX-512 |" in printed
    assert "Intel, AVX-512: Intel(R) Xeon(R) Processor, 2 cores, 2 threads" in printed


def test_render_page(tmp_path, capsys):
    rows = {"ppma_tiny/paper/inference-8": {"ms": 400.0, "over_plain": 2.31, "peak_mb": 80.0}}
    dense = {"dense/800x1333": {"ms": 4567.8, "memory_exponent": 1.01}}
    files = []
    for name, native, emulated in (("a", "avx2", "ATEN_CPU_CAPABILITY=avx2"), ("b", "avx512", "")):
        document = {
            "environment": {**ENVIRONMENT, "native": native, "emulated": emulated},
            "rows": rows | (dense if name == "b" else {}),
        }
        files.append(tmp_path / f"{name}.json")
        files[-1].write_text(json.dumps(document))
    page = tmp_path / "page.md"
    page.write_text(f"before\n{render.BEGIN}\nold\n{render.END}\nafter\n")
    assert main(["bench", "render", *map(str, files), "--into", str(page)]) == 0
    text = page.read_text()
    assert "old" not in text
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "|  | target | AVX2, emulated | AVX-512 |" in text
    assert "| inference, batch 8, over plain PyTorch | ≥ 2.3 | 2.31 / – | 2.31 / – |" in text
    assert "| 800 x 1333 | ms | – | 4,568 |" in text
    assert "on a CPU with more by `ATEN_CPU_CAPABILITY=avx2`" in text
    page.write_text("no markers")
    assert main(["bench", "render", str(files[0]), "--into", str(page)]) == 2
