"""Feature pyramids of timm's models, for detection and segmentation."""

import functools
import itertools
import json
import re
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import LayerNorm2d
from torch import Tensor, nn

from ppma.models.timm_models import TimmModel

_LEVELS = 4
_TRIAL = (192, 256)  # an image that is not square and not of any model's own size
# A block in the name of a parameter: "layer1.0", "stages_0.blocks.0", "blocks.0.0".
_BLOCK = re.compile(r"(?:\w+\.)*?(?:blocks|layers?|stages?)[._]?\d+(?:\.(?:blocks\.)?\d+)?(?=\.)")


@dataclass(frozen=True)
class _Pyramid:
    """How the four levels of a pyramid come from a model.

    Attributes:
        indices: of the levels among the model's features; a single one for a plain ViT.
        levels: channels and stride of each level.
        args: with which the model takes images of any size.
    """

    indices: tuple[int, ...]
    levels: tuple[tuple[int, int], ...]
    args: dict[str, Any]


@functools.lru_cache(maxsize=64)
def _find_pyramid(name: str, arguments: str) -> _Pyramid:
    """Find the levels on the meta device, where a model takes neither memory nor time.

    Args:
        name: of the model.
        arguments: of the model, JSON.
    """
    model, args = TimmModel(name, json.loads(arguments)), json.loads(arguments)
    with torch.device("meta"):
        net = model.create(features_only=True)
    strides = net.feature_info.reduction()
    # The last feature of each stride; of ViTs, timm takes the last few blocks only.
    last = dict(zip(strides, net.feature_info.out_indices, strict=True))
    chosen = sorted(last)[-_LEVELS:]
    plain = len(chosen) == 1 and chosen[0] % 4 == 0
    if not plain and (len(chosen) < _LEVELS or any(2 * low != high for low, high in itertools.pairwise(chosen))):
        raise ValueError(
            "model: expected a backbone with four stages, each of half the resolution, or a plain ViT with patches of "
            f"a multiple of 4 pixels (model_args.patch_size=16), got {name} with the strides {_listed(chosen)}"
        )
    indices = tuple(last[stride] for stride in chosen)
    for extra in ({}, {"strict_img_size": False}, {"dynamic_img_size": True}):  # the last two of Swin and ViT
        levels = _try_levels(TimmModel(name, {**args, **extra}), indices)
        if levels is not None:
            return _Pyramid(indices, SimplePyramid.levels(*levels[0]) if plain else levels, extra)
    size = " x ".join(map(str, _TRIAL))
    raise ValueError(
        f"model: expected a backbone for images of any size, got {name}, which takes none of {size} pixels"
    )


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


