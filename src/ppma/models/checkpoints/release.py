"""The authors' checkpoints: their parameter names in ours, and the configuration inferred from shapes."""

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ppma import masks
from ppma.layers.rope import rotary_frequencies
from ppma.models.checkpoints.weights import CheckpointError, check_tensors, listed
from ppma.models.config import CONFIGS, BackboneConfig, find_variant

_SIGNATURE = "patch_embed.proj.0.weight"
_BLOCK = r"layers\.(\d{1,4})\.blocks\.(\d{1,4})\."
_OUR_BLOCK = r"stages.\1.blocks.\2."

# Patterns of their names, with our names. `convert` also merges q, k and v and moves a downsample to the next stage.
RENAMED = [
    (r"patch_embed\.proj\.", "stem.layers."),
    (_BLOCK + r"pos\.conv\.", _OUR_BLOCK + "position."),
    (_BLOCK + r"retention_layer_norm\.", _OUR_BLOCK + "attn_norm."),
    (_BLOCK + r"retention\.out_proj\.", _OUR_BLOCK + "attn.proj."),
    (_BLOCK + r"retention\.lepe\.conv\.", _OUR_BLOCK + "attn.local."),
    (_BLOCK + r"retention\.path_embed\.dt_linear\.weight", _OUR_BLOCK + "attn.decay.weight"),
    (_BLOCK + r"retention\.path_embed\.(dt_bias|A_log)", _OUR_BLOCK + r"attn.decay.\3"),
    (_BLOCK + r"final_layer_norm\.", _OUR_BLOCK + "ffn_norm."),
    (_BLOCK + r"ffn\.fc1\.", _OUR_BLOCK + "ffn.expand."),
    (_BLOCK + r"ffn\.dwconv\.conv\.", _OUR_BLOCK + "ffn.local."),
    (_BLOCK + r"ffn\.fc2\.", _OUR_BLOCK + "ffn.reduce."),
    (_BLOCK + r"gamma_1$", _OUR_BLOCK + "attn_scale.gamma"),
    (_BLOCK + r"gamma_2$", _OUR_BLOCK + "ffn_scale.gamma"),
    (r"proj\.", "head.widen.0."),
    (r"norm\.", "head.widen.1."),
    (r"head\.", "head.fc."),
    (r"outnorm(\d)\.", r"feature_norms.\1."),
]
_DOWNSAMPLE = re.compile(r"layers\.(\d{1,4})\.downsample\.(reduction|norm)\.(.+)")
_QKV = re.compile(_BLOCK + r"retention\.([qkv])_proj\.(weight|bias)")
_EMA_KEYS, _RAW_KEYS = ("model_ema", "state_dict_ema"), ("model", "models", "state_dict")
_CONSTANT = re.compile(r"layers\.(\d{1,4})\.Relpos\.(angle|decay)")


def find_weights(checkpoint: Any, *, ema: bool | None, source: str) -> dict[str, Tensor]:
    """The backbone's weights in a file of the authors, with their names.

    Args:
        checkpoint: contents of the file: a dictionary with weights under "model" or "models" and EMA weights under
            "model_ema" (classification), or under "state_dict" (detection, segmentation, timm); or the weights
            themselves.
        ema: take the EMA weights or not; None takes them if the file has them, as the published figures do.
        source: of the weights, for messages.
    """
    if not isinstance(checkpoint, Mapping):
        raise CheckpointError(f"{source}: expected a dictionary, got {type(checkpoint).__name__}")
    names = _EMA_KEYS * (ema is not False) + _RAW_KEYS * (not ema)
    found = next((checkpoint[name] for name in names if isinstance(checkpoint.get(name), Mapping)), None)
    if found is None and not ema and all(isinstance(value, Tensor) for value in checkpoint.values()):
        found = checkpoint
    if found is None:
        raise CheckpointError(
            f"{source}: expected weights under {' or '.join(map(repr, names))}, found {listed([*map(str, checkpoint)])}"
        )
    state = {str(name).removeprefix("module."): value for name, value in found.items() if isinstance(value, Tensor)}
    if f"backbone.{_SIGNATURE}" in state:
        state = {name.removeprefix("backbone."): value for name, value in state.items() if name.startswith("backbone.")}
    check_tensors(state, source=source)
    return state


def is_release_layout(state: Mapping[str, Tensor]) -> bool:
    """Whether weights have the authors' names."""
    return _SIGNATURE in state


