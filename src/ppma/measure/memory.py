"""Peak memory of a call, measured in a process of its own (Linux).

The resident set is read before the call, its high-water mark is reset, and the difference after the call is what it
needed above what was there: a model, its gradients, the libraries. In that process large blocks are mapped one by one,
so that what is freed is returned at once.
"""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

_MALLOC = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}


def peak(build: str, *arguments: Any, warm: bool) -> int:
    """Bytes that a call needs at its peak, its result included.

    Args:
        build: "module:function"; what the function returns for the arguments is called.
        arguments: anything that JSON can hold.
        warm: call it once before measuring, for calls that leave something behind (gradients, optimizer states).

    Raises:
        OSError: the system does not tell.
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
    """The process that measures."""
    build, arguments, warm = json.loads(sys.argv[1])
    module, _, function = build.partition(":")
    call = getattr(importlib.import_module(module), function)(*arguments)
    if warm:
        call()
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    result = call()
    print(max(1, _status("VmHWM") - before))
    del result


if __name__ == "__main__":
    main()
