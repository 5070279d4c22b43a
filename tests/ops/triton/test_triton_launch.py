"""Which configuration is launched, what a failing compile becomes, and what "auto" makes of it."""

import sys
import warnings
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from torch.utils._python_dispatch import TorchDispatchMode
from triton._C.libtriton import native_specialize_impl
from triton.backends.nvidia.compiler import CUDABackend

import ppma
from ppma.bench.gpu import cases
from ppma.bench.gpu.prediction import MODELS
from ppma.bench.gpu.targets import compile_for
from ppma.ops import backends
from ppma.ops.backends import pytorch, triton
from ppma.ops.backends.triton import launch as launching
from ppma.ops.backends.triton.configs import attention_tile
from ppma.ops.backends.triton.launch import Config, launch, recording


class Kernel:
    """Stands in for a `triton.jit` function."""

    def __init__(self, error=None):
        self.error, self.launched = error, []

    __name__ = "kernel"

    def __getitem__(self, grid):
        return self.run

    def run(self, **arguments):
        if self.error is not None:
            raise self.error
        self.launched.append(arguments["BLOCK_N"])


CONFIGS = [Config(4, 1, {"BLOCK_N": 16}), Config(4, 1, {"BLOCK_N": 32})]


@pytest.fixture(autouse=True)
def forgotten(monkeypatch):
    monkeypatch.setattr(launching, "_failed", {})
    monkeypatch.setattr(launching, "_tuned", {})
    backends._warn_once.cache_clear()


def run(kernel):
    launch(kernel, (1,), CONFIGS, x=torch.zeros(1), MODE="test")


def test_launch_default_config():
    kernel = Kernel()
    run(kernel)
    assert kernel.launched == [16]


def test_launch_autotune_opt_in(monkeypatch):
    monkeypatch.setenv("PPMA_TRITON_AUTOTUNE", "1")
    measured = []

    def milliseconds(call):
        call()
        measured.append(len(measured))
        return 2.0 if len(measured) == 1 else 1.0  # the second is faster

    monkeypatch.setattr(launching, "_milliseconds", milliseconds)
    kernel = Kernel()
    run(kernel)
    run(kernel)
    assert kernel.launched == [16, 32, 32, 32]
    assert len(measured) == 2


def test_launch_failed_compile_cached():
    with pytest.raises(ppma.BackendUnavailableError, match="kernel does not compile for cpu: no such instruction"):
        run(Kernel(RuntimeError("no such instruction")))
    untried = Kernel()
    with pytest.raises(ppma.BackendUnavailableError):
        run(untried)
    assert untried.launched == []


