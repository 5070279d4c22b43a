"""Training checkpoints: written atomically, read without executing pickled code."""

import io
import random
import re
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ppma.atomic import write_atomically
from ppma.engine.distributed import World

FOLDER = "checkpoints"
_NAME = re.compile(r"step-(\d+)\.pt")
_PARTS = {"step", "sampler", "model", "ema", "optimizer", "schedule", "scaler", "rng", "best", "log", "config"}


class UnreadableCheckpointError(ValueError):
    """A checkpoint file that is damaged, or not written by this package."""


def save(path: Path, state: dict[str, Any]) -> None:
    """Write a training state: tensors and plain values only, so that `load` needs no pickled code."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, buffer.getbuffer())


def load(path: Path) -> dict[str, Any]:
    """Read a training state on the CPU and verify its checksums.

    Raises:
        FileNotFoundError: no such file.
        UnreadableCheckpointError: the file is damaged, or not a training checkpoint.
    """
    if not path.is_file():
        found = "a folder" if path.is_dir() else "none"
        raise FileNotFoundError(f"checkpoint: expected a file, found {found} at {path}")
    try:
        with zipfile.ZipFile(path) as archive:
            if any(part.compress_type != zipfile.ZIP_STORED for part in archive.infolist()):
                raise UnreadableCheckpointError("compressed, which torch.save does not do")
            damaged = archive.testzip()
        if damaged is not None:
            raise UnreadableCheckpointError(damaged)
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # readers of a damaged file raise nearly anything
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UnreadableCheckpointError(f"{path}: truncated, damaged or not a checkpoint ({reason})") from None
    if not isinstance(state, dict) or not state.keys() >= _PARTS:
        raise UnreadableCheckpointError(f"{path}: not a training checkpoint")
    return state


def misfit(stored: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> str:
    """Describe how stored weights differ from a model's in names and shapes; empty if they match."""
    reshaped = [
        f"{name} {tuple(stored[name].shape)} instead of {tuple(own[name].shape)}"
        for name in own
        if name in stored and stored[name].shape != own[name].shape
    ]
    found = {
        "missing": [name for name in own if name not in stored],
        "unexpected": [name for name in stored if name not in own],
        "of another shape": reshaped,
    }
    return "; ".join(f"{len(names)} weights {what} ({names[0]}, ...)" for what, names in found.items() if names)


def path_of(run: Path, step: int) -> Path:
    """The path of a step's checkpoint."""
    return run / FOLDER / f"step-{step:08d}.pt"


def steps(run: Path) -> list[int]:
    """The steps that have a checkpoint, in ascending order."""
    found = (_NAME.fullmatch(path.name) for path in (run / FOLDER).glob("step-*.pt"))
    return sorted(int(match[1]) for match in found if match)


def newest(run: Path) -> dict[str, Any] | None:
    """Load the newest readable checkpoint of a run; damaged ones are skipped with a warning."""
    for step in reversed(steps(run)):
        try:
            return load(path_of(run, step))
        except UnreadableCheckpointError as error:
            warnings.warn(f"skipping {error}", stacklevel=2)
    return None


def keep_only(run: Path, count: int, best: int, now: int) -> None:
    """Delete all but the newest `count` checkpoints and the best one, and partial files of a killed run.

    Checkpoints after step `now` are deleted too: the run was resumed from an earlier step, and `--resume auto` would
    find them.
    """
    for partial in (run / FOLDER).glob("*.partial"):
        partial.unlink()
    newest = [step for step in steps(run) if step <= now][-count:]
    for step in steps(run):
        if step not in (best, *newest):
            path_of(run, step).unlink()


def rng_state() -> dict[str, Any]:
    """The state of this process's random generators, as plain values and tensors."""
    version, words, gauss = random.getstate()
    kind, keys, *rest = np.random.get_state()
    state = {
        "python": [version, torch.tensor(words), gauss],
        "numpy": [kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore the random generators from `rng_state`."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def restore_rng(states: list[dict[str, Any]], world: World) -> None:
    """Restore this process's random generators; with another number of processes they stay as seeded."""
    if len(states) == world.size:
        set_rng_state(states[world.rank])
    elif world.main:
        warnings.warn(
            f"the checkpoint has {len(states)} processes, this run {world.size}: the batches are the same, "
            "but dropout and mixing differ from an uninterrupted run",
            stacklevel=2,
        )
