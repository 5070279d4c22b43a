"""Benchmarks measure what they claim. No test asserts a speed."""

import json
import sys
from pathlib import Path

import pytest
import timm
import torch

from ppma import ops
from ppma.bench import against, floor, models
from ppma.bench import ops as operators
from ppma.bench.report import Report, environment
from ppma.measure import costs, memory
from ppma.measure.timing import Timings, interleave
from ppma.ops import backends
from ppma.ops.backends.native import library
from ppma.ops.fused_linear import products


def test_interleave_order():
    order = []
    timings = interleave({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, rounds=3, shortest=0)
    assert order[-6:] == ["a", "b", "b", "a", "a", "b"]
    assert [len(seconds) for seconds in timings.seconds.values()] == [3, 3]


def test_timings_speed_median_of_ratios():
    timings = Timings({"fast": [1.0, 2.0, 10.0], "slow": [2.0, 6.0, 20.0]})
    assert timings.speed("fast", than="slow") == 2.0
    assert timings.median("fast") == 2.0
    assert timings.spread("fast", than="slow") == 0.5  # of 2, 2 and 3
    assert Timings({"a": [1.0], "b": [2.0]}).spread("a", than="b") == 0.0


def test_report_markdown_and_json():
    report = Report("title", ["name", "ratio", "count"], [["a", 1.234, 1000], ["bb", 250.0, 2]], ["a note"])
    text = report.markdown()
    assert "| a    |  1.23 | 1,000 |" in text
    assert "| bb   |   250 |     2 |" in text
    assert text.endswith("a note")
    assert json.loads(json.dumps(report.as_dict()))["rows"][1] == {"name": "bb", "ratio": 250.0, "count": 2}


def test_environment_keys():
    assert {"cpu", "features", "threads", "torch", "ppma", "native", "malloc"} <= set(environment())


def allocate(megabytes):
    """For the memory test: a call that needs twice as much at its peak as it returns."""

    def call():
        temporary = torch.ones(megabytes << 17)
        return (temporary + 1).mul_(2)

    return call


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_peak_allocation(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    for warm in (False, True):
        measured = memory.peak("test_bench:allocate", 256, warm=warm)
        needed = 2 * (256 << 19)  # the temporary and the result
        assert 0.99 * needed < measured < 1.15 * needed  # a first call also touches code and thread stacks


def attend(height, width):
    """For the memory test: a kernel whose scratch memory is many times its inputs and its result."""
    q = torch.ones(1, 1, height, width, 8)
    decays = torch.zeros(1, 1, height, width)
    return lambda: ops.criss_cross_attention(q, q, q, decays, decays, backend="native")


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.skipif(library.isa() is None, reason="the native library was not built")
def test_peak_counts_kept_scratch(monkeypatch):
    """The second call needs no less memory because the first has left its scratch memory behind."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    result, map_of_a_row = 4 * 64 * 1024 * 8, 4 * 1024 * 1024
    assert memory.peak("test_bench:attend", 64, 1024, warm=True) >= result + map_of_a_row


def test_convolution_gradients_flop(monkeypatch):
    """GFLOP/s times seconds are the multiplications and additions of the weight's gradient."""
    monkeypatch.setattr(operators, "CONVOLUTIONS", [(16, 3, 4, 2)])
    ((_, _, *seconds, native, torchs),) = operators.convolution_report(rounds=1).rows
    for milliseconds, speed in zip(seconds, (native, torchs), strict=True):
        assert speed * milliseconds * 1e6 == pytest.approx(2 * 8 * 8 * 8 * (3 * 3 * 3) * 4)


def test_exponent_power_law():
    sides = (8, 16, 32)
    assert costs.exponent(sides, [3 * (s * s) ** 1.5 for s in sides]) == pytest.approx(1.5)


def test_floor_records_products():
    """As many linear layers and convolutions as the model has, and three products for each attention and path."""
    model = timm.create_model("ppma_nano").eval()
    recorded = floor.record(model, torch.randn(1, 3, 32, 32))
    calls = recorded.calls
    layers = sum(isinstance(m, torch.nn.Linear | torch.nn.Conv2d) for m in model.modules())
    decay_heads = sum(len(stage.blocks) for stage in model.stages)
    attention = sum(2 if block.attn.kind == "full" else 6 for stage in model.stages for block in stage.blocks)
    assert len(calls) == layers + decay_heads + attention
    for call in calls:
        assert isinstance(call(), torch.Tensor)
    assert set(recorded.chosen.values()) <= {"packed", "native", *products()}
    assert (1, 256, 1000) in recorded.chosen  # the classifier


def test_floor_fastest_product(monkeypatch):
    monkeypatch.setattr(floor, "fastest", lambda candidates, margin: list(candidates)[-1])
    recorded = floor.record(timm.create_model("ppma_nano").eval(), torch.randn(1, 3, 32, 32))
    linear = {name for shape, name in recorded.chosen.items() if len(shape) == 3}
    assert linear == {"packed"}
    assert set(recorded.chosen.values()) == {"packed", "native"}  # native: depthwise convolutions


def test_variant_modes():
    for mode in ("inference", "train"):
        variant = models.Variant("ppma_nano", mode, {"mask": "none"}, batch=2, size=32, excluded=("native",))
        out = variant.step()()
        assert torch.isfinite(out).all()


def test_excluded_backend():
    with backends.excluding("native"), pytest.raises(backends.BackendUnavailableError, match="excluded"):
        backends.resolve("native", "polyline_scan", torch.device("cpu"), torch.float32)


def test_against_operator(tmp_path):
    other = tmp_path / "other.py"
    other.write_text(
        "import ppma\ndef attend(*t, **o):\n    return ppma.polyline_attention(*t, backend='torch', **o)\n"
    )
    loaded = against.load(f"{other}:attend")
    small = against.Shape("small", 1, 2, 4, 8)
    against.OPERATORS["polyline_attention"], before = [small], against.OPERATORS["polyline_attention"]
    try:
        report = against.compare_operator(loaded, "polyline_attention", rounds=2)
    finally:
        against.OPERATORS["polyline_attention"] = before
    assert float(report.rows[0][-1]) < 1e-5
    for wrong in ("nothing.py:f", f"{other}:missing", "no-colon"):
        with pytest.raises(ValueError, match="against: expected"):
            against.load(wrong)
