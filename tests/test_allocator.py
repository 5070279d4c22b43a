"""Freed memory is reused instead of being returned to the system."""

import os
import subprocess
import sys

import pytest

from ppma.allocator import PARAMETERS, chosen_by_environment, reuse_freed_memory

# Alternating sizes, so that malloc returns the memory at the end of the heap with its default thresholds.
FAULTS = """
import resource, sys, torch
from ppma.allocator import reuse_freed_memory
if sys.argv[1] == "reuse" and not reuse_freed_memory():
    raise SystemExit("no glibc")
def step():
    kept = [torch.ones(1 << 20) for _ in range(40)]
step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(mode):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    run = subprocess.run([sys.executable, "-c", FAULTS, mode], env=environment, capture_output=True, text=True)
    if "no glibc" in run.stderr:
        pytest.skip("this C library has no mallopt")
    return int(run.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_reused_pages_without_faults():
    pages = 40 * (4 << 20) // 4096
    assert faults("reuse") < pages / 20
    assert faults("default") > pages / 2


def test_environment_takes_precedence(monkeypatch):
    monkeypatch.setenv("MALLOC_TOP_PAD_", "1")
    assert chosen_by_environment() == {"MALLOC_TOP_PAD_": "1"}
    assert not reuse_freed_memory()
    assert all(value < 1 << 31 for _, value in PARAMETERS.values())  # mallopt takes an int