def _try_levels(model: TimmModel, indices: tuple[int, ...]) -> tuple[tuple[int, int], ...] | None:
    """Channels and strides of the levels; None if the model does not take images of another size than its own."""
    try:
        with torch.device("meta"), torch.no_grad():
            net = model.create(features_only=True, out_indices=indices).eval()
            maps = _channels_first(net, net(torch.empty(1, 3, *_TRIAL)))
    except (ValueError, AssertionError, RuntimeError):
        return None
    levels = tuple(zip(net.feature_info.channels(), net.feature_info.reduction(), strict=True))
    expected = [(channels, *(side // stride for side in _TRIAL)) for channels, stride in levels]
    return levels if [tuple(level.shape[1:]) for level in maps] == expected else None


def _channels_first(net: nn.Module, maps: list[Tensor]) -> list[Tensor]:
    layout = str(getattr(net, "output_fmt", "NCHW")).removeprefix("Format.")
    return [level.permute(0, 3, 1, 2) for level in maps] if layout == "NHWC" else maps


class SimplePyramid(nn.Module):
    """Four levels from the last features of a plain ViT by transposed convolutions and pooling, as in ViTDet.

    Li et al., Exploring Plain Vision Transformer Backbones for Object Detection, 2022.

    Args:
        channels: of the features, a multiple of 4.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        half, quarter = channels // 2, channels // 4
        self.norm = LayerNorm2d(channels)
        self.up2 = nn.ConvTranspose2d(channels, half, 2, 2)
        self.up4 = nn.Sequential(
            nn.ConvTranspose2d(channels, half, 2, 2),
            LayerNorm2d(half),
            nn.GELU(),
            nn.ConvTranspose2d(half, quarter, 2, 2),
        )

    def forward(self, x: Tensor) -> list[Tensor]:
        """Features (B, C, H, W), H and W even, to levels of 4, 2, 1 and 1/2 times the resolution, finest first."""
        x = self.norm(x)
        return [self.up4(x), self.up2(x), x, F.max_pool2d(x, 2)]

    @staticmethod
    def levels(channels: int, stride: int) -> tuple[tuple[int, int], ...]:
        """Channels and stride of each level, for features of these."""
        return (channels // 4, stride // 4), (channels // 2, stride // 2), (channels, stride), (channels, 2 * stride)


class TimmFeatures(nn.Module):
    """A backbone of timm that returns four feature maps, each of half the resolution of the one before.

    Those of a plain ViT are made by a `SimplePyramid`.

    Args:
        model: which model.
        options: `pretrained` or `weights` of `TimmModel.create`.

    Attributes:
        timm_model: which model.
        feature_info: channels and stride of each map, as timm's models have it.
        pretrained_cfg: timm's description of the model.

    Examples:
        >>> features = TimmFeatures(TimmModel("resnet18"))
        >>> [tuple(level.shape) for level in features(torch.zeros(1, 3, 64, 96))][0]
        (1, 64, 16, 24)
    """

    def __init__(self, model: TimmModel, **options: Any) -> None:
        super().__init__()
        pyramid = _find_pyramid(model.name, json.dumps(model.args, sort_keys=True))
        self.body = TimmModel(model.name, {**model.args, **pyramid.args}).create(
            features_only=True, out_indices=pyramid.indices, **options
        )
        plain = len(pyramid.indices) == 1
        self.pyramid = SimplePyramid(self.body.feature_info.channels()[0]) if plain else None
        self.timm_model = model
        self.pretrained_cfg = self.body.pretrained_cfg
        self.feature_info = [{"num_chs": channels, "reduction": stride} for channels, stride in pyramid.levels]

    def forward(self, images: Tensor) -> list[Tensor]:
        """Images (B, 3, height, width) to four maps (B, C, H, W), finest first; H is height / stride, rounded up."""
        height, width = images.shape[-2:]
        strides = [info["reduction"] for info in self.feature_info]
        # Many models take multiples of their stride only.
        maps = self.body(F.pad(images, (0, -width % strides[-1], 0, -height % strides[-1])))
        maps = _channels_first(self.body, maps) if self.pyramid is None else self.pyramid(maps[0])
        return [
            level[..., : -(-height // stride), : -(-width // stride)]
            for level, stride in zip(maps, strides, strict=True)
        ]

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute blocks in the backward pass."""
        for module in self.modules():  # in-place activations would change the inputs from which timm recomputes
            if getattr(module, "inplace", False):
                module.inplace = False  # type: ignore[assignment]
        self._inner().set_grad_checkpointing(enable)  # type: ignore[operator]

    def no_weight_decay(self) -> set[str]:
        """Names of the parameters that timm excludes from weight decay."""
        excluded: set[str] = getattr(self._inner(), "no_weight_decay", set)()
        return {name for name, _ in self.named_parameters() if name.endswith(tuple(excluded))}

    def group_matcher(self, coarse: bool = False) -> Any:
        """The layer of each parameter by its name, for layer-wise learning rates."""
        layers: dict[str, int] = {}
        keys: list[str] = ["stem"]
        for name, _ in self.named_parameters():
            found = _BLOCK.match(name)
            if found and found[0] not in keys:
                keys.append(found[0])
            layers[name] = keys.index(found[0]) if found else len(keys) - 1
        return layers.__getitem__

    def _inner(self) -> nn.Module:
        return getattr(self.body, "model", self.body)
