"""Files that are never half-written."""

import contextlib
import os
from pathlib import Path


def write_atomically(path: Path, content: bytes | memoryview) -> None:
    """Write a file so that, whenever the machine stops, there is either the old one or the new one, complete."""
    partial = path.with_name(path.name + ".partial")
    try:
        with open(partial, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from None  # the name that the user knows
    if os.name == "nt":  # Windows opens no folders
        return
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the rename itself
    finally:
        os.close(folder)
