"""The decays of the edges of the grid, as the scan kernels take them: csrc/decays.cpp."""

from ctypes import POINTER, c_int, c_int64, c_void_p

import torch
from torch import Tensor

from ppma.ops.backends.native import library
from ppma.ops.backends.native.library import Kernel, address, contiguous_address

# Not torch.exp, whose threads would wait forever in a forked process.
_decays = Kernel("ppma_decays", c_int, POINTER(c_int64), c_void_p, POINTER(c_int64), c_int, c_void_p, c_int)


def edge_decays(log_decay: Tensor, axis: int) -> Tensor:
    """Decays of the edges along grid axis `axis`, contiguous, float32, 0 on the edges outside the grid.

    Args:
        log_decay: (B, heads, *grid); index 0 of the axis is never read.
        axis: counted among the grid axes.

    Returns:
        (B, heads, *grid).
    """
    log_decay = log_decay.float()
    longs = c_int64 * log_decay.ndim
    decay = torch.empty(log_decay.shape, dtype=torch.float32, device=log_decay.device)
    _decays(
        log_decay.ndim,
        longs(*log_decay.shape),
        address(log_decay, log_decay.shape),
        longs(*log_decay.stride()),
        axis + 2,
        contiguous_address(decay, log_decay.shape),
        library.threads(),
    )
    return decay
