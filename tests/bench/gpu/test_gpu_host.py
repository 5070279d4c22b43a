"""Host time of operator calls, with the driver left out."""

import pytest
import torch

pytest.importorskip("triton")

from ppma.bench.gpu.host import OPERATORS, host_report
from ppma.ops.backends.triton import configs, tiles
from ppma_cli import main


@pytest.mark.slow
def test_host_report_counts_launches():
    """Two launches of full attention forward and four backward, of criss-cross attention four and ten."""
    report = host_report(repeats=1, rounds=1)
    assert [row[0] for row in report.rows] == [name for name in OPERATORS for _ in range(2)]
    assert [row[2] for row in report.rows] == [2, 6, 4, 14]
    assert all(0 < row[3] <= row[4] for row in report.rows)


@pytest.mark.slow
def test_kernels_command_host(capsys):
    assert main(["kernels", "--host"]) == 0
    assert "Host time of an operator call" in capsys.readouterr().out


def test_layouts_and_tiles_cached():
    """The same shapes again cost a look-up."""
    tensor = torch.empty(2, 3, 5, 7, 16)
    tiles.plane(tensor[..., 0])
    hits = tiles._plane_layout.cache_info().hits
    tiles.plane(torch.empty(2, 3, 5, 7, 16)[..., 0])
    assert tiles._plane_layout.cache_info().hits == hits + 1
    tile = configs.attention_tile(14, 14, None, torch.bfloat16, 32)
    assert configs.attention_tile(14, 14, None, torch.bfloat16, 32) is tile
    assert configs.attention_configs("forward", torch.bfloat16, tile, 32) is configs.attention_configs(
        "forward", torch.bfloat16, tile, 32
    )
