"""The kernels in Triton's interpreter, which must be switched on before Triton is imported: a process of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

CHECKS = sorted((Path(__file__).parent / "interpreted").glob("check_*.py"))
SLOW_CHECKS = [check for check in CHECKS if "pytest.mark.slow" in check.read_text()]
assert CHECKS
assert SLOW_CHECKS


def run(check: Path, marker: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marker, str(check)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    # Flags of an outer run (workers, coverage) are not for the inner one.
    environment.pop("PYTEST_ADDOPTS", None)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    # Code 5, no test selected, is a failure like any other.
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("check", CHECKS, ids=lambda path: path.stem)
def test_kernels(check):
    run(check, "not slow")


@pytest.mark.slow
@pytest.mark.parametrize("check", SLOW_CHECKS, ids=lambda path: path.stem)
def test_kernels_in_every_combination(check):
    run(check, "slow")
