"""Instructions a score, counted in the machine code of every target."""

import pytest
import torch

pytest.importorskip("triton")

from ppma.bench.gpu import cases
from ppma.bench.gpu.assembly import LoopCost, _innermost, _multiply_adds, has_scores, loop_cost
from ppma.bench.gpu.targets import Resources, compile_for, resources
from ppma.ops.backends.triton.launch import recording
from ppma_cli import main

# Instructions a score of kernels with the exponentials of a mask in the loop (14 x 14, d = 32, bfloat16).
BEFORE = {"queries": 45.1, "keys": 58.1}  # sm_80
BEFORE_ON_AMD = {"queries": 60.2}  # gfx942; the other side was not counted
MOST_FORWARD = 24.0
MOST_SPECIAL = 1.3


def launches(combine, backward):
    tensors = cases.attention_inputs(8, 8, 14, 14, 32, torch.bfloat16)
    with recording() as recorded:
        cases.record_attention(tensors, combine, backward)
    return [launch for launch in recorded if has_scores(launch)]


def assert_within_targets(target, backward):
    for launch in launches("hadamard", backward):
        cost = loop_cost(compile_for(launch, target), launch)
        assert cost is not None
        assert cost.special <= MOST_SPECIAL
        if backward:
            side = "keys" if launch.arguments["KEY_SIDE"] else "queries"
            before = BEFORE_ON_AMD if target == "gfx942" else BEFORE
            assert cost.instructions <= before.get(side, float("inf")) / 1.6, side
        else:
            assert cost.instructions <= MOST_FORWARD


@pytest.mark.parametrize("backward", [False, True])
def test_loop_cost_within_targets(backward):
    assert_within_targets("sm_80", backward)


@pytest.mark.slow
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("target", ["sm_89", "sm_90", "sm_100", "gfx942"])
def test_loop_cost_every_target(target, backward):
    assert_within_targets(target, backward)


def test_loop_cost_float32_unknown():
    """Products outside the matrix units do not mark a tile."""
    tensors = cases.attention_inputs(1, 1, 7, 7, 16, torch.float32)
    with recording() as recorded:
        cases.record_attention(tensors, "hadamard", False)
    (launch,) = [launch for launch in recorded if has_scores(launch)]
    assert loop_cost(compile_for(launch, "sm_80"), launch) is None


def test_occupancy_registers_and_threads():
    (launch,) = launches("hadamard", False)
    taken = resources(compile_for(launch, "sm_80"))
    warps = 65_536 // (-(-taken.registers // 8) * 8 * 32)
    assert taken.threads == 64
    assert taken.occupancy("sm_80") == (warps - warps % 2) / 64


@pytest.mark.parametrize(("spilled", "shown"), [(0, "160, 19%, 18.9 (1.12)"), (8, "160, 8 spilled, 19%, 18.9 (1.12)")])
def test_kernels_report_cells(spilled, shown, monkeypatch, capsys):
    """Registers, occupancy, instructions a score, special functions; spilled bytes make the command fail."""
    taken = Resources(registers=160, shared=0, spilled=spilled, threads=64)
    row = cases.Row("polyline_attention", "attention_forward", {"sm_80": taken}, {"sm_80": LoopCost(18.94, 1.12)})
    monkeypatch.setattr(cases, "rows", lambda *_: [row])
    assert main(["kernels", "--report", "--targets", "sm_80"]) == (1 if spilled else 0)
    assert f"| polyline_attention | attention_forward | {shown} |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "multiply_adds"),
    [
        ("HMMA.16816.F32.BF16", 2048),
        ("HMMA.1688.F32.TF32", 1024),
        ("HGMMA.64x32x16.F32.BF16", 8192),
        ("v_mfma_f32_16x16x16_bf16", 4096),
        ("FFMA", 0),
    ],
)
def test_multiply_adds_of_instructions(name, multiply_adds):
    assert _multiply_adds(name) == multiply_adds


def test_innermost_nested_loops():
    assert _innermost([(2, 9), (4, 6), (11, 12)]) == [(4, 6), (11, 12)]
