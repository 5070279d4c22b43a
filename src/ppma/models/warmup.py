"""Compile the GPU kernels of a model before they are needed."""

from collections.abc import Iterable

import torch
from torch import nn
from torch.utils._pytree import tree_leaves


def warmup(
    model: nn.Module,
    sizes: Iterable[tuple[int, int]],
    *,
    batch: int = 2,
    channels: int = 3,
    dtype: torch.dtype | None = None,
    backward: bool | None = None,
) -> None:
    """Run a model once at each image size, so that Triton compiles its kernels now instead of in the first steps.

    Kernels are compiled for tiles rather than for image sizes, so a second size adds few. Compiled kernels are kept on
    disk by Triton (`TRITON_CACHE_DIR`), so a second process is fast in any case. Parameters, buffers, gradients and the
    random state are left as they were.

    Args:
        model: takes (batch, channels, H, W) images.
        sizes: (H, W) of the images.
        batch: images; kernels do not depend on it.
        channels: of an image.
        dtype: of autocast; None for none.
        backward: run the backward pass too; None if the model is in training mode.

    Examples:
        >>> import timm, ppma
        >>> model = timm.create_model("ppma_tiny")
        >>> ppma.warmup(model.eval(), [(64, 64)])
    """
    parameter = next(model.parameters())
    device = parameter.device
    backward = model.training if backward is None else backward
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    gradients = {name: value.grad for name, value in model.named_parameters()}
    for value in model.parameters():
        value.grad = None
    devices = [device] if device.type == "cuda" else []
    with (
        torch.random.fork_rng(devices),
        torch.autocast(device.type, dtype or torch.bfloat16, enabled=dtype is not None),
    ):
        for height, width in sizes:
            images = torch.zeros((batch, channels, height, width), dtype=parameter.dtype, device=device)
            with torch.set_grad_enabled(backward):
                out = model(images)
            if backward:
                sum(tensor.float().sum() for tensor in tree_leaves(out)).backward()
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
        for name, value in model.named_parameters():
            value.grad = gradients[name]
