"""Linear attention: one band of rows, and several with states passed between them."""

import sys

import pytest
import torch
from triton_cases import HALF, PATHS, assert_empty_batches_work, assert_kernels_accurate, attention_inputs

import ppma
import ppma.ops.backends.triton

linear = sys.modules["ppma.ops.backends.triton.linear"]


@pytest.mark.parametrize("paths", PATHS)
def test_one_band(paths):
    assert_kernels_accurate(ppma.linear_attention, attention_inputs((4, 5), heads=2), paths=paths)


@pytest.mark.parametrize("dtype", HALF)
def test_half_precision(dtype):
    assert_kernels_accurate(ppma.linear_attention, attention_inputs((4, 5), dtype, d=20, dv=9))


@pytest.mark.parametrize("band", [2, 64])
def test_float16_large_scores(band, monkeypatch):
    """Scores of up to 57,600, which two paths take beyond float16; outputs and gradients are within it."""

    def small(*tensors, **options):
        return ppma.linear_attention(*tensors, **options) * 2.0**-8

    monkeypatch.setattr(linear, "BAND_ROWS", band)
    q, k, v, log_alpha, log_beta = attention_inputs((3, 4), torch.float16, d=16)
    inputs = [q.sign() * 60, k.sign() * 60, v / 256, log_alpha, log_beta]
    assert_kernels_accurate(small, inputs)


@pytest.mark.parametrize("paths", PATHS)
def test_several_bands(paths, monkeypatch):
    monkeypatch.setattr(linear, "BAND_ROWS", 2)
    assert_kernels_accurate(ppma.linear_attention, attention_inputs((5, 3)), paths=paths)


@pytest.mark.parametrize("dtype", HALF)
def test_several_bands_in_half_precision(dtype, monkeypatch):
    monkeypatch.setattr(linear, "BAND_ROWS", 2)
    assert_kernels_accurate(ppma.linear_attention, attention_inputs((3, 3), dtype, d=20, dv=9))


def test_states_of_several_tiles_across(monkeypatch):
    monkeypatch.setattr(linear, "BAND_ROWS", 1)
    monkeypatch.setattr(linear, "READ_COLS", 16)
    assert_kernels_accurate(ppma.linear_attention, attention_inputs((2, 18)), paths="v2h")


def test_decomposed_attention():
    s1, s2, v, log_alpha, log_beta = attention_inputs((3, 4), d=5, dv=7)
    assert_kernels_accurate(ppma.decomposed_attention, [s1.abs(), s2.abs(), v, log_alpha, log_beta])


def test_empty_batch(monkeypatch):
    assert_empty_batches_work(ppma.linear_attention)
    monkeypatch.setattr(linear, "BAND_ROWS", 1)
    assert_empty_batches_work(ppma.linear_attention)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("paths", PATHS)
@pytest.mark.parametrize("band", [1, 4])
def test_every_combination(band, paths, dtype, monkeypatch):
    monkeypatch.setattr(linear, "BAND_ROWS", band)
    assert_kernels_accurate(ppma.linear_attention, attention_inputs((6, 4), dtype, heads=2), paths=paths)
