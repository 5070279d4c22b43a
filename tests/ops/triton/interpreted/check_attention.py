"""Full attention: both combines, all paths, several tiles, tables and potentials."""

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
from ppma.bench import unmasked
from ppma.bench.gpu import measure
from ppma.bench.gpu.prediction import Stage
from ppma.ops.backends.triton import potentials
from ppma.ops.backends.triton.configs import attention_tile
from ppma.testing import outputs_and_gradients

attention = sys.modules["ppma.ops.backends.triton.attention"]


@pytest.mark.parametrize("paths", PATHS)
@pytest.mark.parametrize("combine", ["hadamard", "logit"])
def test_one_tile(combine, paths):
    inputs = attention_inputs((4, 5), heads=2)
    assert_kernels_accurate(ppma.polyline_attention, inputs, combine=combine, paths=paths)


@pytest.mark.parametrize(
    ("grid", "combine", "tile"),
    [
        ((9, 8), "hadamard", (2, 8)),  # five tiles below each other
        ((3, 17), "logit", (4, 8)),  # three tiles of other columns
        ((1, 65), "hadamard", (1, 16)),  # five tiles across, too wide for tables
        ((1, 16), "logit", (1, 16)),  # one row for all tokens
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32])
def test_several_tiles(grid, combine, tile, dtype):
    assert attention_tile(*grid, None, dtype, 16) == tile
    assert_kernels_accurate(ppma.polyline_attention, attention_inputs(grid, dtype), combine=combine)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("combine", ["hadamard", "logit"])
def test_half_precision(combine, dtype):
    inputs = attention_inputs((4, 5), dtype, heads=2, d=20, dv=9)
    assert_kernels_accurate(ppma.polyline_attention, inputs, combine=combine)


@pytest.mark.parametrize("combine", ["hadamard", "logit"])
@pytest.mark.parametrize("scale", [-0.7, 0.0])
def test_scale_not_positive(combine, scale):
    """The kernel of "hadamard" looks for the largest unscaled score."""
    assert_kernels_accurate(ppma.polyline_attention, attention_inputs((2, 3)), combine=combine, scale=scale)


@pytest.mark.parametrize("combine", ["hadamard", "logit"])
def test_without_tables(combine, monkeypatch):
    monkeypatch.setattr(potentials, "LONGEST_TABLE", 0)
    assert_kernels_accurate(ppma.polyline_attention, attention_inputs((4, 5)), combine=combine)


def test_without_mask():
    """The baseline that the cost of the mask is measured against."""
    q, k, v, *decays = attention_inputs((3, 5))
    out = torch.empty_like(v)
    mask = attention.make_mask(q, v, *decays, "hadamard")
    attention.masked_forward(q, k, v, mask, out, None, None, "hadamard", None, q.shape[-1] ** -0.5)
    torch.testing.assert_close(out, unmasked.without_mask(q, k, v))


@pytest.mark.parametrize("full", [True, False])
def test_without_mask_replayed(full):
    """The same baseline as `ppma doctor --gpu` times it: recorded launches with the mask taken out."""
    inputs = attention_inputs((3, 5), d=16, dv=16)
    stage = Stage(1, 3, 1, 16, full)
    launches = measure.operator_launches(stage, "hadamard", inputs, backward=False, mask=False)
    measure.replay(launches)
    # Recorded for a scale of 1; PyTorch scales by the root of the channels.
    q, *others = inputs
    plain = unmasked.without_mask if full else unmasked.lines_without_mask
    out = launches[-1].arguments["out"].data
    torch.testing.assert_close(out if full else out.transpose(2, 3), plain(4 * q, *others))  # columns come last


def test_widest_head():
    assert_kernels_accurate(ppma.polyline_attention, attention_inputs((2, 3), d=128, dv=128))


@pytest.mark.parametrize("combine", ["hadamard", "logit"])
def test_large_scores_with_strong_decays(combine):
    """Scores of about 140: exponentials without their maximum, or a mask in the exponent, would leave the range."""
    inputs = attention_inputs((3, 4), scale=50.0)
    assert_saturated_accurate(ppma.polyline_attention, inputs, combine=combine)


@pytest.mark.parametrize("combine", ["hadamard", "logit"])
def test_single_token(combine):
    """The softmax of one score is 1: its gradient is 0 up to the rounding of the products it is the difference of."""
    inputs = attention_inputs((1, 1))
    out, *grads = outputs_and_gradients(
        lambda *tensors: ppma.polyline_attention(*tensors, combine=combine, backend="triton"), inputs
    )
    copies = 2 if combine == "hadamard" else 1
    torch.testing.assert_close(out, copies * inputs[2])
    assert all(grad.abs().max() < 1e-5 for grad in (grads[0], grads[1]))
    assert all(grad.abs().max() == 0 for grad in grads[3:])


@pytest.mark.parametrize("magnitude", [1e8])
@pytest.mark.parametrize("combine", ["hadamard", "logit"])
def test_large_logits(combine, magnitude):
    assert_large_logits_accurate(ppma.polyline_attention, magnitude, combine)


@pytest.mark.slow
@pytest.mark.parametrize("magnitude", [1.0, 10.0, 1e3, 1e4, 1e6, 1e8])
@pytest.mark.parametrize("paths", PATHS)
@pytest.mark.parametrize("combine", ["hadamard", "logit"])
def test_large_logits_in_every_combination(combine, paths, magnitude):
    assert_large_logits_accurate(ppma.polyline_attention, magnitude, combine, paths=paths)


@pytest.mark.parametrize("combine", ["hadamard", "logit"])
def test_empty_batch(combine):
    assert_empty_batches_work(ppma.polyline_attention, combine=combine)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("paths", PATHS)
@pytest.mark.parametrize("combine", ["hadamard", "logit"])
@pytest.mark.parametrize("grid", [(7, 7), (1, 9), (9, 1), (5, 12), (2, 70)], ids=str)
def test_every_combination(grid, combine, paths, dtype):
    inputs = attention_inputs(grid, dtype, heads=2, d=16, dv=24)
    assert_kernels_accurate(ppma.polyline_attention, inputs, combine=combine, paths=paths)
