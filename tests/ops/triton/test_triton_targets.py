"""Ahead-of-time compilation for GPUs that are not there: it works, spills nothing and uses no atomics."""

import re

import pytest
import torch

pytest.importorskip("triton")

from ppma.bench.gpu import cases
from ppma.bench.gpu.assembly import _sass
from ppma.bench.gpu.targets import TARGETS, compile_for, resources
from ppma.ops.backends.triton.launch import recording


def spilled_at_most(d, dtype):
    """Bytes of a thread; products of float32 do not quite fit (docs/kernels-gpu.md)."""
    return {32: 8, 64: 256}.get(d, 0) if dtype == torch.float32 else 0


def assert_compiles_within_limits(operator, target, d, dtype):
    seen = set()
    for case in cases.CASES:
        if case.operator != operator:
            continue
        for name, launch in case.launches(d, dtype):
            if name in seen:
                continue
            seen.add(name)
            compiled = compile_for(launch, target)
            taken = resources(compiled)
            assert taken.spilled <= spilled_at_most(d, dtype), f"{name}: {taken}"
            threads = 32 * launch.config.warps
            # A multiprocessor has 65,536 registers, a compute unit of AMD's four times 512 for 64 threads each.
            assert 0 < taken.registers <= (512 if target.startswith("gfx") else 65_536 // threads)
            code = compiled.asm.get("ptx") or compiled.asm["amdgcn"]
            assert not re.search(r"\b(atom|red)\.|_atomic_", code), f"{name} uses atomics"
    assert seen


# One target for each operator in the ordinary suite, all of them in the slow one.
@pytest.mark.parametrize(
    ("operator", "target"),
    [
        ("polyline_scan", "gfx942"),
        ("criss_cross_attention", "sm_80"),
        ("polyline_attention", "sm_90"),
        ("linear_attention", "sm_100"),
        ("rotary_split", "gfx942"),
        ("depthwise_conv", "sm_80"),
    ],
)
def test_compile_default(operator, target):
    assert_compiles_within_limits(operator, target, 32, torch.float16)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("d", [16, 32, 64])
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("operator", sorted({case.operator for case in cases.CASES}))
def test_every_target(operator, target, d, dtype):
    assert_compiles_within_limits(operator, target, d, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("operator", ["polyline_attention", "criss_cross_attention"])
def test_widest_heads(operator):
    """128 channels on the GPU with the least shared memory."""
    assert_compiles_within_limits(operator, "sm_89", 128, torch.bfloat16)


@pytest.mark.parametrize(("allowed", "instruction"), [(True, "HMMA.1688.F32.TF32"), (False, "FFMA")])
def test_tf32_as_pytorch_allows(allowed, instruction):
    """Products of float32 run on the matrix units only where PyTorch's do."""
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    try:
        with recording() as launches:
            cases.record_criss_cross(cases.attention_inputs(1, 1, 16, 16, 16, torch.float32), "hadamard", False)
    finally:
        torch.set_float32_matmul_precision("highest")
    names, _ = _sass(compile_for(launches[-1], "sm_80").asm["cubin"])
    assert any(name.startswith("HMMA") for name in names) == allowed
    assert any(name.startswith(instruction) for name in names)


def test_compile_restores_driver():
    from triton.runtime import driver

    before = driver._active
    _, launch = next(iter(cases.CASES[0].launches(32, torch.float16)))
    compile_for(launch, "sm_80")
    assert driver._active is before
