"""The native attentions for 64-bit ARM, run by qemu: the NEON code that the compiler makes of the portable path.

Needs `aarch64-linux-gnu-g++` and `qemu-aarch64` (Debian: g++-aarch64-linux-gnu, qemu-user).
"""

import functools
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import ppma
from ppma.ops.backends import native
from ppma.testing import error_budget, outputs_and_gradients, random_log_decay

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
SOURCES = [
    *("attention", "attention_backward", "attention_tiles", "small_attention"),
    *("criss_cross", "criss_cross_backward", "line_map", "product"),
]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (shutil.which(COMPILER) and shutil.which(EMULATOR)), reason=f"{COMPILER} and {EMULATOR}"),
]


CSRC = Path(native.__file__).parent / "csrc"
FLAGS = ["-std=c++17", "-O2", "-ffp-contract=fast", "-fno-math-errno", "-Wall", "-Werror", f"-I{CSRC}"]


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    folder = tmp_path_factory.mktemp("arm")
    sources = [Path(__file__).with_name("arm_driver.cpp"), *(CSRC / f"{name}.cpp" for name in SOURCES)]
    subprocess.run([COMPILER, *FLAGS, "-static", *sources, "-o", folder / "driver"], check=True)
    return folder / "driver"


def test_arm_compiles(tmp_path):
    """The whole library; the tests below run the attentions of it."""
    library = tmp_path / "library.so"
    options = ["-fopenmp", "-fPIC", "-shared", "-Wl,--no-undefined"]
    subprocess.run([COMPILER, *FLAGS, *options, *sorted(CSRC.glob("*.cpp")), "-o", library], check=True)
    listing = subprocess.run(["aarch64-linux-gnu-nm", "-D", library], capture_output=True, text=True, check=True).stdout
    for name in ("ppma_layers", "ppma_packed_conv", "ppma_depthwise_conv_backward", "ppma_linear_attention"):
        assert f" T {name}\n" in listing


@pytest.mark.parametrize("combine", ["hadamard", "logit"])
@pytest.mark.parametrize("function", [ppma.polyline_attention, ppma.criss_cross_attention])
@pytest.mark.parametrize("grid", [(9, 7), (5, 14)], ids=str)
def test_arm_accuracy(driver, function, combine, grid):
    generator = torch.Generator().manual_seed(0)
    batch, heads, d, dv = 1, 2, 16, 20
    shape = (batch, heads, *grid)
    inputs = [torch.randn(*shape, channels, generator=generator) for channels in (d, d, dv)]
    inputs += [random_log_decay(*shape, generator=generator) for _ in range(2)]
    # The cotangent of `outputs_and_gradients`.
    grad = torch.randn(*shape, dv, generator=torch.Generator().manual_seed(0), dtype=torch.float64).float()
    arguments = [function.__name__, int(combine == "logit"), batch, heads, *grid, d, dv]
    data = b"".join(tensor.contiguous().numpy().tobytes() for tensor in (*inputs, grad))
    command = [EMULATOR, driver, *map(str, arguments)]
    printed = subprocess.run(command, input=data, capture_output=True, check=True).stdout

    run = functools.partial(function, combine=combine, scale=1 / 4, backend="reference")
    out, *gradients = outputs_and_gradients(run, [tensor.double() for tensor in inputs])
    wanted = [out, out, *gradients]
    results = torch.frombuffer(bytearray(printed), dtype=torch.float32).split([tensor.numel() for tensor in wanted])
    of_output, *budget = error_budget(run, inputs, torch.float32, d + grid[0] * grid[1] + 2 * sum(grid) + 16)
    for result, exact, bound in zip(results, wanted, [of_output, of_output, *budget], strict=True):
        assert (result.double() - exact.flatten()).abs().max() <= bound
