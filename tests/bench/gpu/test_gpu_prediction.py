"""The prediction for the GPU kernels, and the benchmark that waits for a GPU."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

import ppma
from ppma.bench import unmasked
from ppma.bench.gpu import measure, prediction, work
from ppma.bench.gpu.assembly import has_scores, matrix_products
from ppma.bench.gpu.cases import attention_inputs
from ppma.bench.gpu.prediction import GPUS, MODELS, Stage, predict
from ppma.bench.gpu.work import scores, without_mask
from ppma.layers import PolylineAttention
from ppma.models.config import CONFIGS
from ppma_cli import main


def test_models_blocks():
    """Blocks, grids, heads and kinds are those of the registered models."""
    for name, stages in MODELS.values():
        config = CONFIGS[name]
        assert [stage.blocks for stage in stages] == list(config.depths)
        assert [stage.heads for stage in stages] == list(config.heads)
        assert [stage.full for stage in stages] == [kind == "full" for kind in config.kinds]


def bytes_of(launches):
    return sum(work.bytes_of(launch) for launch in launches if launch is not None)


def test_work_bytes_full_attention():
    """q, k, v and the output in half precision, maximum and sum; for the mask the log-decays, and tables twice."""
    launches = Stage(1, 14, 8, 32, True).launches(2, "hadamard", backward=False)
    tokens = 2 * 8 * 14 * 14
    tables = 2 * 8 * (14 * 16 * 16 + 14 * 14 * 16) * 4
    plain = bytes_of(without_mask(launch) for launch in launches)
    assert plain == tokens * (4 * 32 * 2 + 2 * 4)
    assert bytes_of(launches) - plain == tokens * 2 * 4 + 2 * tables


@pytest.mark.parametrize(("combine", "softmaxes", "first"), [("hadamard", 1, 0), ("logit", 2, 32 * 4)])
def test_work_bytes_inference(combine, softmaxes, first):
    """Without a backward pass to come neither maximum and sum are written nor the output of the first softmax."""
    stage = Stage(1, 14, 8, 32, True)
    training, inference = (bytes_of(stage.launches(2, combine, False, save)) for save in (True, False))
    assert training - inference == 2 * 8 * 14 * 14 * (2 * softmaxes * 4 + first)


@pytest.mark.parametrize("backward", [False, True])
def test_without_mask_same_for_combines(backward):
    stage = Stage(1, 14, 8, 32, True)
    plain = [
        bytes_of(without_mask(launch) for launch in stage.launches(2, combine, backward))
        for combine in ("hadamard", "logit")
    ]
    assert plain[0] == plain[1]


def test_scores_line_tile():
    """Lines of 56 take 64 queries times 64 keys; three launches, the second with two values."""
    stage = Stage(1, 56, 1, 16, False)
    launches = [launch for launch in stage.launches(1, "logit", False) if launch.kernel.__name__ == "line_forward"]
    assert [scores(launch) for launch in launches] == [56 * 64 * 64] * 3
    assert [matrix_products(launch) for launch in launches] == [16 * n for n in (2, 3, 2)]


def test_scores_packed_rows():
    """7 x 7: rows of 8 columns, two of them in a tile, so 8 x 8 queries times 8 x 8 keys."""
    (launch,) = [x for x in Stage(1, 7, 2, 32, True).launches(3, "hadamard", False) if has_scores(x)]
    assert scores(launch) == 3 * 2 * 64 * 64


def test_predict_mask_costs():
    found = predict(Stage(1, 14, 8, 32, True), GPUS[0], "hadamard", False, batch=2)
    assert found.masked > found.plain > 0
    assert found.bound in ("memory", "matrix", "instructions", "special functions")


def test_model_seconds_more_with_training(monkeypatch):
    """Everything but the attention, whose prediction takes a compiler."""
    monkeypatch.setattr(prediction, "predict", lambda *_, **__: prediction.Prediction(2e-6, 1e-6, "memory"))
    seconds = {
        (mask, train): prediction.model_seconds("PPMA-T", GPUS[0], "hadamard", mask, train, batch=1)
        for mask in (False, True)
        for train in (False, True)
    }
    assert 0 < seconds[False, False] < seconds[True, False] < seconds[True, True]
    assert seconds[False, False] < seconds[False, True]


def test_decay_head_gradient_without_a_pass():
    """Projection and decay head read the same tokens; the kernel of the latter adds the two gradients."""

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            names.append(operator.__name__)
            return operator(*args, **(kwargs or {}))

    names = []
    with torch.device("meta"):
        layer = PolylineAttention(64, heads=2, rope=True).bfloat16()
        x = torch.empty((2, 14, 14, 64), dtype=torch.bfloat16, requires_grad=True)
        with Names(), prediction._composed_kernels() as launches:
            layer(x).backward(torch.empty_like(x))
    assert [launch.kernel.__name__ for launch in launches].count("decay_backward") == 1
    assert "mm.default" in names
    assert "add.Tensor" not in names


@pytest.mark.slow
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("combine", ["hadamard", "logit"])
@pytest.mark.parametrize("name", MODELS)
def test_model_overhead_below_target(name, combine, train):
    """The mask costs less than a tenth of a whole model."""
    for gpu in GPUS:
        plain, masked = (prediction.model_seconds(name, gpu, combine, mask, train) for mask in (False, True))
        assert masked < 1.1 * plain, gpu.name


@pytest.mark.parametrize(
    ("full", "masked", "plain"),
    [(True, ["mask_tables", "attention_forward"], 1), (False, ["line_potentials", *["line_forward"] * 3], 3)],
)
def test_operator_launches_with_and_without_mask(full, masked, plain):
    """What is timed as the cost of the mask: the same kernels, compiled without it."""
    stage = Stage(1, 14, 2, 32, full)
    tensors = attention_inputs(2, 2, 14, 14, 32, torch.bfloat16)
    found = {
        mask: measure.operator_launches(stage, "hadamard", tensors, backward=False, mask=mask) for mask in (True, False)
    }
    assert [launch.kernel.__name__ for launch in found[True]] == masked
    assert [launch.kernel.__name__ for launch in found[False]] == masked[-plain:]
    for launch in found[False]:
        assert not launch.arguments.get("TABLES")
        assert launch.arguments.get("potential") is None
    both = measure.operator_launches(stage, "hadamard", tensors, backward=True, mask=True)
    assert len(both) > len(found[True])


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


@pytest.mark.slow
def test_kernels_command_predictions(capsys):
    assert main(["kernels"]) == 0
    out = capsys.readouterr().out
    assert "PPMA-B" in out
    assert out.count("not a measurement") == out.count("## ")
