"""What defines a backbone, and the seven published by name."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ppma import masks
from ppma.layers.attention import ATTENTION_KINDS, FORMULATIONS
from ppma.ops import checks

# Fields with one entry for each stage.
PER_STAGE = ("depths", "dims", "heads", "kinds", "ffn_ratios", "layer_scale", "fixed_decay_spans")


@dataclass(frozen=True)
class BackboneConfig:
    """A backbone of stages on grids of stride `stem_stride`, then twice as coarse with each stage.

    Attributes:
        depths: blocks.
        dims: channels.
        heads: attention heads.
        kinds: "criss_cross" or "full" attention.
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
        for name in PER_STAGE:
            value = getattr(self, name)
            object.__setattr__(self, name, tuple(value))  # JSON brings lists
            if len(value) != len(self.depths):
                raise ValueError(f"{name}: expected one entry for each of {len(self.depths)} stages, got {value!r}")
        object.__setattr__(self, "feature_norms", tuple(self.feature_norms))
        if not set(self.feature_norms) <= set(range(len(self.depths))):
            raise ValueError(f"feature_norms: expected stages 0 to {len(self.depths) - 1}, got {self.feature_norms!r}")
        for kind in self.kinds:
            checks.one_of("kinds", kind, ATTENTION_KINDS)
        checks.one_of("mask", self.mask, masks.KINDS)
        checks.one_of("formulation", self.formulation, FORMULATIONS)
        checks.one_of("global_pool", self.global_pool, ("avg", ""))
        if self.stem_stride not in (2, 4):
            raise ValueError(f"stem_stride: expected 2 or 4, got {self.stem_stride!r}")
        if self.num_classes < 0 or self.in_chans < 1:
            raise ValueError(
                f"num_classes, in_chans: expected at least 0 and 1, got {self.num_classes} and {self.in_chans}"
            )

    def replace(self, **changes: Any) -> "BackboneConfig":
        """A copy with some fields changed; unknown names are a ValueError."""
        fields = [field.name for field in dataclasses.fields(self)]
        for name in changes:
            checks.one_of("model argument", name, fields)
        return dataclasses.replace(self, **changes)

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
