"""Peak memory of a call, measured in a separate process (Linux).

The process reads its resident set, resets the high-water mark and runs the call. The difference is the memory needed
on top of what existed before: the model, its optimizer, the libraries. Scratch memory that our kernels have kept from
an earlier call counts as needed. Large blocks are mapped individually there, so freed memory returns to the system at
once.
"""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from ppma.ops.backends.native.library import scratch_bytes

_MALLOC = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}


def peak(build: str, *arguments: Any, warm: bool) -> int:
    """Peak memory of a call in bytes, including its result.

    Args:
        build: "module:function", a function that returns the callable to measure.
        arguments: arguments of that function, JSON-serialisable.
        warm: run once before measuring, for calls that allocate persistent memory (optimizer states).

    Raises:
        OSError: the system has no /proc/self/clear_refs.
    """
    if not Path("/proc/self/clear_refs").exists():
        raise OSError("peak memory needs Linux's /proc")
    command = [sys.executable, "-m", "ppma.measure.memory", json.dumps([build, arguments, warm])]
    run = subprocess.run(command, env={**os.environ, **_MALLOC}, capture_output=True, text=True)
    if run.returncode:
        raise RuntimeError(f"measuring memory failed:\n{run.stderr.strip()}")
    return int(run.stdout)


def _status(field: str) -> int:
    """A field of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def main() -> None:
    """Entry point of the measuring process."""
    build, arguments, warm = json.loads(sys.argv[1])
    module, _, function = build.partition(":")
    call = getattr(importlib.import_module(module), function)(*arguments)
    if warm:
        call()
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS") - scratch_bytes()
    result = call()
    print(max(1, _status("VmHWM") - before))
    del result


if __name__ == "__main__":
    main()
