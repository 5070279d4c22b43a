import math

import pytest

from ppma.tasks.significance import welch_p


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        # equal variances, 2 degrees of freedom: p = 1 - t / sqrt(2 + t**2) with t = 4 / sqrt(2)
        ([0.0, 2.0], [4.0, 6.0], 1 - math.sqrt(8 / 10)),
        # one sample without spread: the 1 degree of freedom of the other, p = 1 - 2 atan(t) / pi with t = 3
        ([3.0, 5.0], [1.0, 1.0], 1 - 2 * math.atan(3) / math.pi),
        ([1.0, 2.0, 3.0], [3.0, 2.0, 1.0], 1.0),
        ([1.0, 1.0], [2.0, 2.0], 0.0),
        ([1.0, 1.0], [1.0, 1.0], 1.0),
    ],
)
def test_welch_p_closed_forms(first, second, expected):
    assert welch_p(first, second) == pytest.approx(expected, rel=1e-6)
    assert welch_p(second, first) == welch_p(first, second)


def test_welch_p_too_few_values():
    assert math.isnan(welch_p([1.0], [1.0, 2.0]))
