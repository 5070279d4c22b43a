"""glibc's malloc: keep freed memory in the process instead of returning it to the system.

A model's large temporaries are freed and allocated again in every layer. With glibc's defaults many of them come from
the system as fresh pages each time, and the kernel clears every page at its first access.
"""

import ctypes
import os
import sys

# Names and numbers of glibc's malloc.h; values in bytes.
PARAMETERS = {
    "MMAP_THRESHOLD": (-3, 1 << 30),
    "TRIM_THRESHOLD": (-1, (1 << 31) - 1),
    "TOP_PAD": (-2, 1 << 26),
}


def reuse_freed_memory() -> bool:
    """Keep freed memory for later allocations; the `ppma` command calls this, a program may.

    The process keeps up to 2 GB that it has freed. `MALLOC_*` variables in the environment take precedence.

    Returns:
        Whether it had an effect: the C library is glibc, and no such variable is set.

    Examples:
        >>> from ppma.allocator import reuse_freed_memory
        >>> reuse_freed_memory() in (True, False)
        True
    """
    if sys.platform != "linux" or chosen_by_environment():
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    return mallopt is not None and all(mallopt(number, value) for number, value in PARAMETERS.values())


def chosen_by_environment() -> dict[str, str]:
    """The variables of the environment that set malloc's thresholds."""
    names = (f"MALLOC_{name}_" for name in PARAMETERS)
    return {name: os.environ[name] for name in names if name in os.environ}
