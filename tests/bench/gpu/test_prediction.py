"""The prediction for the GPU kernels, and the benchmark that waits for a GPU."""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

import ppma
from ppma.bench import unmasked
from ppma.bench.gpu import measure, prediction
from ppma.bench.gpu.prediction import GPUS, MODELS, Stage, predict
from ppma.bench.gpu.work import Work, work_of
from ppma_cli import main


def test_models_blocks():
    assert [[stage.blocks for stage in stages] for stages in MODELS.values()] == [
        [2, 2, 8, 2],
        [3, 4, 18, 4],
        [4, 8, 25, 8],
    ]
    assert [[stage.full for stage in stages] for stages in MODELS.values()] == [
        [False, False, True, True],
        [False, False, False, True],
        [False, False, False, True],
    ]


def test_work_bytes_full_attention():
    """q, k, v and the output in half precision, maximum and sum; for the mask two log-decays, two words twice."""
    stage = Stage(1, 14, 8, 32, True)
    launches = stage.launches(2, "hadamard", backward=False)
    tokens = 2 * 8 * 14 * 14
    plain = sum((work_of(launch, mask=False) for launch in launches), Work())
    masked = sum((work_of(launch) for launch in launches), Work())
    assert plain.bytes == tokens * (4 * 32 * 2 + 2 * 4)
    assert masked.bytes - plain.bytes == tokens * (2 * 4 + 2 * 8 + 2 * 8)


def test_work_plain_same_for_combines():
    stage = Stage(1, 14, 8, 32, True)
    for backward in (False, True):
        works = [
            sum((work_of(launch, mask=False) for launch in stage.launches(2, combine, backward)), Work()).bytes
            for combine in ("hadamard", "logit")
        ]
        assert works[0] == works[1]


def test_work_matrix_line_tile():
    """Lines of 56 take 64 queries times 64 keys; three launches, the second with two values."""
    stage = Stage(1, 56, 1, 16, False)
    launches = [launch for launch in stage.launches(1, "logit", False) if launch.kernel.__name__ == "line_forward"]
    assert [work_of(launch).matrix for launch in launches] == [2 * 56 * 64 * 64 * 16 * n for n in (2, 3, 2)]


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("combine", ["hadamard", "logit"])
def test_predict_mask_costs(combine, backward):
    for stage in prediction.block_kinds():
        found = predict(stage, GPUS[0], combine, backward, batch=2)
        assert found.masked >= found.plain > 0
        assert found.bound in ("memory", "matrix", "exponentials", "arithmetic")


def test_reports_titles():
    assert all("not a measurement" in report.title for report in prediction.reports())


def test_measure_without_gpu(capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ValueError, match="expected a GPU for cuda, got a machine where PyTorch finds none"):
        measure.run("cuda")
    with pytest.raises(ValueError, match="expected cuda, got cpu"):
        measure.run("cpu")


@pytest.mark.parametrize(
    ("plain", "masked"),
    [(unmasked.without_mask, ppma.polyline_attention), (unmasked.lines_without_mask, ppma.criss_cross_attention)],
)
def test_unmasked_same_as_decay_one(plain, masked, monkeypatch):
    """PyTorch's fused kernels take four axes."""
    axes, attention = [], F.scaled_dot_product_attention

    def counted(*tensors):
        axes.extend(tensor.ndim for tensor in tensors)
        return attention(*tensors)

    monkeypatch.setattr(F, "scaled_dot_product_attention", counted)
    q, k, v = torch.randn(3, 2, 2, 3, 4, 8)
    ones = torch.zeros(2, 2, 3, 4)
    paths = 2 if plain is unmasked.without_mask else 1  # of criss-cross attention both are computed
    torch.testing.assert_close(plain(q, k, v) * paths, masked(q, k, v, ones, ones))
    assert set(axes) == {4}


def test_kernels_command_predictions(capsys):
    assert main(["kernels"]) == 0
    assert "PPMA-B" in capsys.readouterr().out
