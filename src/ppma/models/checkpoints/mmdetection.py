"""Mask R-CNN in MMDetection's layout, to and from the names of our detector (torchvision's)."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from ppma import masks
from ppma.layers.rope import rotary_frequencies
from ppma.models.checkpoints import release
from ppma.models.checkpoints.weights import without_extra_state
from ppma.models.config import BackboneConfig

BODY = "backbone.body."  # prefix of the backbone's weights in our detector
CLASSIFIER = "roi_head.bbox_head.fc_cls.weight"  # (classes + 1, box channels)
BOX_LAYER = "roi_head.bbox_head.shared_fcs.0.weight"  # (box channels, channels * 49)
PYRAMID_LAYER = "neck.fpn_convs.0.conv.weight"  # (channels, channels, 3, 3)
MASK_LAYER = "roi_head.mask_head.convs.{}.conv.weight"
_BACKBONE = "backbone."  # the same prefix in MMDetection's files
# MMDetection's prefixes and ours; N is a number that both have.
_PREFIXES = (
    ("neck.lateral_convs.N.conv.", "backbone.fpn.inner_blocks.N.0."),
    ("neck.fpn_convs.N.conv.", "backbone.fpn.layer_blocks.N.0."),
    ("rpn_head.rpn_conv.", "rpn.head.conv.0.0."),
    ("rpn_head.rpn_cls.", "rpn.head.cls_logits."),
    ("rpn_head.rpn_reg.", "rpn.head.bbox_pred."),
    ("roi_head.bbox_head.shared_fcs.0.", "roi_heads.box_head.fc6."),
    ("roi_head.bbox_head.shared_fcs.1.", "roi_heads.box_head.fc7."),
    ("roi_head.bbox_head.fc_cls.", "roi_heads.box_predictor.cls_score."),
    ("roi_head.bbox_head.fc_reg.", "roi_heads.box_predictor.bbox_pred."),
    ("roi_head.mask_head.convs.N.conv.", "roi_heads.mask_head.N.0."),
    ("roi_head.mask_head.upsample.", "roi_heads.mask_predictor.conv5_mask."),
    ("roi_head.mask_head.conv_logits.", "roi_heads.mask_predictor.mask_fcn_logits."),
)
_OUR_CLASSIFIER = "roi_heads.box_predictor.cls_score."


def heads_in(state: Mapping[Any, Any]) -> dict[str, Any]:
    """The entries of a file's `state_dict` outside of the backbone."""
    named = {str(name).removeprefix("module."): tensor for name, tensor in state.items()}
    return {name: tensor for name, tensor in named.items() if not name.startswith(_BACKBONE)}


def convert_heads(heads: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights of the neck and the heads with our names; unknown names are kept, so that loading reports them.

    The background is MMDetection's last class and our first.
    """
    converted = {}
    for name, tensor in heads.items():
        ours = _rename(name, _PREFIXES)
        converted[ours] = tensor.roll(1, 0) if ours.startswith(_OUR_CLASSIFIER) and tensor.ndim else tensor
    return converted


def restore(state: Mapping[str, Tensor], config: BackboneConfig) -> dict[str, Tensor]:
    """Weights of our detector in MMDetection's layout.

    Args:
        state: weights of a `PolylineMaskRCNN` without background outputs.
        config: configuration of its backbone, in the release formulation.
    """
    swapped = [(ours, theirs) for theirs, ours in _PREFIXES]
    restored: dict[str, Tensor] = {}
    for name, tensor in without_extra_state(state).items():
        if name.startswith(BODY):
            backbone = _restore_backbone(name.removeprefix(BODY), tensor)
            restored |= {_BACKBONE + theirs: value for theirs, value in backbone.items()}
        else:
            restored[_rename(name, swapped)] = tensor.roll(-1, 0) if name.startswith(_OUR_CLASSIFIER) else tensor
    return restored | {_BACKBONE + name: tensor for name, tensor in _constants(config).items()}


def _rename(name: str, prefixes: Iterable[tuple[str, str]]) -> str:
    for old, new in prefixes:
        if match := re.match(re.escape(old).replace("N", r"(\d{1,4})"), name):
            return new.replace("N", match[1] if match.groups() else "") + name[match.end() :]
    return name


def _restore_backbone(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """The inverse of `release.convert` for one tensor."""
    if match := re.fullmatch(r"(stages\.\d+\.blocks\.\d+)\.attn\.qkv\.(weight|bias)", name):
        block, kind = match[1].replace("stages", "layers"), match[2]
        parts = zip("qkv", tensor.chunk(3), strict=True)
        return {f"{block}.retention.{which}_proj.{kind}": part.clone() for which, part in parts}
    if match := re.fullmatch(r"stages\.(\d+)\.downsample\.(conv|norm)\.(.+)", name):
        layer = {"conv": "reduction", "norm": "norm"}[match[2]]
        return {f"layers.{int(match[1]) - 1}.downsample.{layer}.{match[3]}": tensor}
    scale = name.endswith("_scale.gamma")
    for pattern, ours in release.RENAMED:
        theirs, count = _substitute_back(pattern, ours, name)
        if count:
            return {theirs: tensor.view(1, 1, 1, -1) if scale else tensor}
    return {name: tensor}


def _substitute_back(pattern: str, replacement: str, name: str) -> tuple[str, int]:
    """`re.subn` with the roles of a pattern and its replacement exchanged."""
    groups = re.findall(r"\([^)]*\)", pattern)
    ours, theirs = re.escape(replacement), pattern.rstrip("$").replace(r"\.", ".")
    for number, group in enumerate(groups, start=1):
        ours = ours.replace(re.escape(f"\\{number}"), group)
        theirs = theirs.replace(group, f"\\{number}", 1)
    return re.subn("^" + ours, theirs, name)


def _constants(config: BackboneConfig) -> dict[str, Tensor]:
    """The rotary frequencies and fixed decays, which the authors' files store and our models compute."""
    constants = {}
    for stage, (dim, heads) in enumerate(zip(config.dims, config.heads, strict=True)):
        constants[f"layers.{stage}.Relpos.angle"] = rotary_frequencies(dim // heads).repeat_interleave(2)
        if config.mask == "rmt":
            constants[f"layers.{stage}.Relpos.decay"] = masks.rmt_log_decay(heads, config.fixed_decay_spans[stage])
    return constants
