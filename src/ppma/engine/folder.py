"""The folder of a run: locked while in use, and not overwritten unless asked."""

import contextlib
import errno
import os
import platform
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path

from ppma.engine import checkpoint
from ppma.engine.distributed import World
from ppma.engine.logging import METRICS
from ppma.engine.trackers import EVENTS, WANDB

LOCK = ".lock"
CONFIG = "config.yaml"
LAST, BEST = "last.safetensors", "best.safetensors"
SUMMARY = "summary.json"
CURVES = "curves.png"

# What a run writes. A folder with any of RESULTS holds finished work; the other files are rewritten by a restart.
RESULTS = (LAST, BEST, SUMMARY)
WRITTEN = (*RESULTS, CONFIG, METRICS, EVENTS, WANDB, CURVES, checkpoint.FOLDER)

_held: set[Path] = set()  # by this process, which a POSIX lock does not exclude


def results_in(run: Path) -> list[str]:
    """List the results and checkpoints of an earlier run in this folder."""
    checkpoints = sorted((run / checkpoint.FOLDER).glob("*.pt"))
    return [name for name in RESULTS if (run / name).exists()] + [f"{checkpoint.FOLDER}/{p.name}" for p in checkpoints]


def clear(run: Path) -> None:
    """Delete what an earlier run wrote; other files stay."""
    for name in WRITTEN:
        path = run / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def reserve(run: Path, world: World) -> Iterator[None]:
    """Create the folder and lock it until the context or the main process ends.

    A folder created here is removed if the run is refused before it writes anything.

    Raises:
        ValueError: another run uses the folder, or it cannot be created or written to.
    """
    with contextlib.ExitStack() as stack:
        error: ValueError | None = None
        made = world.main and not run.exists()
        if world.main:
            try:
                run.mkdir(parents=True, exist_ok=True)
                stack.enter_context(_lock(run))
            except OSError as refused:
                error = ValueError(f"out: expected a folder that can be written to, got {run} ({refused.strerror})")
            except ValueError as refused:
                error = refused
        error = world.broadcast(error)  # else the other processes would wait for the main one
        if error is not None:
            raise error
        try:
            yield
        except BaseException:
            if made and os.listdir(run) == [LOCK]:
                (run / LOCK).unlink()
                run.rmdir()
            raise


@contextlib.contextmanager
def _lock(run: Path) -> Iterator[None]:
    """Hold a POSIX record lock: it ends with this process and, unlike flock, loader processes do not inherit it."""
    folder = run.resolve()
    if folder in _held:
        raise ValueError(f"out: {run} is in use by another run of this process; choose another folder")
    descriptor = os.open(run / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        if not _lock_file(descriptor):
            holder = os.read(descriptor, 100).decode(errors="replace").strip()
            raise ValueError(
                f"out: {run} is in use by another run (process {holder or 'unknown'}); "
                "wait for it or choose another folder"
            )
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()} on {platform.node()}\n".encode())
        _held.add(folder)
        yield
    finally:
        _held.discard(folder)
        os.close(descriptor)


def _lock_file(descriptor: int) -> bool:
    """Take the lock; False if another process holds it."""
    try:
        import fcntl

        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (ImportError, OSError) as error:  # no fcntl on Windows, no locks on some network file systems
        if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        warnings.warn(f"cannot lock the run's folder ({error}): do not start another run in it", stacklevel=2)
    return True
