"""`ppma bench` and `ppma kernels`: options, messages, partial results."""

import json
import re

import pytest

from ppma.bench import models
from ppma.bench.report import Report
from ppma.measure.timing import Timings
from ppma_cli import bench, main


@pytest.fixture
def never_measured(monkeypatch):
    monkeypatch.setattr(bench, "_reports", lambda args, publish: pytest.fail("measured"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["models", "--model", "convnet_tiny"], "--model: expected a timm model, got 'convnet_tiny'; did you mean .*"),
        (["floor", "--model", "ppma_nano", "rmt_tiny"], "--model: expected one model, got ppma_nano rmt_tiny"),
        (["floor", "--paper"], "--paper: expected with `ppma bench models` and without --model"),
        (
            ["models", "--paper", "--model", "rmt_tiny"],
            "--paper: expected with `ppma bench models` and without --model",
        ),
        (["floor", "--model", "nosuch"], "--model: expected one of .*, got 'nosuch'"),
        (["models", "--batch", "0"], "--batch: expected 1 to 65536, got 0"),
        (["models", "--size", "-1"], "--size: expected 1 to 16384, got -1"),
        (["models", "--rounds", "0"], "--rounds: expected 1 to 65536, got 0"),
        (["models", "--json", "nowhere/x.json"], "--json: expected a folder at nowhere, found none"),
        (["against", "x.py:f", "--operator", "nosuch"], "--operator: expected one of .*, got 'nosuch'"),
        (["--device", "foo"], "--device: expected cpu, cuda or cuda:N, got 'foo'"),
    ],
)
def test_bench_errors(words, message, never_measured, capsys):
    assert main(["bench", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(f"ppma bench: {message}.*", line)


@pytest.mark.parametrize("name", ["ppma_nano", "ppma_tiny", "ppma_small", "ppma_base"])
def test_bench_takes_every_ppma_model(name, monkeypatch):
    measured = []
    monkeypatch.setattr(models, "compare", lambda variants, **_: measured.append(variants))
    assert len(list(models.suite(name))) == 4
    rmt = measured[0][name.replace("ppma", "rmt")]
    assert (rmt.model, rmt.options) == (name, {"formulation": "release", "mask": "rmt"})


def test_bench_models_timm_names(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(models, "_try_peak", lambda variant: float("nan"))
    words = ["models", "--model", "resnet10t", "ppma_nano", "--batch", "2", "--size", "32", "--rounds", "1"]
    assert main(["bench", *words, "--json", str(tmp_path / "out.json")]) == 0
    printed = capsys.readouterr().out
    assert "speed of resnet10t over it" in printed
    document = json.loads((tmp_path / "out.json").read_text())
    assert document["complete"]
    assert "features" in document["environment"]
    inference, train = document["reports"]
    assert (inference["title"], train["title"]) == ("inference, batch 2, 32 x 32", "train, batch 2, 32 x 32")
    assert [row["model"] for row in inference["rows"]] == ["resnet10t", "ppma_nano"]
    assert inference["rows"][0]["speed of resnet10t over it"] == 1
    assert inference["rows"][0]["peak MB of a step"] is None


def test_bench_models_wrong_size_is_one_line(capsys):
    assert main(["bench", "models", "--model", "vit_tiny_patch16_224", "--batch", "1", "--size", "32"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("ppma bench: --model vit_tiny_patch16_224 raised AssertionError")


def test_bench_paper_table(monkeypatch):
    """Seconds that are exact: PPMA takes twice as long as RMT."""
    seen, published = {}, []

    def fake(steps, *, on_round, **_):
        timings = Timings({name: [4.0 if name.startswith("ppma") else 2.0] for name in steps})
        on_round(timings)
        return timings

    monkeypatch.setattr(models.Variant, "step", lambda self: seen.setdefault(self.model, self))
    monkeypatch.setattr(models, "interleave", fake)
    (report,) = models.paper_table(publish=published.append)
    assert report.rows[0] == ["ppma_tiny", 16.0, 0.5, 1034, 1034 / 1650]
    assert report.rows[1] == ["rmt_tiny", 32.0, 1.0, 1650, 1.0]
    assert [row[0] for row in report.rows[2:]] == ["ppma_small", "rmt_small", "ppma_base", "rmt_base"]
    assert "A800" in report.notes[0]
    assert (published[0].partial, published[0].rows, report.partial) == (True, report.rows, False)
    assert {(v.batch, v.mode, v.options["formulation"]) for v in seen.values()} == {(64, "inference", "release")}


def test_bench_interrupted_keeps_results(monkeypatch, capsys, tmp_path):
    def measure(args, publish):
        yield Report("first", ["n"], [[1]])
        publish(Report("second", ["n"], [[2]], partial=True))
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "_reports", measure)
    assert main(["bench", "models", "--json", str(tmp_path / "out.json")]) == 130
    assert re.findall("## .*", capsys.readouterr().out) == ["## first", "## second"]
    document = json.loads((tmp_path / "out.json").read_text())
    assert [report["partial"] for report in document["reports"]] == [False, True]
    assert not document["complete"]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def other(:", "SyntaxError"),
        ("raise OSError('no')", "other.py raised OSError: no"),
        ("def other(*_, **__): raise KeyError('q')", "the other operator raised KeyError: 'q'"),
        ("other = 3", "expected a callable 'other' in .*, got 3"),
    ],
)
def test_bench_against_broken_implementation(source, message, tmp_path, capsys):
    (tmp_path / "other.py").write_text(source)
    words = ["bench", "against", f"{tmp_path / 'other.py'}:other", "--operator", "polyline_attention", "--rounds", "1"]
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(message, line)


@pytest.mark.parametrize("channels", ["0", "-3", "100000"])
def test_kernels_channels_out_of_range(channels, capsys):
    assert main(["kernels", "--report", "--channels", channels]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"--channels: expected 1 to 256, got {channels}" in line
