"""The native library itself: how it is found, its exponentials, its threads, and that it builds anywhere."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ppma
from ppma.ops import backends
from ppma.ops.backends import BackendUnavailableError, native
from ppma.ops.backends.native import library

ROOT = Path(__file__).parents[2]


@pytest.mark.native
def test_isa_auto():
    assert library.isa() == library.available()[0]
    assert library.available()[-1] == "portable"
    assert backends.resolve("auto", "criss_cross_attention", torch.device("cpu"), torch.float32) is native


def test_unsupported_reason_tensor():
    assert "CPU" in str(native.unsupported_reason(torch.device("cuda"), torch.float32))
    assert "float32" in str(native.unsupported_reason(torch.device("cpu"), torch.float64))


def test_unsupported_reason_not_built(monkeypatch, tmp_path):
    monkeypatch.setattr(library, "folder", str(tmp_path))
    x, decay = torch.randn(2, 2, 3), torch.zeros(2, 2)
    with pytest.raises(backends.BackendUnavailableError, match="was not built"):
        ppma.criss_cross_attention(x, x, x, decay, decay, backend="native")
    ppma.criss_cross_attention(x, x, x, decay, decay)  # "auto" does without


def test_unsupported_reason_not_loadable(monkeypatch, tmp_path):
    (tmp_path / "libppma_portable.so").write_text("not a library")
    monkeypatch.setattr(library, "folder", str(tmp_path))
    assert "does not load" in str(library.unsupported_reason())


@pytest.mark.native
def test_unsupported_reason_unknown_isa(monkeypatch):
    monkeypatch.setattr(library, "forced_isa", "avx3")
    assert "expected one of" in str(library.unsupported_reason())


@pytest.mark.native
def test_isa_from_the_environment():
    """It is read when the library's module is imported, so only a new process shows it."""
    code = "from ppma.ops.backends.native import library; library.loaded(); print(library.isa())"
    environment = {**os.environ, "PPMA_NATIVE_ISA": "portable"}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert result.stdout == "portable\n"


@pytest.mark.native
def test_kernel_missing_symbol():
    with pytest.raises(backends.BackendUnavailableError, match="install ppma again"):
        library.Kernel("ppma_of_tomorrow")()


@pytest.mark.native
@pytest.mark.parametrize("isa", library.available() or ["none"])
@pytest.mark.parametrize(
    ("name", "exact", "lowest", "highest", "bound"),
    [("ppma_exp", torch.exp, -87.33654, 88.72283, 1.5e-7), ("ppma_exp2", torch.exp2, -126.0, 127.0, 1.2e-7)],
)
def test_exponentials_error_bound(monkeypatch, isa, name, exact, lowest, highest, bound):
    monkeypatch.setattr(library, "forced_isa", isa)
    kernel = library.Kernel(name, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)

    def run(x):
        y = torch.empty_like(x)
        kernel(x.data_ptr(), y.data_ptr(), x.numel())
        return y

    generator = torch.Generator().manual_seed(0)
    x = torch.rand(2_000_003, generator=generator, dtype=torch.float64) * (highest - lowest) + lowest
    small = torch.logspace(-30, 0, 10_007)
    x = torch.cat([x.float().clamp(lowest, highest), small, -small])
    wide = exact(x.double())
    assert ((run(x).double() - wide) / wide).abs().max() <= bound

    special = run(torch.tensor([0.0, -0.0, -torch.inf, -1e30, 2 * lowest, torch.nan]))
    assert special[:5].tolist() == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert special[5].isnan()
    if name == "ppma_exp":
        assert run(torch.tensor([torch.inf, 1e30, 89.0])).tolist() == [torch.inf] * 3


def team_size(threads):
    size = ctypes.c_int32()
    library.Kernel("ppma_team_size", ctypes.c_int, ctypes.POINTER(ctypes.c_int32))(threads, size)
    return size.value


@pytest.mark.native
def test_threads_of_torch():
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert library.threads() == threads
            assert team_size(library.threads()) == threads
    finally:
        torch.set_num_threads(before)


@pytest.mark.native
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_openmp_one_runtime():
    team_size(2)
    runtimes = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "omp" in line}
    assert len({path for path in runtimes if Path(path).name.startswith(("libgomp", "libomp", "libiomp"))}) == 1


@pytest.mark.native
def test_denormals_outside_kernels():
    x, decay = torch.randn(4, 4, 8), torch.zeros(4, 4)
    ppma.criss_cross_attention(x, x, x, decay, decay, backend="native")
    assert (torch.full((64,), 1e-40) * 1.0 > 0).all()


