"""The reader of weight files: it opens a file once, reads its metadata first and its tensors when they are used."""

import dataclasses
import difflib
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from ppma import config as configs
from ppma.data.preprocessing import Preprocessing
from ppma.models import published
from ppma.models.checkpoints import metadata as keys
from ppma.models.checkpoints import openmmlab, release
from ppma.models.checkpoints.pickles import read_torch
from ppma.models.checkpoints.weights import EXTRA_STATE, CheckpointError, unreadable
from ppma.models.config import BackboneConfig
from ppma.models.timm_models import TimmModel


class Checkpoint:
    """An open weight file.

    Args:
        path: of the file.
        metadata: of a safetensors file, else empty.
        task: that the model was trained for, None if the file does not tell.
        read: returns the contents: weights by name, or the object given to `torch.save`.

    Attributes:
        path: of the file.
        metadata: of a safetensors file, else empty.
        task: that the model was trained for; "classification" if the file does not tell.
    """

    def __init__(self, path: Path, metadata: Mapping[str, str], task: str | None, read: Callable[[], Any]) -> None:
        self.path, self.metadata, self.task, self._read = path, metadata, task or "classification", read
        self._named = task is not None

    @functools.cached_property
    def contents(self) -> Any:
        """Weights by name, or the object given to `torch.save`; read on first use."""
        return self._read()

    @property
    def native(self) -> bool:
        """Whether it is in our format, with what the backbone is in the metadata."""
        return keys.CONFIG_KEY in self.metadata or keys.TIMM_KEY in self.metadata

    @property
    def larger(self) -> bool:
        """Whether the model is more than a backbone with its classifier."""
        return keys.BACKBONE_KEY in self.metadata if self.metadata else self._named

    @functools.cached_property
    def backbone(self) -> BackboneConfig | None:
        """The stored configuration of the backbone, None for files of others and for models of timm."""
        if self.timm_model is not None:
            return None
        if self.native:
            return keys.config_from(self.metadata[keys.CONFIG_KEY], f"{self.path}: {keys.CONFIG_KEY}")
        try:
            state = release.find_weights(self.contents, ema=None, source=str(self.path))
        except CheckpointError:  # `backbone_weights` raises it
            return None
        return keys.decode_config(state[EXTRA_STATE], str(self.path)) if EXTRA_STATE in state else None

    @functools.cached_property
    def timm_model(self) -> TimmModel | None:
        """The name and the arguments of a model of timm, None if the backbone is one of ours."""
        if keys.TIMM_KEY not in self.metadata:
            return None
        return keys.timm_model_from(self.metadata[keys.TIMM_KEY], f"{self.path}: {keys.TIMM_KEY}")

    @functools.cached_property
    def _facts(self) -> dict[str, Any]:
        key = keys.task_key(self.task)
        return keys.mapping(self.metadata[key], f"{self.path}: {key}") if key in self.metadata else {}

    @functools.cached_property
    def _meta(self) -> openmmlab.Meta:
        return openmmlab.Meta(None, None) if self.metadata else openmmlab.read_meta(self.contents, str(self.path))

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Class names in the order of the scores, None if the file has none."""
        if not self._facts:
            return self._meta.classes
        classes = self._facts.get("classes")
        if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
            raise self._error("classes: expected a list of names")
        return tuple(classes)

    @property
    def palette(self) -> tuple[tuple[int, int, int], ...] | None:
        """RGB colours of the classes, from 0 to 255; None if the file has none."""
        return self._meta.palette

    @property
    def preprocessing(self) -> Preprocessing | None:
        """Preprocessing of a classifier, or of a square with the shorter side of a segmentation model; else None."""
        fields = {name: value for name, value in self._facts.items() if name != "classes"}
        data = self._segmented
        if data is not None:
            square = {"image_size": data["short_side"], "interpolation": "bilinear", "crop_pct": 1.0}
            fields = {**square, "mean": data["mean"], "std": data["std"]}
        if not fields or "config" in fields:
            return None
        try:
            return configs.build(Preprocessing, fields, source=f"{self.path}: {keys.task_key(self.task)}")
        except configs.ConfigError as error:
            raise CheckpointError(str(error)) from None

    @property
    def _segmented(self) -> dict[str, Any] | None:
        """The data that a segmentation model was trained on, as its run was configured."""
        config = self._facts.get("config")
        data = config.get("data") if isinstance(config, dict) else None
        return data if isinstance(data, dict) and {"short_side", "mean", "std"} <= data.keys() else None

    def run_config(self, schema: type[configs.Schema]) -> configs.Schema:
        """The configuration of the run that wrote the file: those of its fields that the schema has."""
        values = self._facts.get("config")
        if not isinstance(values, dict):
            raise self._error("expected the configuration of a run")
        known = {field.name: values[field.name] for field in dataclasses.fields(schema) if field.name in values}  # type: ignore[arg-type]
        try:
            return configs.build(schema, known, source=str(self.path))
        except (ValueError, TypeError, OverflowError) as error:
            named = isinstance(error, configs.ConfigError)  # its message has the path
            raise CheckpointError(str(error) if named else f"{self.path}: {error}") from None

    def _error(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {keys.task_key(self.task)}: {problem}")

    def prefixed_weights(self) -> dict[str, Tensor]:
        """The backbone's weights in a file of our format, without their prefix."""
        prefix = self.metadata.get(keys.BACKBONE_KEY, "")
        held = self.contents.items()
        return {name.removeprefix(prefix): tensor for name, tensor in held if name.startswith(prefix)}

    def backbone_weights(
        self, *, ema: bool | None = None, **changes: Any
    ) -> tuple[BackboneConfig, BackboneConfig, dict[str, Tensor]]:
        """The stored configuration of the backbone, the same with changes, and its weights with our names.

        Args:
            ema: take the EMA weights of a file of the authors; None takes them if the file has them.
            changes: fields of the configuration to change.
        """
        source, stored = str(self.path), self.backbone
        if self.timm_model is not None:
            raise CheckpointError(f"{source}: expected one of our backbones, got timm's {self.timm_model.name}")
        if self.native and not ema:
            state = self.prefixed_weights()
        else:
            state = release.find_weights(self.contents, ema=ema, source=source)
        if stored is not None:
            return stored, stored.replace(**changes), state
        inferred = release.infer_config(state, source=source, **changes)
        return inferred, inferred, release.convert(state)


