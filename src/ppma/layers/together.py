"""Convolutions and blocks for inference that follow one another, in a single native call."""

from collections.abc import Iterable

from torch import Tensor, nn

from ppma.layers.chain import Chain
from ppma.layers.convolution import unhooked
from ppma.layers.fused import FusedBlock, FusedConv, kernel_serves
from ppma.layers.stem import Stem
from ppma.ops import backends
from ppma.ops.backends.contract import BackendUnavailableError


def run_together(modules: Iterable[nn.Module], x: Tensor) -> Tensor | None:
    """Modules one after the other in a single native call; None where they have to be called one by one.

    Between kernels Python finds nothing of itself in the cache, so one look at all the layers takes a fraction of as
    many looks at one.

    Args:
        modules: that come to layers of the classes `FusedConv` and `FusedBlock`.
        x: (B, H, W, C), or an image (B, C, height, width) if the first module is a stem.
    """
    layers: list[FusedConv | FusedBlock] = []
    called: list[nn.Module] = []
    if not kernel_serves(x) or not _collect(modules, layers, called) or not layers or not unhooked(*called):
        return None
    if type(called[0]) is Stem:
        x = x.permute(0, 2, 3, 1)
    weights, shape = [], tuple(x.shape)
    for layer in layers:
        found = layer.kernel_weights(shape, x.dtype)
        if found is None:
            return None
        weights.append(found)
        shape = found.output_shape(shape)
    try:
        return backends.call("native", "fused_layers", x, weights)
    except BackendUnavailableError:
        return None


def _collect(modules: Iterable[nn.Module], layers: list[FusedConv | FusedBlock], called: list[nn.Module]) -> bool:
    """Append the layers that the modules come to, and all modules that are called; False if they compute more."""
    for module in modules:
        called.append(module)
        inner: Iterable[nn.Module] = ()
        if type(module) is FusedConv or type(module) is FusedBlock:
            layers.append(module)
        elif type(module) is nn.Sequential:
            inner = module
        elif isinstance(module, Chain) and Chain in type(module).__bases__:
            inner = module.parts()
        elif type(module) is Stem and len(called) == 1:  # anywhere else it would get no image
            inner = (module.layers,)
        elif type(module) is not nn.Identity:
            return False
        if inner and not _collect(inner, layers, called):
            return False
    return True
