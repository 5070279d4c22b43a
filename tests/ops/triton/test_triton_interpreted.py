"""The kernels in Triton's interpreter, and on a GPU where there is one: a process of its own for each."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

CHECKS = sorted((Path(__file__).parent / "interpreted").glob("check_*.py"))
SLOW_CHECKS = [check for check in CHECKS if "pytest.mark.slow" in check.read_text()]
assert CHECKS
assert SLOW_CHECKS


# The interpreter must be switched on before Triton is imported; on a GPU the real compiler and launcher run.
DEVICES = {"interpreter": {"TRITON_INTERPRET": "1"}, "cuda": {"TRITON_INTERPRET": "0", "PPMA_TEST_DEVICE": "cuda"}}
HERE = ["interpreter", *(["cuda"] if torch.cuda.is_available() else [])]


def run(check: Path, marker: str, device: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marker, str(check)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **DEVICES[device]}
    # Flags of an outer run (workers, coverage) are not for the inner one.
    environment.pop("PYTEST_ADDOPTS", None)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    # Code 5, no test selected, is a failure like any other.
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("device", HERE)
@pytest.mark.parametrize("check", CHECKS, ids=lambda path: path.stem)
def test_kernels(check, device):
    run(check, "not slow", device)


@pytest.mark.slow
@pytest.mark.parametrize("device", HERE)
@pytest.mark.parametrize("check", SLOW_CHECKS, ids=lambda path: path.stem)
def test_kernels_every_combination(check, device):
    run(check, "slow", device)
