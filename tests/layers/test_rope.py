import cmath

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ppma.layers import rotary_table
from ppma.ops.projection_formula import rotate

CPU = torch.device("cpu")


def test_rotation_formula():
    H, W, d = 3, 4, 6
    x = torch.randn(H * W, d, dtype=torch.float64)
    turned = rotate(x, *rotary_table(H, W, d, CPU))
    for token in range(H * W):
        for m in range(d // 2):
            number = complex(x[token, 2 * m], x[token, 2 * m + 1])
            expected = number * cmath.exp(1j * token * 10000.0 ** -(m / (d // 2 - 1)))
            # the table is float32: an angle of a few radians is off by some 1e-7
            assert abs(complex(turned[token, 2 * m], turned[token, 2 * m + 1]) - expected) < 1e-5


def test_rotation_relative_positions():
    cos, sin = rotary_table(1, 9, 8, CPU)
    q, k = torch.randn(2, 8, dtype=torch.float64)
    scores = [rotate(q, cos[i], sin[i]) @ rotate(k, cos[i + 3], sin[i + 3]) for i in range(6)]
    torch.testing.assert_close(torch.stack(scores), scores[0].expand(6), rtol=0, atol=1e-5)


def test_rotary_table_inference_mode():
    with torch.inference_mode():
        rotary_table(5, 7, 8, CPU)
    x = torch.randn(35, 8, requires_grad=True)
    rotate(x, *rotary_table(5, 7, 8, CPU)).sum().backward()
    assert x.grad is not None


def test_rotary_table_cache():
    with FakeTensorMode():
        rotary_table(6, 11, 8, CPU)
    real = rotary_table(6, 11, 8, CPU)
    assert type(real[0]) is torch.Tensor
    assert rotary_table(6, 11, 8, CPU)[0] is real[0]


def test_rotation_half_precision():
    x = torch.randn(3000, 8)
    table = rotary_table(50, 60, 8, CPU)
    half = rotate(x.bfloat16(), *table)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half, rotate(x.bfloat16().float(), *table).bfloat16())
