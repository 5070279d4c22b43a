"""Full attention at detection's resolution holds no N x N matrix, forward or backward."""

import pytest
import torch

from ppma.bench.high_resolution import FORMS, GRID, attention_call, kinds_table, peak
from ppma.layers.attention import ATTENTION_KINDS

MATRIX = (GRID[0] * GRID[1]) ** 2 * 4  # bytes of one N x N matrix in float32


def test_high_resolution_forms_agree():
    for training in (False, True):
        first, second = (attention_call(form, training, 2, (5, 6))() for form in FORMS)
        torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("training", [False, True])
def test_high_resolution_peak_memory(training):
    assert peak("operator", training=training, heads=1) < MATRIX / 2
    assert peak("dense", training=training, heads=1) > 2 * MATRIX


def test_kinds_table():
    lines = kinds_table(sides=(4, 6), rounds=1).splitlines()
    assert [line.split(" | ")[0].strip("| ") for line in lines[2:]] == list(ATTENTION_KINDS)
    assert all(float(cell) > 0 for line in lines[2:] for cell in line.strip("|").split("|")[1:])
