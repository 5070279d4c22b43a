"""A wrong argument gets a ValueError that names it, what was expected and what came."""

import os
import subprocess
import sys

import pytest
import torch

import ppma
from ppma.ops import checks

GOOD = {
    "q": torch.randn(2, 3, 4, 8),
    "k": torch.randn(2, 3, 4, 8),
    "v": torch.randn(2, 3, 4, 5),
    "log_alpha": -torch.rand(2, 3, 4),
    "log_beta": -torch.rand(2, 3, 4),
}


def attention(**changes):
    return ppma.polyline_attention(**{**GOOD, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": [1.0]}, r"q: expected a tensor of shape \(\.\.\., \*grid, channels\), got list"),
        ({"q": torch.ones(2, 3, 4, 8, dtype=torch.int64)}, r"q: expected a floating-point tensor, got torch.int64"),
        ({"q": torch.randn(2, 4, 3, 8)}, r"q: expected shape \(\.\.\., 3, 4, channels\).*got \(2, 4, 3, 8\)"),
        ({"k": torch.randn(2, 3, 4, 7)}, r"k: expected 8 channels like q, got shape \(2, 3, 4, 7\)"),
        ({"k": torch.randn(2, 3, 4, 8).double()}, r"k: expected torch.float32 like q, got torch.float64"),
        ({"v": torch.randn(2, 3, 4, 0)}, r"v: expected at least one channel, got shape \(2, 3, 4, 0\)"),
        ({"v": torch.randn(5, 3, 4, 5)}, r"batch axes: expected shapes that broadcast, got .*v \(5,\)"),
        ({"v": torch.randn(2, 3, 4, 5, device="meta")}, r"v: expected device cpu like q, got meta"),
        ({"log_alpha": None}, r"log_alpha: expected a tensor of shape \(\.\.\., H, W\), got NoneType"),
        ({"log_alpha": torch.rand(2, 3, 4).half()}, r"log_alpha: expected log-decays in float32 or float64"),
        ({"log_alpha": torch.zeros(4)}, r"log_alpha: expected shape \(\.\.\., H, W\), got \(4,\)"),
        (
            {"log_beta": torch.zeros(2, 4, 4)},
            r"log_beta: expected the grid \(3, 4\) of log_alpha, got shape \(2, 4, 4\)",
        ),
        ({"log_beta": torch.zeros(2, 3, 4).double()}, r"log_beta: expected torch.float32 like log_alpha"),
        ({"log_alpha": torch.zeros(2, 0, 4)}, r"log_alpha: expected a grid with at least one token"),
        ({"paths": "vh"}, r"paths: expected one of 'v2h', 'h2v', '2d', got 'vh'; did you mean 'v2h'\?"),
        (
            {"combine": "hadamar"},
            r"combine: expected one of 'hadamard', 'logit', got 'hadamar'; did you mean 'hadamard'\?",
        ),
        ({"backend": "trition"}, r"backend: expected one of .*; did you mean 'triton'\?"),
        ({"scale": "big"}, r"scale: expected a number or None, got str"),
    ],
)
def test_attention_wrong_argument(changes, message):
    with pytest.raises(ValueError, match=message):
        attention(**changes)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ppma.polyline_mask(torch.zeros(2, 2), torch.zeros(2, 2), paths="both"), r"paths: expected one of"),
        (lambda: ppma.polyline_mask_nd([]), r"log_decays: expected at least one tensor"),
        (lambda: ppma.polyline_mask_nd(torch.zeros(2, 2)), r"log_decays: expected a sequence .* got a tensor"),
        (lambda: ppma.polyline_mask_nd([torch.zeros(3, 3), 1.0]), r"log_decays\[1\]: expected a tensor"),
        (
            lambda: ppma.polyline_mask_nd([torch.zeros(3), torch.zeros(3)]),
            r"log_decays\[0\]: expected shape .* got \(3,\)",
        ),
        (
            lambda: ppma.polyline_scan_nd(torch.zeros(3, 1), [torch.zeros(4)]),
            r"x: expected shape \(\.\.\., 4, channels\)",
        ),
        (
            lambda: ppma.polyline_scan(torch.zeros(2, 2, dtype=torch.int32), *torch.zeros(2, 2, 2)),
            r"x: expected a floating",
        ),
        (lambda: ppma.decomposed_attention(1, 2, 3, *torch.zeros(2, 2, 2)), r"s1: expected a tensor"),
    ],
)
def test_scan_and_mask_wrong_argument(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_backend_unavailable_reason():
    with pytest.raises(ppma.BackendUnavailableError, match=r"'triton' cannot run polyline_attention for .* on cpu: "):
        attention(backend="triton")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"log_alpha": torch.full((2, 3, 4), 0.5)}, r"log_alpha: expected values <= 0 .* got a largest value of 0.5"),
        ({"log_beta": torch.full((2, 3, 4), torch.nan)}, r"log_beta: expected values <= 0, got NaN"),
        ({"v": torch.full((2, 3, 4, 5), torch.inf)}, r"v: expected finite values"),
    ],
)
def test_validation_only_on_request(changes, message):
    attention()  # the first call of a process is always checked
    attention(**changes)
    with ppma.validation(), pytest.raises(ValueError, match=message):
        attention(**changes)
    attention(**changes)


