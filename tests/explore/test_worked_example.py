import re

from ppma.explore.worked_example import worked_example


def test_worked_example_numbers():
    text = worked_example()
    weight = 0.9 * 0.3 * 0.9 * 0.8 * 0.8 * 0.5
    assert f"0.9 x 0.3 x 0.9 x 0.8 x 0.8 x 0.5 = {weight:.5f}" in text
    assert "  Q * * *\n  . . . *\n  . . . *\n  . . . K" in text
    assert float(re.search(r"differ by at most (\S+)\.", text).group(1)) < 1e-13
