"""Parameters, multiply-adds and activations of each part of a backbone, counted on the meta device."""

import copy
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from ppma.models.backbone import PolylineBackbone

_aten = torch.ops.aten
# Operators whose outputs count as activations.
_PRODUCERS = {
    _aten.convolution,
    _aten.mm,
    _aten.addmm,
    _aten.bmm,
    _aten.baddbmm,
    torch.ops.ppma.polyline_attention,
    torch.ops.ppma.criss_cross_attention,
    torch.ops.ppma.linear_attention,
}
_SUMMED = ("parameters", "macs", "activations")


@dataclass(frozen=True)
class PartProfile:
    """Costs of one part of a backbone for one image.

    Attributes:
        name: "stem", "stage 1" .. or "head".
        parameters: number of parameters.
        macs: multiply-adds as fvcore counts them, norms included; papers call them FLOPs.
        activations: output elements of convolutions, linear layers and attention.
        grid: (H, W) of the output, None after pooling.
        channels: of the output.
        blocks: number of blocks, 0 for stem and head.
        attention: one of `ATTENTION_KINDS`, "" for stem and head.
    """

    name: str
    parameters: int
    macs: int
    activations: int
    grid: tuple[int, int] | None = None
    channels: int = 0
    blocks: int = 0
    attention: str = ""


@dataclass(frozen=True)
class Profile:
    """Costs of a backbone for one image.

    Attributes:
        size: (height, width) of the image.
        parts: stem, stages and head, in this order.
    """

    size: tuple[int, int]
    parts: tuple[PartProfile, ...]

    @property
    def total(self) -> PartProfile:
        """The sum of the parts."""
        return PartProfile("total", *(sum(getattr(part, field) for part in self.parts) for field in _SUMMED))

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        total = {field: getattr(self.total, field) for field in _SUMMED}
        return {"size": self.size, **total, "parts": [asdict(part) for part in self.parts]}


class _ActivationCounter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in _PRODUCERS:
            self.elements += (out if isinstance(out, Tensor) else out[0]).numel()
        return out


def _norm_flops(factor: int) -> Callable[..., int]:
    """Norms as fvcore counts them: `factor` MACs for each element, each of them two FLOPs in torch's convention."""

    def flops(shape: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
        return 2 * factor * torch.Size(shape).numel()

    return flops


_NORMS = {_aten.native_layer_norm: _norm_flops(5), _aten.native_batch_norm: _norm_flops(2)}


def count_macs(model: nn.Module, size: tuple[int, int]) -> int:
    """Multiply-adds of any model of RGB images for one image of `size` (height, width), counted as `profile` does."""
    shadow = copy.deepcopy(model).to("meta").eval()
    flops = FlopCounterMode(display=False, custom_mapping=_NORMS)
    with torch.no_grad(), flops:
        shadow(torch.empty(1, 3, *size, device="meta"))
    return flops.get_total_flops() // 2


def profile(model: PolylineBackbone, size: tuple[int, int] | None = None) -> Profile:
    """Count parameters, multiply-adds and activations of each part of a backbone for one image.

    Args:
        model: a backbone; it is not changed.
        size: (height, width) of the image; None takes that of `model.pretrained_cfg`.

    Examples:
        >>> import timm, ppma
        >>> from ppma.models.profile import profile
        >>> profile(timm.create_model("ppma_tiny"), (224, 224)).total.macs / 1e9
        2.708...
    """
    height, width = size or model.pretrained_cfg["input_size"][1:]
    config = model.config
    shadow = copy.deepcopy(model).to("meta").eval()
    x = torch.empty(1, config.in_chans, height, width, device="meta")
    parts = []
    modules: list[tuple[str, nn.Module]] = [("stem", shadow.stem)]
    modules += [(f"stage {index + 1}", stage) for index, stage in enumerate(shadow.stages)]
    modules += [("head", shadow.head)]
    for position, (name, module) in enumerate(modules):
        stage = position - 1 if name.startswith("stage") else None
        flops, written = FlopCounterMode(display=False, custom_mapping=_NORMS), _ActivationCounter()
        with torch.no_grad(), flops, written:
            x = module(x)
        parts.append(
            PartProfile(
                name,
                sum(parameter.numel() for parameter in module.parameters()),
                flops.get_total_flops() // 2,
                written.elements,
                grid=(x.shape[1], x.shape[2]) if x.ndim == 4 else None,
                channels=x.shape[-1],
                blocks=0 if stage is None else config.depths[stage],
                attention="" if stage is None else config.kinds[stage],
            )
        )
    return Profile((height, width), tuple(parts))
