"""Configuration of a backbone, and the registered variants."""

import dataclasses
import reprlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ppma import masks
from ppma.layers.attention import ATTENTION_KINDS, FORMULATIONS
from ppma.layers.decay import Start, check_start
from ppma.ops import checks

Check = Callable[[str, object], None]  # takes the name and value of a field, raises ValueError

# Far above any real model; a hostile file must not make building one take forever.
_MOST_STAGES = 16
_MOST_BLOCKS = 4096
_MOST_CHANNELS = 1 << 20
_MOST_CLASSES = 1 << 24


def _shown(value: object) -> str:
    """A value for a message, shortened if it is long."""
    return reprlib.repr(value)


def _whole(least: int, most: int) -> Check:
    def check(name: str, value: object) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise ValueError(f"{name}: expected a whole number from {least} to {most}, got {_shown(value)}")

    return check


def _number(least: float, most: float) -> Check:
    def check(name: str, value: object) -> None:
        if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
            raise ValueError(f"{name}: expected a number from {least:g} to {most:g}, got {_shown(value)}")

    return check


def _optional(check: Check) -> Check:
    return lambda name, value: None if value is None else check(name, value)


def _word(valid: Collection[str]) -> Check:
    return lambda name, value: checks.one_of(name, value, valid)


def _stride(name: str, value: object) -> None:
    if not isinstance(value, int) or value not in (2, 4):
        raise ValueError(f"{name}: expected 2 or 4, got {_shown(value)}")


def _stages(depths: object) -> int:
    if not isinstance(depths, list | tuple) or not 1 <= len(depths) <= _MOST_STAGES:
        raise ValueError(f"depths: expected one entry for each of 1 to {_MOST_STAGES} stages, got {_shown(depths)}")
    return len(depths)


_PER_STAGE: dict[str, Check] = {
    "depths": _whole(1, _MOST_BLOCKS),
    "dims": _whole(1, _MOST_CHANNELS),
    "heads": _whole(1, _MOST_CHANNELS),
    "kinds": _word(ATTENTION_KINDS),
    "ffn_ratios": _number(1 / 64, 64),
    "layer_scale": _optional(_number(-100, 100)),
    "fixed_decay_spans": _number(-100, 100),
}
_SINGLE: dict[str, Check] = {
    "mask": lambda name, value: checks.one_of(name, value, masks.KINDS),  # looked up late: users add their own
    "formulation": _word(FORMULATIONS),
    "decay_start": check_start,
    "stem_stride": _stride,
    "in_chans": _whole(1, _MOST_CHANNELS),
    "num_classes": _whole(0, _MOST_CLASSES),
    "head_width": _optional(_whole(1, _MOST_CHANNELS)),
    "global_pool": _word(("avg", "")),
    "drop_rate": _number(0, 1),
    "drop_path_rate": _number(0, 1),
    "feature_norm_eps": _number(0, 1),
}
PER_STAGE = tuple(_PER_STAGE)


