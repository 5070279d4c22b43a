"""One call for every weight file."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ppma.models import authors, files
from ppma.models.backbone import PolylineBackbone
from ppma.models.config import BackboneConfig


def save_checkpoint(model: PolylineBackbone, path: str | Path, *, extra: Mapping[str, str] | None = None) -> None:
    """Write weights and configuration to one safetensors file, which `load_checkpoint` makes into a model again.

    Args:
        model: a backbone.
        path: of the file.
        extra: more texts for the file's metadata.
    """
    if not isinstance(model, PolylineBackbone):
        raise ValueError(f"model: expected a PolylineBackbone, got {type(model).__name__}")
    files.write_native(path, model.state_dict(), model.config, extra)


def load_checkpoint(path: str | Path, *, ema: bool = False, strict: bool = True, **overrides: Any) -> PolylineBackbone:
    """A backbone from a weight file, ours (`save_checkpoint`, `ppma train`) or the authors', of any task.

    From the authors' files the architecture is inferred from the shapes and the model computes what their released
    code computes. Nothing in a file is executed.

    Args:
        path: a file of `torch.save` or safetensors.
        ema: take the EMA weights of a training checkpoint.
        strict: whether names or shapes that do not fit are an error; else they are left out with a warning.
        overrides: fields of `BackboneConfig` to change, such as `num_classes` or `mask`.

    Returns:
        The model, in evaluation mode.

    Raises:
        CheckpointError: the file is damaged, needs code to load, or does not fit; the message names the keys.

    Example:
        >>> import tempfile, timm, ppma
        >>> model = timm.create_model("ppma_nano", num_classes=10)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     ppma.save_checkpoint(model, f"{folder}/nano.safetensors")
        ...     ppma.load_checkpoint(f"{folder}/nano.safetensors").num_classes
        10
    """
    source = str(path)
    if files.is_safetensors(path):
        contents, metadata = files.read_safetensors(path)
        config = files.config_in(metadata, source)
        if config is not None:
            contents = files.backbone_part(contents, metadata)
    else:
        contents, config = files.read_torch(path), None
    if config is None and isinstance(contents, Mapping) and files.EXTRA_STATE in contents:  # a state_dict of ours
        config = files.decode_config(contents[files.EXTRA_STATE], source)
    if config is not None and ema:
        raise files.CheckpointError(f"{source}: ema=True, but the file holds one set of weights")
    if config is not None:
        return _build(config, config.replace(**overrides), contents, source, strict)
    state = authors.find_weights(contents, ema=ema, source=source)
    config = authors.infer_config(state, source=source, **overrides)
    return _build(config, config, authors.convert(state), source, strict)


def _build(
    stored: BackboneConfig, config: BackboneConfig, state: Mapping[str, Tensor], source: str, strict: bool
) -> PolylineBackbone:
    files.check_size(stored, state, source=source)
    return files.build(lambda: PolylineBackbone(config), state, source=source, strict=strict)
