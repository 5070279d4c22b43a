"""For the whole suite."""

import os

import pytest
from hypothesis import settings

# Workers of pytest-xdist share the cores, and a team of threads that does not get its cores spins. Set before torch is
# imported; processes that a test starts inherit it.
_WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
if _WORKERS > 1:
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // _WORKERS)))

# The same examples on every run: a failure that a change did not cause helps nobody who waits for its result.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


def pytest_runtest_setup(item):
    """Tests marked `native` need the native library: without it they fail, unless they are told to do without."""
    if item.get_closest_marker("native") is None:
        return
    from ppma.ops.backends.native import library

    reason = library.unsupported_reason()
    if reason is None:
        return
    if os.environ.get("PPMA_TEST_WITHOUT_NATIVE", "0") == "1":
        pytest.skip(f"PPMA_TEST_WITHOUT_NATIVE=1: {reason}")
    pytest.fail(f"{reason}; PPMA_TEST_WITHOUT_NATIVE=1 skips the tests that need it", pytrace=False)