def test_validation_decays_0_and_1():
    with ppma.validation():
        attention(log_alpha=torch.zeros(2, 3, 4), log_beta=torch.full((2, 3, 4), -torch.inf))


def test_validation_environment_variable():
    code = "import torch, ppma; ppma.polyline_mask(torch.zeros(2, 2), torch.full((2, 2), torch.nan))"
    for value, fails in (("1", True), ("0", False)):
        run = subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PPMA_VALIDATE": value}, capture_output=True, text=True
        )
        assert (run.returncode != 0) is fails
        assert ("log_beta: expected values <= 0, got NaN" in run.stderr) is fails


def test_batch_axes_broadcast():
    shared = -torch.rand(3, 4)
    out = attention(log_alpha=shared, log_beta=shared)
    torch.testing.assert_close(out, attention(log_alpha=shared.expand(2, 3, 4), log_beta=shared.expand(2, 3, 4)))
    many = {name: tensor.expand(2, 1, 3, *tensor.shape) for name, tensor in GOOD.items()}
    torch.testing.assert_close(attention(**many)[1, 0, 2], attention())


def test_import_without_extras():
    """Heavy packages load when they are used."""
    heavy = "{'triton', 'transformers', 'matplotlib', 'onnx', 'onnxruntime', 'tensorboard'}"
    ours, theirs = (
        subprocess.run(
            [sys.executable, "-c", f"import sys, torch, timm{module}; print(sorted({heavy} & set(sys.modules)))"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for module in (", ppma", "")
    )
    assert ours == theirs


def test_without_compiler_triton_and_extras_the_torch_backend_serves(tmp_path):
    missing = [
        "triton",
        "matplotlib",
        "onnx",
        "onnxscript",
        "onnxruntime",
        "transformers",
        "tensorboard",
        "rich",
    ]
    code = f"""
import sys
sys.modules.update(dict.fromkeys({missing!r}))
import torch, timm, ppma
q, k, v = torch.randn(3, 2, 3, 4, 8)
out = ppma.polyline_attention(q, k, v, *-torch.rand(2, 2, 3, 4))
assert torch.isfinite(timm.create_model("ppma_nano").eval()(torch.randn(1, 3, 32, 32))).all()
try:
    ppma.criss_cross_attention(q, k, v, *-torch.rand(2, 2, 3, 4), backend="native")
except ppma.BackendUnavailableError as error:
    print(error)
"""
    env = {**os.environ, "PPMA_NATIVE_DIR": str(tmp_path)}
    env.pop("PPMA_NATIVE_ISA", None)
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "the native library was not built" in run.stdout


def test_positive_log_decays_first_call():
    """Decays passed in place of their logarithms, without validation."""
    code = """
import torch, ppma
q, k, v = torch.randn(3, 2, 3, 4, 8)
decays = torch.rand(2, 2, 3, 4)
torch.func.vmap(ppma.linear_attention)(q, k, v, *decays.log())
for _ in range(2):
    try:
        ppma.polyline_attention(q, k, v, *decays)
    except ValueError as error:
        print(error)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    expected = "log_alpha: expected values <= 0 (logarithms of decays in [0, 1]), got a largest value of"
    assert [line.startswith(expected) for line in run.stdout.splitlines()] == [True, True]


def test_positive_log_decays_later_calls(monkeypatch):
    ppma.polyline_mask(torch.zeros(2, 2), torch.zeros(2, 2))
    monkeypatch.setattr(checks, "_readable", lambda tensor: pytest.fail("values are read"))
    ppma.polyline_mask(torch.zeros(2, 2), torch.zeros(2, 2))
