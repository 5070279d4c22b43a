"""Atomic file writes."""

import contextlib
import os
from pathlib import Path


def write_atomically(path: Path, content: bytes | memoryview) -> None:
    """Write a file atomically: after a crash, either the old or the new content is there, complete.

    Args:
        path: of the file; an existing one is replaced.
        content: all of it.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_atomically(Path(folder) / "log.txt", b"done")
        ...     (Path(folder) / "log.txt").read_text()
        'done'
    """
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
        raise OSError(error.errno, error.strerror, str(path)) from None  # the path the user gave, not the partial one
    if os.name == "nt":  # Windows cannot open folders
        return
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # makes the rename durable
    finally:
        os.close(folder)
