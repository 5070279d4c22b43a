"""What defines a backbone, and the seven published by name."""

import dataclasses
import reprlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ppma import masks
from ppma.layers.attention import ATTENTION_KINDS, FORMULATIONS
from ppma.ops import checks

Check = Callable[[str, object], None]  # takes a field's name and a value, raises a ValueError

# Far above any model, and low enough that no file makes building a model endless.
_MOST_STAGES = 16
_MOST_BLOCKS = 4096
_MOST_CHANNELS = 1 << 20
_MOST_CLASSES = 1 << 24


def _shown(value: object) -> str:
    """A value for a message, however large."""
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
    "stem_stride": _stride,
    "in_chans": _whole(1, _MOST_CHANNELS),
    "num_classes": _whole(0, _MOST_CLASSES),
    "head_width": _optional(_whole(1, _MOST_CHANNELS)),
    "global_pool": _word(("avg", "")),
    "drop_rate": _number(0, 1),
    "drop_path_rate": _number(0, 1),
}
PER_STAGE = tuple(_PER_STAGE)


@dataclass(frozen=True)
class BackboneConfig:
    """A backbone of stages on grids of stride `stem_stride`, then twice as coarse with each stage.

    Attributes:
        depths: blocks.
        dims: channels.
        heads: attention heads.
        kinds: "criss_cross", "full", "linear" or "decomposed" attention.
        ffn_ratios: hidden channels of the feed-forward over channels.
        layer_scale: initial layer scale, None where there is none.
        fixed_decay_spans: how the fixed decays of the "rmt" mask spread over the heads.
        mask: a mask of `ppma.masks.KINDS`.
        formulation: "paper" or "release".
        stem_stride: 4 or 2.
        in_chans: channels of the image.
        num_classes: outputs of the classifier, 0 for pooled features.
        head_width: channels between the last stage and the classifier, None to classify the last stage directly.
        global_pool: "avg", or "" for no pooling.
        drop_rate: dropout before the classifier.
        drop_path_rate: probability of dropping a branch in the last block, growing linearly from 0.
        feature_norms: the stages whose features go through a layer norm of their own, for dense tasks.
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
    stem_stride: int = 4
    in_chans: int = 3
    num_classes: int = 1000
    head_width: int | None = 1024
    global_pool: str = "avg"
    drop_rate: float = 0.0
    drop_path_rate: float = 0.0
    feature_norms: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        stages = _stages(self.depths)
        for name, check in _PER_STAGE.items():
            value = getattr(self, name)
            if not isinstance(value, list | tuple) or len(value) != stages:
                raise ValueError(f"{name}: expected one entry for each of {stages} stages, got {_shown(value)}")
            for entry in value:
                check(name, entry)
            object.__setattr__(self, name, tuple(value))  # JSON brings lists
        norms = self.feature_norms
        if not isinstance(norms, list | tuple) or any(norm not in range(stages) for norm in norms):
            raise ValueError(f"feature_norms: expected stages 0 to {stages - 1}, got {_shown(norms)}")
        if len(set(norms)) < len(norms):
            raise ValueError(f"feature_norms: expected each stage once, got {_shown(norms)}")
        object.__setattr__(self, "feature_norms", tuple(norms))
        for name, check in _SINGLE.items():
            check(name, getattr(self, name))
        for dim, heads in zip(self.dims, self.heads, strict=True):
            if dim % (2 * heads):
                raise ValueError(f"heads: expected a divisor of dim={dim} with an even quotient, got {heads}")

    def replace(self, **changes: Any) -> "BackboneConfig":
        """A copy with some fields changed; unknown names are a ValueError."""
        fields = [field.name for field in dataclasses.fields(self)]
        for name in changes:
            if name == "img_size":
                raise ValueError("img_size: expected no such argument (a backbone takes images of any size), got one")
            checks.one_of("model argument", name, fields)
        return dataclasses.replace(self, **changes)

    def differences(self, base: "BackboneConfig") -> dict[str, Any]:
        """The fields, and their values here, by which this differs from another configuration."""
        fields = ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))
        return {name: value for name, value in fields if value != getattr(base, name)}

    def mismatches(self, other: "BackboneConfig") -> list[str]:
        """Which fields make two models with weights of the same shapes compute different things.

        Stages that only one of them has, and what trains but does not compute (drop rates), are left out.
        """
        stages = min(len(self.depths), len(other.depths))
        names = ["mask", "formulation", "stem_stride", "kinds", "heads"]
        if "rmt" in (self.mask, other.mask):
            names.append("fixed_decay_spans")

        def value(config: BackboneConfig, name: str) -> Any:
            return getattr(config, name)[:stages] if name in PER_STAGE else getattr(config, name)

        return [name for name in names if value(self, name) != value(other, name)]

    def without_head(self, stages: int) -> "BackboneConfig":
        """The first so many stages, and no classifier."""
        kept = {name: getattr(self, name)[:stages] for name in PER_STAGE}
        norms = tuple(stage for stage in self.feature_norms if stage < stages)
        return self.replace(**kept, feature_norms=norms, num_classes=0, head_width=None, global_pool="")

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "BackboneConfig":
        """From `to_dict`; unknown and missing names are a ValueError."""
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
    kinds=("criss_cross", "criss_cross", "full", "full"),  # the paper's text says the last only; its FLOPs say two
    ffn_ratios=(3.0, 3.0, 3.0, 3.0),
    drop_path_rate=0.1,
)
_SMALL = BackboneConfig(
    depths=(3, 4, 18, 4),
    dims=(64, 128, 256, 512),
    heads=(4, 4, 8, 16),
    kinds=("criss_cross", "criss_cross", "criss_cross", "full"),
    ffn_ratios=(4.0, 4.0, 3.0, 3.0),
    drop_path_rate=0.15,
)
_BASE = BackboneConfig(
    depths=(4, 8, 25, 8),
    dims=(80, 160, 320, 512),
    heads=(5, 5, 10, 16),
    kinds=("criss_cross", "criss_cross", "criss_cross", "full"),
    ffn_ratios=(4.0, 4.0, 3.0, 3.0),
    layer_scale=(None, None, 1e-6, 1e-6),
    fixed_decay_spans=(5.0, 5.0, 6.0, 6.0),
    drop_path_rate=0.4,
)
_NANO = BackboneConfig(
    depths=(1, 2, 4, 1),
    dims=(32, 64, 96, 128),
    heads=(2, 2, 3, 4),
    kinds=("criss_cross", "criss_cross", "full", "full"),
    ffn_ratios=(3.0, 3.0, 3.0, 3.0),
    stem_stride=2,
    head_width=256,
    drop_path_rate=0.05,
)


def _rmt(config: BackboneConfig) -> BackboneConfig:
    """RMT: the same blocks with its fixed decay, which is defined inside the softmax."""
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


def published_variant(*, mask: str, **fields: Any) -> str | None:
    """The name of the first published variant with these fields and a fixed or learned mask like `mask`, if any."""
    for name, config in CONFIGS.items():
        same_kind = (config.mask == "rmt") == (mask == "rmt")
        if same_kind and all(getattr(config, field) == value for field, value in fields.items()):
            return name
    return None
