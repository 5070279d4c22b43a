"""`ppma bench` and `ppma kernels` refuse what they cannot measure in one line, before any work."""

import re

import pytest

from ppma.bench.report import MALLOC
from ppma_cli import bench, main


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch):
    for name, value in MALLOC.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def never_measured(monkeypatch):
    monkeypatch.setattr(bench, "_reports", lambda args: pytest.fail("measured"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["models", "--model", "convnext_tiny"], "--model: expected one of 'ppma_nano', .*, got 'convnext_tiny'"),
        (["models", "--model", "rmt_tiny"], "--model: expected a PPMA model, .* got 'rmt_tiny'"),
        (["floor", "--model", "nosuch"], "--model: expected one of .*, got 'nosuch'"),
        (["models", "--batch", "0"], "--batch: expected 1 to 65536, got 0"),
        (["models", "--size", "-1"], "--size: expected 1 to 16384, got -1"),
        (["models", "--rounds", "0"], "--rounds: expected 1 to 65536, got 0"),
        (["models", "--json", "nowhere/x.json"], "--json: expected a folder at nowhere, found none"),
        (["against", "x.py:f", "--operator", "nosuch"], "--operator: expected one of .*, got 'nosuch'"),
        (["--device", "foo"], "--device: expected cpu, cuda or cuda:N, got 'foo'"),
    ],
)
def test_bench_mistakes_are_one_line(words, message, never_measured, capsys):
    assert main(["bench", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(f"ppma bench: {message}.*", line)


@pytest.mark.parametrize("name", ["ppma_nano", "ppma_tiny", "ppma_small", "ppma_base"])
def test_bench_takes_every_ppma_model(name, monkeypatch):
    measured = []
    monkeypatch.setattr("ppma.bench.models.compare", lambda variants, **_: measured.append(variants))
    from ppma.bench import models

    models.suite(name)
    rmt = measured[0][name.replace("ppma", "rmt")]
    assert (rmt.model, rmt.options) == (name, {"formulation": "release", "mask": "rmt"})


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def other(:", "SyntaxError"),
        ("raise OSError('no')", "other.py raised OSError: no"),
        ("def other(*_, **__): raise KeyError('q')", "the other operator raised KeyError: 'q'"),
        ("other = 3", "expected a callable 'other' in .*, got 3"),
    ],
)
def test_bench_against_a_broken_implementation_is_one_line(source, message, tmp_path, capsys):
    (tmp_path / "other.py").write_text(source)
    words = ["bench", "against", f"{tmp_path / 'other.py'}:other", "--operator", "polyline_attention", "--rounds", "1"]
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(message, line)


@pytest.mark.parametrize("channels", ["0", "-3", "100000"])
def test_kernels_with_absurd_channels_is_one_line(channels, capsys):
    assert main(["kernels", "--report", "--channels", channels]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"--channels: expected 1 to 256, got {channels}" in line