def convert(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights with our names; names without a counterpart are kept, so that loading reports them."""
    converted: dict[str, Tensor] = {}
    merged: dict[str, dict[str, Tensor]] = {}
    for name, tensor in state.items():
        if match := _QKV.fullmatch(name):
            stage, block, which, kind = match.groups()
            merged.setdefault(f"stages.{stage}.blocks.{block}.attn.qkv.{kind}", {})[which] = tensor
        elif match := _DOWNSAMPLE.fullmatch(name):
            stage, layer, rest = match.groups()
            layer = {"reduction": "conv", "norm": "norm"}[layer]
            converted[f"stages.{int(stage) + 1}.downsample.{layer}.{rest}"] = tensor
        elif not _CONSTANT.fullmatch(name):
            renamed = _rename(name)
            converted[renamed] = tensor.flatten() if renamed.endswith("_scale.gamma") else tensor
    for name, parts in merged.items():
        if set(parts) == set("qkv") and len({part.shape for part in parts.values()}) == 1 and parts["q"].ndim:
            converted[name] = torch.cat([parts[which] for which in "qkv"])
    return converted


def _rename(name: str) -> str:
    for pattern, ours in RENAMED:
        renamed, count = re.subn("^" + pattern, ours, name)
        if count:
            return renamed
    return name


def infer_config(state: Mapping[str, Tensor], *, source: str, **overrides: Any) -> BackboneConfig:
    """Infer the configuration from weights with the authors' names, in the release formulation.

    Shapes determine everything but drop path and which stages have full attention: those are taken from the registered
    variant with these shapes. For other shapes, `kinds` must be given.

    Args:
        state: weights with the authors' names.
        source: of the weights, for messages.
        overrides: fields of `BackboneConfig` that replace the inferred ones.
    """
    if not is_release_layout(state):
        raise CheckpointError(f"{source}: expected the weights of a PPMA or RMT backbone, found no {_SIGNATURE!r}")
    blocks = {(int(match[1]), int(match[2])) for name in state if (match := re.match(_BLOCK, name))}
    counts = Counter(stage for stage, _ in blocks)
    stages = len(counts)
    depths = tuple(counts[stage] for stage in range(stages))
    if not depths or 0 in depths:
        raise CheckpointError(f"{source}: expected layers.N.blocks.M for every stage, found blocks {sorted(blocks)}")

    def first(stage: int, name: str) -> Tensor | None:
        return state.get(f"layers.{stage}.blocks.0.{name}")

    dims = tuple(_extent(state, f"layers.{stage}.blocks.0.final_layer_norm.weight", source) for stage in range(stages))
    ratios = tuple(
        _extent(state, f"layers.{stage}.blocks.0.ffn.fc1.weight", source) / dims[stage] for stage in range(stages)
    )
    mask = _mask(state, source)
    heads = tuple(_heads(state, stage, dims[stage], source) for stage in range(stages))
    inferred: dict[str, Any] = {
        "depths": depths,
        "dims": dims,
        "heads": heads,
        "ffn_ratios": ratios,
        "layer_scale": tuple(1e-6 if first(stage, "gamma_1") is not None else None for stage in range(stages)),
        "mask": mask,
        "formulation": "release",
        "in_chans": _extent(state, _SIGNATURE, source, axis=1),
        "num_classes": _extent(state, "head.weight", source) if "head.weight" in state else 0,
        "head_width": _extent(state, "proj.weight", source) if "proj.weight" in state else None,
        "feature_norms": tuple(stage for stage in range(stages) if f"outnorm{stage}.weight" in state),
    }
    known = find_variant(mask=mask, depths=depths, dims=dims, heads=heads, ffn_ratios=ratios)
    if known is None and "kinds" not in overrides:
        raise CheckpointError(
            f"{source}: blocks {depths}, channels {dims}, heads {heads}, feed-forward ratios {ratios} fit no "
            f'registered variant; give the attention of each stage with kinds=("criss_cross", ..., "full")'
        )
    base = CONFIGS[known].to_dict() if known is not None else {}
    try:
        config = BackboneConfig.from_dict({**base, **inferred, **overrides})
    except ValueError as error:
        raise CheckpointError(f"{source}: {error}") from None
    _check_constants(state, config, source)
    return config


def _extent(state: Mapping[str, Tensor], name: str, source: str, axis: int = 0) -> int:
    """Size of a tensor along an axis, at least 1."""
    if name not in state:
        raise CheckpointError(f"{source}: missing: {name}")
    shape = tuple(state[name].shape)
    if len(shape) <= axis or shape[axis] == 0:
        raise CheckpointError(f"{source}: {name}: expected a weight, got the shape {shape}")
    return shape[axis]


def _mask(state: Mapping[str, Tensor], source: str) -> str:
    learned = "layers.0.blocks.0.retention.path_embed.dt_linear.weight"
    if learned in state:
        return "2d" if _extent(state, learned, source) == 2 else "shared"
    return "rmt" if "layers.0.Relpos.decay" in state else "none"


def implied_mask(state: Mapping[str, Tensor]) -> str | None:
    """The mask that weights with the authors' names imply, None if several masks have such weights."""
    mask = _mask(state, "weights")
    return mask if mask in ("rmt", "none") else None


def _heads(state: Mapping[str, Tensor], stage: int, dim: int, source: str) -> int:
    for name in (f"layers.{stage}.blocks.0.retention.path_embed.dt_bias", f"layers.{stage}.Relpos.decay"):
        if name in state:
            return state[name].numel()
    angle = state.get(f"layers.{stage}.Relpos.angle")
    if angle is None or angle.numel() == 0:
        raise CheckpointError(f"{source}: missing: layers.{stage}.Relpos.angle, which gives the number of heads")
    return dim // angle.numel()


def _check_constants(state: Mapping[str, Tensor], config: BackboneConfig, source: str) -> None:
    """Compare the rotary frequencies and fixed decays stored in their files with ours, which are computed."""
    for stage, (dim, heads) in enumerate(zip(config.dims, config.heads, strict=True)):
        expected = {"angle": rotary_frequencies(dim // heads).repeat_interleave(2)}
        if config.mask == "rmt":
            expected["decay"] = masks.rmt_log_decay(heads, config.fixed_decay_spans[stage])
        for kind, ours in expected.items():
            name = f"layers.{stage}.Relpos.{kind}"
            theirs = state.get(name)
            if theirs is not None and not (
                theirs.numel() == ours.numel() and torch.allclose(theirs.flatten().float(), ours, rtol=1e-4, atol=1e-7)
            ):
                raise CheckpointError(f"{source}: {name}: expected {ours.tolist()}, got {theirs.flatten().tolist()}")