def test_launch_faulty_kernel_raises():
    with pytest.raises(RuntimeError, match="illegal memory access") as caught:
        run(Kernel(RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")))
    assert not isinstance(caught.value, ppma.BackendUnavailableError)


def inputs():
    q, k, v = torch.randn(3, 1, 1, 2, 3, 4)
    return q, k, v, *(-torch.rand(2, 1, 1, 2, 3))


def refuse(*_, **__):
    raise ppma.BackendUnavailableError("the kernel does not compile")


def test_auto_fallback_warns_once(monkeypatch):
    monkeypatch.setitem(backends._PREFERENCE, "cpu", ("triton", "torch"))
    monkeypatch.setattr(triton, "unsupported_reason", lambda device, dtype: None)
    monkeypatch.setattr(triton, "polyline_attention", refuse)
    with pytest.warns(RuntimeWarning, match="attention runs in plain PyTorch: the kernel does not compile"):
        out = ppma.polyline_attention(*inputs())
    assert out.shape == (1, 1, 2, 3, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ppma.polyline_attention(*inputs())


def test_explicit_backend_raises(monkeypatch):
    monkeypatch.setattr(triton, "unsupported_reason", lambda device, dtype: None)
    monkeypatch.setattr(triton, "polyline_attention", refuse)
    with pytest.raises(ppma.BackendUnavailableError, match="does not compile"):
        ppma.polyline_attention(*inputs(), backend="triton")


def test_unsupported_reason_no_gpu():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ppma.BackendUnavailableError, match="it needs a GPU"):
        ppma.polyline_attention(*inputs(), backend="triton")


@pytest.mark.parametrize(("version", "refused"), [("3.2.0", True), ("3.3.0", False), ("3.10.1+git", False)])
def test_unsupported_reason_old_triton(version, refused, monkeypatch):
    monkeypatch.setattr(triton.triton, "__version__", version)
    reason = triton.unsupported_reason(torch.device("cpu"), torch.float32)
    assert ("it needs Triton 3.3 or newer" in reason) == refused


def test_operators_same_as_torch():
    assert set(triton.__all__) == set(pytorch.__all__) - {
        "conv3x3",
        "depthwise_linear",
        "fused_conv",
        "fused_linear",
        "project",
        "trained_linear",
    }


@pytest.mark.parametrize(
    ("record", "launches"),
    [
        (cases.record_attention, (2, 4)),
        (cases.record_criss_cross, (4, 10)),
        (cases.record_rotary, (1, 1)),
        (cases.record_decay_head, (1, 1)),
        (cases.record_depthwise, (3, 3)),  # three convolutions
    ],
)
@pytest.mark.parametrize("combine", ["hadamard", "logit"])
def test_launches_of_a_block(record, launches, combine):
    """Host time is spent by the launch: one for the mask, then as few as there are passes over the scores."""
    tensors = cases.attention_inputs(2, 4, 14, 14, 32, torch.bfloat16)
    for backward, expected in zip((False, True), launches, strict=True):
        with recording() as recorded:
            record(tensors, combine, backward)
        assert len(recorded) == expected


@pytest.mark.parametrize("record", [cases.record_attention, cases.record_criss_cross])
@pytest.mark.parametrize("combine", ["hadamard", "logit"])
def test_no_passes_beside_the_launches(record, combine):
    """PyTorch allocates and takes views; whatever else it did would be a pass over tensors that nobody predicts."""

    class Passes(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            if not operator.is_view and not operator.__name__.startswith(("empty", "new_empty")):
                passes.append(operator.__name__)
            return operator(*args, **(kwargs or {}))

    passes = []
    tensors = cases.attention_inputs(2, 4, 14, 14, 32, torch.bfloat16)
    with recording(), Passes():
        record(tensors, combine, backward=False)
        record(tensors, combine, backward=True)
    assert passes == []


def variants(size):
    """What PPMA-T's kernels are specialised for at an image size, in training."""
    found = []
    for stage in MODELS["PPMA-T"][1]:
        grid = replace(stage, side=stage.side * size // 224)
        for backward in (False, True):
            found += grid.launches(4, "hadamard", backward)
            tensors = cases.attention_inputs(4, stage.heads, grid.side, grid.side, stage.d, torch.bfloat16)
            with recording() as recorded:
                for record in (cases.record_rotary, cases.record_depthwise, cases.record_decay_head):
                    record(tensors, "hadamard", backward)
            found += recorded
    return {(one.kernel.__name__, *map(str, specialisation(one))) for one in found}


def specialisation(launched):
    """As Triton's own binder sees the arguments."""
    for parameter in launched.kernel.params:
        value = launched.arguments[parameter.name]
        if parameter.is_constexpr:
            yield parameter.name, value
        else:
            flags = not parameter.do_not_specialize, not parameter.do_not_specialize_on_alignment
            yield parameter.name, native_specialize_impl(CUDABackend, value, parameter.is_const, *flags)


def test_image_size_compiles_nothing():
    """Training at 224 x 224 and then at 256 x 256: no kernel is compiled again."""
    first = variants(224)
    assert 30 < len(first) < 90
    assert variants(256) <= first


def test_image_size_compiled_object():
    """The compiler itself finds the kernel of another size."""
    compiled = []
    for side in (14, 16):
        with recording() as recorded:
            cases.record_attention(cases.attention_inputs(2, 4, side, side, 32, torch.bfloat16), "hadamard", False)
        compiled.append([compile_for(one, "sm_80") for one in recorded])
    assert all(one is other for one, other in zip(*compiled, strict=True))


@pytest.mark.parametrize("failing", ["forward", "backward"])
def test_auto_never_mixes_what_backends_saved(failing, monkeypatch):
    """Where one pass of full attention falls back, its gradients are still those of PyTorch."""
    attention = sys.modules["ppma.ops.backends.triton.attention"]
    monkeypatch.setitem(backends._PREFERENCE, "cpu", ("triton", "torch"))
    monkeypatch.setattr(triton, "unsupported_reason", lambda device, dtype: None)
    monkeypatch.setattr(attention, "_refused", {})
    tensors = [tensor.requires_grad_() for tensor in inputs()]
    if failing == "forward":
        monkeypatch.setattr(attention, "masked_forward", refuse)
    else:  # saves in units of its own
        monkeypatch.setattr(attention, "masked_forward", lambda q, k, v, mask, out, stats, *_, **__: stats.fill_(7.0))
        monkeypatch.setattr(attention, "masked_backward", refuse)
    monkeypatch.setattr(attention, "make_mask", lambda *_: None)
    with pytest.warns(RuntimeWarning, match="runs in plain PyTorch"):
        grads = torch.autograd.grad(ppma.polyline_attention(*tensors).sum(), tensors)
    expected = torch.autograd.grad(ppma.polyline_attention(*tensors, backend="torch").sum(), tensors)
    for grad, one in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad, one)


def test_recording_launches_nothing():
    kernel = Kernel()
    with recording() as launches:
        run(kernel)
    assert kernel.launched == []
    assert launches[0].arguments["BLOCK_N"] == 16


@pytest.mark.parametrize(
    ("grid", "tile"), [((7, 7), (4, 8)), ((14, 14), (2, 16)), ((28, 28), (2, 16)), ((56, 56), (4, 8))]
)
def test_attention_tile_small_grids(grid, tile):
    assert attention_tile(*grid, None, torch.bfloat16, 32) == tile


def test_attention_tile_bands():
    tiles = {band: attention_tile(64, 7, band, torch.bfloat16, 32) for band in (1, 2, 4, 64)}
    assert all(band % tile.rows == 0 and tile.rows * tile.cols >= 16 for band, tile in tiles.items())