def test_install_without_compiler(tmp_path):
    command = [sys.executable, "setup.py", "build_ext", "--build-lib", tmp_path / "lib", "--build-temp", tmp_path]
    result = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "CXX": "no-such-compiler"}, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "THE CPU KERNELS WERE NOT BUILT for portable" in result.stdout + result.stderr
    assert not list(tmp_path.rglob("*.so"))


@pytest.mark.native
def test_address_only_source_of_pointers():
    folder = Path(native.__file__).parent
    assert [path.name for path in folder.glob("*.py") if ".data_ptr(" in path.read_text()] == ["library.py"]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(2, 3, dtype=torch.float64),
        torch.zeros(2, 3, dtype=torch.float16),
        torch.zeros(3, 2),
        torch.zeros(6),
        torch.zeros(2, 3, device="meta"),
    ],
    ids=["float64", "float16", "transposed shape", "other axes", "other device"],
)
def test_address_wrong_tensor(tensor):
    for check in (library.address, library.contiguous_address, library.view):
        check(torch.zeros(2, 3), (2, 3))
        with pytest.raises(ValueError, match=r"expected torch.float32 of shape \(2, 3\) on the CPU, got torch"):
            check(tensor, (2, 3))


def test_contiguous_address_strided_tensor():
    with pytest.raises(ValueError, match="expected a contiguous tensor"):
        library.contiguous_address(torch.zeros(3, 2).mT, (2, 3))


WRONG = {
    "k in float64": (1, lambda tensor: tensor.double()),
    "v on a smaller grid": (2, lambda tensor: tensor[:, :, :-1]),
    "a batch of log-decays too small": (3, lambda tensor: tensor[:1]),
    "an axis of log-decays missing": (4, lambda tensor: tensor[0]),
}


@pytest.mark.native
@pytest.mark.parametrize("position_and_change", WRONG.values(), ids=list(WRONG))
@pytest.mark.parametrize("operator", ["polyline_attention", "criss_cross_attention", "linear_attention"])
def test_operators_wrong_tensors(operator, position_and_change):
    """Called as `torch.ops.ppma.*`, where no argument was checked before."""
    position, change = position_and_change
    tensors = [torch.zeros(2, 2, 3, 4, 5) for _ in range(3)] + [torch.zeros(2, 2, 3, 4) for _ in range(2)]
    tensors[position] = change(tensors[position])
    options = ("2d",) if operator == "linear_attention" else ("hadamard", "2d", 1.0)
    with pytest.raises(ValueError, match="native kernels: expected"):
        getattr(torch.ops.ppma, operator)(*tensors, *options, "native")


@pytest.mark.native
def test_backward_wrong_saved_tensors():
    tensors = [torch.zeros(2, 2, 3, 4, 5) for _ in range(3)] + [torch.zeros(2, 2, 3, 4) for _ in range(2)]
    out, stats, first = torch.ops.ppma.polyline_attention(*tensors, "hadamard", "2d", 1.0, "native")
    with pytest.raises(ValueError, match="native kernels: expected"):
        torch.ops.ppma.polyline_attention_backward(out, *tensors, out, stats, first, "logit", "2d", 1.0, "native")
    with pytest.raises(ValueError, match="native kernels: expected"):
        torch.ops.ppma.polyline_attention_backward(
            out[..., :4], *tensors, out, stats, first, "hadamard", "2d", 1.0, "native"
        )


@pytest.mark.native
def test_depthwise_unsupported_kernel_size():
    x = torch.zeros(1, 8, 8, 4)
    with pytest.raises(BackendUnavailableError, match="expected a depthwise kernel of size 3 or 5, got 7"):
        native.depthwise_conv(x, torch.zeros(4, 1, 7, 7), None, None, False)


@pytest.mark.parametrize(
    ("without", "outcome", "message"),
    [
        ("", "1 error", "PPMA_TEST_WITHOUT_NATIVE=1 skips"),
        ("1", "1 skipped", "PPMA_TEST_WITHOUT_NATIVE=1: the native"),
    ],
)
def test_suite_without_the_library(tmp_path, without, outcome, message):
    """A test that needs the library fails where it is missing, unless it is told to do without."""
    environment = {**os.environ, "PPMA_NATIVE_DIR": str(tmp_path), "PPMA_TEST_WITHOUT_NATIVE": without}
    environment.pop("PYTEST_ADDOPTS", None)
    environment.pop("PYTEST_XDIST_WORKER", None)
    test = f"{__file__}::test_depthwise_unsupported_kernel_size"
    command = [sys.executable, "-m", "pytest", "-q", "-rfs", "-p", "no:cacheprovider", "-p", "no:xdist", test]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert outcome in result.stdout
    assert message in result.stdout
