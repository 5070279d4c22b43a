"""One reader for every weight file: it opens a file once, reads what it says of itself, and tensors when asked."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from ppma import config as configs
from ppma.data.preprocessing import Preprocessing
from ppma.models.checkpoints import metadata as keys
from ppma.models.checkpoints import openmmlab, release
from ppma.models.checkpoints.pickles import read_torch
from ppma.models.checkpoints.weights import EXTRA_STATE, CheckpointError, unreadable
from ppma.models.config import BackboneConfig


class Checkpoint:
    """An open weight file.

    Args:
        path: of the file.
        metadata: of a safetensors file, else empty.
        task: that the file names.
        read: gives the contents: weights by name, or whatever was passed to `torch.save`.

    Attributes:
        path: of the file.
        metadata: of a safetensors file, else empty.
        task: what the model was trained for; classification where the file does not say.
    """

    def __init__(self, path: Path, metadata: Mapping[str, str], task: str | None, read: Callable[[], Any]) -> None:
        self.path, self.metadata, self.task, self._read = path, metadata, task or "classification", read
        self._named = task is not None

    @functools.cached_property
    def contents(self) -> Any:
        """What the file holds, read when first used."""
        return self._read()

    @property
    def native(self) -> bool:
        """Whether it is in our format, with its configuration in the metadata."""
        return keys.CONFIG_KEY in self.metadata

    @property
    def larger(self) -> bool:
        """Whether the model is more than a backbone with its classifier."""
        return keys.BACKBONE_KEY in self.metadata if self.metadata else self._named

    @functools.cached_property
    def backbone(self) -> BackboneConfig | None:
        """The stored configuration of the backbone, None for files that are not ours."""
        if self.native:
            return keys.config_from(self.metadata[keys.CONFIG_KEY], f"{self.path}: {keys.CONFIG_KEY}")
        if isinstance(self.contents, Mapping) and EXTRA_STATE in self.contents:  # torch.save of a state_dict
            return keys.decode_config(self.contents[EXTRA_STATE], str(self.path))
        return None

    @functools.cached_property
    def _facts(self) -> dict[str, Any]:
        key = keys.task_key(self.task)
        return keys.mapping(self.metadata[key], f"{self.path}: {key}") if key in self.metadata else {}

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Names in the order of the scores, None where the file does not name them."""
        if not self._facts:
            return None
        classes = self._facts.get("classes")
        if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
            raise self._error("classes: expected a list of names")
        return tuple(classes)

    @property
    def preprocessing(self) -> Preprocessing | None:
        """How a classifier wants its images, None where the file does not say."""
        fields = {name: value for name, value in self._facts.items() if name != "classes"}
        if not fields or "config" in fields:
            return None
        try:
            return configs.build(Preprocessing, fields, source=f"{self.path}: {keys.task_key(self.task)}")
        except configs.ConfigError as error:
            raise CheckpointError(str(error)) from None

    def run_config(self, schema: type[configs.Schema]) -> configs.Schema:
        """The configuration of the run that made the file: the fields that the schema, a dataclass, has."""
        values = self._facts.get("config")
        if not isinstance(values, dict):
            raise self._error("expected the configuration of a run")
        known = {field.name: values[field.name] for field in dataclasses.fields(schema) if field.name in values}  # type: ignore[arg-type]
        try:
            return configs.build(schema, known, source=str(self.path))
        except (ValueError, TypeError, OverflowError) as error:
            named = isinstance(error, configs.ConfigError)  # its message begins with the path
            raise CheckpointError(str(error) if named else f"{self.path}: {error}") from None

    def _error(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {keys.task_key(self.task)}: {problem}")

    def backbone_weights(
        self, *, ema: bool = False, **changes: Any
    ) -> tuple[BackboneConfig, BackboneConfig, dict[str, Tensor]]:
        """The stored configuration of the backbone, the same with changes, and its weights in our names.

        Args:
            ema: take the EMA weights of a training checkpoint of the authors.
            changes: fields of the configuration to change.
        """
        source, stored = str(self.path), self.backbone
        if stored is None:
            state = release.find_weights(self.contents, ema=ema, source=source)
            inferred = release.infer_config(state, source=source, **changes)
            return inferred, inferred, release.convert(state)
        if ema:
            raise CheckpointError(f"{source}: ema=True, but the file holds one set of weights")
        prefix = self.metadata.get(keys.BACKBONE_KEY, "")
        state = dict(self.contents)
        if prefix:
            state = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
        return stored, stored.replace(**changes), state


def open_checkpoint(path: str | Path | Checkpoint) -> Checkpoint:
    """Open a weight file of any format; an open one is returned as it is.

    Raises:
        CheckpointError: it is damaged, or holds objects that could only be loaded by running code.
    """
    if isinstance(path, Checkpoint):
        return path
    path = Path(path)
    if path.is_dir():
        raise CheckpointError(f"{path}: expected a weight file, got a folder")
    if not path.is_file():
        raise FileNotFoundError(f"path: expected a weight file, found none at {path}")
    if path.suffix == ".safetensors":
        return _open_safetensors(path)
    try:
        with open(path, "rb") as file:
            if not _starts_as_safetensors(file.read(9), path):
                file.seek(0)
                contents = read_torch(file, path)
                return Checkpoint(path, {}, openmmlab.task_in(contents), lambda: contents)
    except OSError as error:
        raise unreadable(path, error) from None
    return _open_safetensors(path)


def _starts_as_safetensors(start: bytes, path: Path) -> bool:
    return start[8:] == b"{" and int.from_bytes(start[:8], "little") < path.stat().st_size


def is_safetensors(path: Path) -> bool:
    """Whether a file is in the format of safetensors, by its name or else by how it begins."""
    if path.suffix == ".safetensors":
        return True
    try:
        with open(path, "rb") as file:
            return _starts_as_safetensors(file.read(9), path)
    except OSError:
        return False


def _open_safetensors(path: Path) -> Checkpoint:
    try:
        file = safe_open(path, framework="pt")
        metadata = file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise unreadable(path, error) from None

    def read() -> dict[str, Tensor]:
        try:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except Exception as error:  # SafetensorError, and what PyTorch raises for a type it does not have
            raise unreadable(path, error) from None

    return Checkpoint(path, metadata, keys.task_in(metadata), read)