def open_checkpoint(path: str | Path | Checkpoint) -> Checkpoint:
    """Open a weight file of any format, or published weights by name; nothing in a file is executed.

    Args:
        path: of the file; or a name that `ppma weights` lists, whose file is downloaded unless it is in the cache; or
            an open checkpoint, which is returned.

    Raises:
        CheckpointError: the file is damaged, or could only be loaded by executing pickled code.
        FileNotFoundError: there is no such file or name.
        ConnectionError: published weights cannot be downloaded.

    Examples:
        >>> import tempfile, timm, ppma
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     ppma.save_checkpoint(timm.create_model("ppma_nano", num_classes=10), f"{folder}/nano.safetensors")
        ...     checkpoint = ppma.open_checkpoint(f"{folder}/nano.safetensors")
        ...     checkpoint.task, checkpoint.backbone.num_classes
        ('classification', 10)
    """
    if isinstance(path, Checkpoint):
        return path
    path = _find(path)
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


def _find(path: str | Path) -> Path:
    """The file of a path or of a published name; a file takes precedence."""
    name, path = str(path), Path(path)
    if path.is_dir():
        raise CheckpointError(f"{path}: expected a weight file, got a folder")
    if path.is_file():
        return path
    if name in published.PUBLISHED:
        return published.local_file(name)
    near = difflib.get_close_matches(name, published.PUBLISHED, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else " (`ppma weights` lists published ones)"
    raise FileNotFoundError(f"path: expected a weight file, found none at {path}{hint}")


def _starts_as_safetensors(start: bytes, path: Path) -> bool:
    return start[8:] == b"{" and int.from_bytes(start[:8], "little") < path.stat().st_size


def _open_safetensors(path: Path) -> Checkpoint:
    try:
        file = safe_open(path, framework="pt")
        metadata = file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise unreadable(path, error) from None

    def read() -> dict[str, Tensor]:
        try:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except Exception as error:  # SafetensorError, and whatever PyTorch raises for an unknown dtype
            raise unreadable(path, error) from None

    return Checkpoint(path, metadata, keys.task_in(metadata), read)