@dataclass(frozen=True)
class BackboneConfig:
    """Configuration of a backbone; stage i has stride `stem_stride * 2**i`.

    Attributes:
        depths: number of blocks, per stage.
        dims: number of channels, per stage.
        heads: number of attention heads, per stage.
        kinds: "criss_cross", "full", "linear" or "decomposed" attention, per stage.
        ffn_ratios: hidden over input channels of the feed-forward, per stage.
        layer_scale: initial value of the layer scale, per stage; None for no layer scale.
        fixed_decay_spans: range r of the "rmt" mask's decays over the heads, per stage (`ppma.masks.rmt_log_decay`).
        mask: name of a mask in `ppma.masks.KINDS`.
        formulation: "paper" (mask after the softmax) or "release" (mask inside the softmax).
        decay_start: where learned decays start: "release", "strong" or the numbers of a `ppma.layers.DecayStart`.
        stem_stride: 2 or 4.
        in_chans: number of image channels.
        num_classes: number of classes; 0 returns the input of the classifier.
        head_width: channels between the last stage and the classifier; None classifies the last stage directly.
        global_pool: "avg", or "" for no pooling.
        drop_rate: dropout probability before the classifier.
        drop_path_rate: drop path probability of the last block; it grows linearly from 0 at the first.
        feature_norms: indices of the stages whose features have a layer norm of their own, for dense tasks.
        feature_norm_eps: epsilon of these layer norms; the authors' models have 1e-5 here and 1e-6 elsewhere.

    Raises:
        ValueError: a field is out of range; the message names it.

    Examples:
        >>> from ppma.models import CONFIGS
        >>> config = CONFIGS["ppma_tiny"].replace(num_classes=10, mask="v2h")
        >>> config.differences(CONFIGS["ppma_tiny"])
        {'mask': 'v2h', 'num_classes': 10}
    """

    depths: tuple[int, ...]
    dims: tuple[int, ...]
    heads: tuple[int, ...]
    kinds: tuple[str, ...]
    ffn_ratios: tuple[float, ...]
    layer_scale: tuple[float | None, ...] = (None, None, None, None)
    fixed_decay_spans: tuple[float, ...] = (4.0, 4.0, 6.0, 6.0)
    mask: str = "2d"
    formulation: str = "paper"
    decay_start: Start = "release"
    stem_stride: int = 4
    in_chans: int = 3
    num_classes: int = 1000
    head_width: int | None = 1024
    global_pool: str = "avg"
    drop_rate: float = 0.0
    drop_path_rate: float = 0.0
    feature_norms: tuple[int, ...] = ()
    feature_norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        stages = _stages(self.depths)
        for name, check in _PER_STAGE.items():
            value = getattr(self, name)
            if not isinstance(value, list | tuple) or len(value) != stages:
                raise ValueError(f"{name}: expected one entry for each of {stages} stages, got {_shown(value)}")
            for entry in value:
                check(name, entry)
            object.__setattr__(self, name, tuple(value))  # JSON has lists
        norms = self.feature_norms
        if not isinstance(norms, list | tuple) or any(norm not in range(stages) for norm in norms):
            raise ValueError(f"feature_norms: expected stages 0 to {stages - 1}, got {_shown(norms)}")
        if len(set(norms)) < len(norms):
            raise ValueError(f"feature_norms: expected each stage once, got {_shown(norms)}")
        object.__setattr__(self, "feature_norms", tuple(norms))
        for name, check in _SINGLE.items():
            check(name, getattr(self, name))
        if not isinstance(self.decay_start, str):
            object.__setattr__(self, "decay_start", tuple(self.decay_start))
        for dim, heads in zip(self.dims, self.heads, strict=True):
            if dim % (2 * heads):
                raise ValueError(f"heads: expected a divisor of dim={dim} with an even quotient, got {heads}")

    def replace(self, **changes: Any) -> "BackboneConfig":
        """A copy with some fields changed; an unknown name is a ValueError."""
        fields = [field.name for field in dataclasses.fields(self)]
        for name in changes:
            if name == "img_size":
                raise ValueError("img_size: expected no such argument, as a backbone takes images of any size")
            checks.one_of("model argument", name, fields)
        return dataclasses.replace(self, **changes)

    def differences(self, base: "BackboneConfig") -> dict[str, Any]:
        """The fields that differ from another configuration, with the values of this one."""
        fields = ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))
        return {name: value for name, value in fields if value != getattr(base, name)}

    def mismatch(self, source: "BackboneConfig") -> str | None:
        """Why weights of another model cannot be used although their shapes fit: it computes another function.

        Stages that only one of the models has are ignored, and so are drop rates.

        Args:
            source: of the model that the weights come from.

        Returns:
            The differences in one line, None if there are none.
        """
        stages = min(len(self.depths), len(source.depths))
        names = ["mask", "formulation", "stem_stride", "kinds", "heads"]
        if "rmt" in (self.mask, source.mask):
            names.append("fixed_decay_spans")

        def value(config: BackboneConfig, name: str) -> Any:
            return getattr(config, name)[:stages] if name in PER_STAGE else getattr(config, name)

        different = [name for name in names if value(self, name) != value(source, name)]
        theirs, ours = (
            ", ".join(f"{name}={getattr(config, name)!r}" for name in different) for config in (source, self)
        )
        return f"the weights are of a model with {theirs}; this one has {ours}" if different else None

    def without_head(self, stages: int) -> "BackboneConfig":
        """A copy with the first `stages` stages and no classifier."""
        kept = {name: getattr(self, name)[:stages] for name in PER_STAGE}
        norms = tuple(stage for stage in self.feature_norms if stage < stages)
        return self.replace(**kept, feature_norms=norms, num_classes=0, head_width=None, global_pool="")

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain values, for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "BackboneConfig":
        """The inverse of `to_dict`; an unknown or missing name is a ValueError."""
        known = {field.name: field for field in dataclasses.fields(cls)}
        for name in fields:
            checks.one_of("config field", name, known)
        missing = [n for n, field in known.items() if field.default is dataclasses.MISSING and n not in fields]
        if missing:
            raise ValueError(f"config: expected the fields {', '.join(missing)}, which are missing")
        return cls(**fields)


_TINY = BackboneConfig(
    depths=(2, 2, 8, 2),
    dims=(64, 128, 256, 512),
    heads=(4, 4, 8, 16),
    kinds=("criss_cross", "criss_cross", "full", "full"),  # two full stages: only these give the paper's FLOPs
    ffn_ratios=(3.0, 3.0, 3.0, 3.0),
    drop_path_rate=0.1,
)
_SMALL = _TINY.replace(
    depths=(3, 4, 18, 4),
    kinds=("criss_cross", "criss_cross", "criss_cross", "full"),
    ffn_ratios=(4.0, 4.0, 3.0, 3.0),
    drop_path_rate=0.15,
)
_BASE = _SMALL.replace(
    depths=(4, 8, 25, 8),
    dims=(80, 160, 320, 512),
    heads=(5, 5, 10, 16),
    layer_scale=(None, None, 1e-6, 1e-6),
    fixed_decay_spans=(5.0, 5.0, 6.0, 6.0),
    drop_path_rate=0.4,
)
_NANO = _TINY.replace(
    depths=(1, 2, 4, 1),
    dims=(32, 64, 96, 128),
    heads=(2, 2, 3, 4),
    stem_stride=2,
    head_width=256,
    drop_path_rate=0.05,
)


def _rmt(config: BackboneConfig) -> BackboneConfig:
    """The same blocks with the fixed decay of RMT, which is defined inside the softmax."""
    return config.replace(mask="rmt", formulation="release")


CONFIGS = {
    "ppma_nano": _NANO,
    "ppma_tiny": _TINY,
    "ppma_small": _SMALL,
    "ppma_base": _BASE,
    "rmt_tiny": _rmt(_TINY),
    "rmt_small": _rmt(_SMALL),
    "rmt_base": _rmt(_BASE),
}


def find_variant(*, mask: str, **fields: Any) -> str | None:
    """Name of the first registered variant with these fields, RMT for the mask "rmt" and PPMA for others; or None."""
    for name, config in CONFIGS.items():
        same_kind = (config.mask == "rmt") == (mask == "rmt")
        if same_kind and all(getattr(config, field) == value for field, value in fields.items()):
            return name
    return None
