"""Criss-cross attention: both combines, all paths, lines of one and of several tiles."""

import sys

import pytest
import torch
from triton_cases import (
    HALF,
    PATHS,
    assert_empty_batches_work,
    assert_kernels_accurate,
    assert_large_logits_accurate,
    assert_saturated_accurate,
    attention_inputs,
)

import ppma
import ppma.ops.backends.triton

criss_cross = sys.modules["ppma.ops.backends.triton.criss_cross"]


@pytest.mark.parametrize("paths", PATHS)
@pytest.mark.parametrize("combine", ["hadamard", "logit"])
def test_short_lines(combine, paths):
    inputs = attention_inputs((3, 4), heads=2)
    assert_kernels_accurate(ppma.criss_cross_attention, inputs, combine=combine, paths=paths)


@pytest.mark.parametrize(("combine", "dtype"), [("hadamard", torch.float32), ("logit", torch.bfloat16)])
def test_long_lines(combine, dtype, monkeypatch):
    monkeypatch.setattr(criss_cross, "line_tokens", lambda *_: 16)
    inputs = attention_inputs((2, 18), dtype, d=20, dv=9)
    assert_kernels_accurate(ppma.criss_cross_attention, inputs, combine=combine)


@pytest.mark.parametrize("combine", ["hadamard", "logit"])
def test_large_scores_with_strong_decays(combine):
    inputs = attention_inputs((3, 3), scale=50.0)
    assert_saturated_accurate(ppma.criss_cross_attention, inputs, combine=combine)


@pytest.mark.parametrize("magnitude", [1e8])
@pytest.mark.parametrize("combine", ["hadamard", "logit"])
def test_large_logits(combine, magnitude):
    assert_large_logits_accurate(ppma.criss_cross_attention, magnitude, combine)


@pytest.mark.slow
@pytest.mark.parametrize("magnitude", [1.0, 10.0, 1e3, 1e4, 1e6, 1e8])
@pytest.mark.parametrize("paths", PATHS)
@pytest.mark.parametrize("combine", ["hadamard", "logit"])
def test_large_logits_in_every_combination(combine, paths, magnitude):
    assert_large_logits_accurate(ppma.criss_cross_attention, magnitude, combine, paths=paths)


@pytest.mark.parametrize("combine", ["hadamard", "logit"])
def test_empty_batch(combine):
    assert_empty_batches_work(ppma.criss_cross_attention, combine=combine)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("paths", PATHS)
@pytest.mark.parametrize("combine", ["hadamard", "logit"])
@pytest.mark.parametrize("grid", [(7, 7), (1, 9), (9, 1), (2, 70)], ids=str)
def test_every_combination(grid, combine, paths, dtype):
    inputs = attention_inputs(grid, dtype, d=16, dv=24)
    assert_kernels_accurate(ppma.criss_cross_attention, inputs, combine=combine, paths=paths)
