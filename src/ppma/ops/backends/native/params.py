"""The arguments of the softmax attentions as the kernels see them: csrc/params.h."""

import struct

import torch
from torch import Tensor

from ppma.ops.backends.native import library
from ppma.ops.backends.native.library import contiguous_address, view
from ppma.ops.layout import heads_last_empty
from ppma.ops.options import AttentionOptions
from ppma.ops.padding import zero_invalid


class AttentionParams:
    """`struct AttentionParams`. Keeps its tensors alive.

    Args:
        q: (B, heads, H, W, d); copied only if the channels are not contiguous.
        k: (B, heads, H, W, d).
        v: (B, heads, H, W, dv).
        log_alpha: (B, heads, H, W).
        log_beta: (B, heads, H, W).
        options: how they are combined.
        valid: boolean (B, H, W), or None.
    """

    _layout = struct.Struct("6q f4i P")

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_alpha: Tensor,
        log_beta: Tensor,
        options: AttentionOptions,
        valid: Tensor | None,
    ) -> None:
        shape, channels = q.shape, v.shape[-1]
        tokens = shape[:-1]
        library.require_tokens((*shape[2:], channels))
        if valid is not None and bool(valid.all()):
            valid = None
        if valid is not None:
            k, v = zero_invalid(k, valid), zero_invalid(v, valid)
            bias = torch.zeros(valid.shape, dtype=torch.float32, device=q.device)
            self.key_bias = bias.masked_fill_(~valid, -torch.inf)
        self.tensors = (*map(unit_stride, (q, k, v)), log_alpha.float(), log_beta.float())
        scalars = self._layout.pack(
            *shape,
            channels,
            options.scale,
            options.combine == "logit",
            options.paths != "h2v",
            options.paths != "v2h",
            library.threads(),
            0 if valid is None else contiguous_address(self.key_bias, (shape[0], *shape[2:4])),
        )
        shapes = (shape, shape, (*tokens, channels), tokens, tokens)
        self._as_parameter_ = b"".join([*map(view, self.tensors, shapes), scalars])


class Gradients:
    """`struct Gradients`: the gradient of the output, and new tensors for those of the inputs."""

    def __init__(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Shapes as in `ppma.ops.layout`."""
        self.grad = unit_stride(grad)
        self.of_q, self.of_k, self.of_v = (heads_last_empty(tensor, tensor.shape[-1]) for tensor in (q, k, v))
        # Two storages: an operator must not return views of one.
        tokens = q.shape[:-1]
        self.of_log_alpha, self.of_log_beta = (
            torch.empty(tokens, dtype=torch.float32, device=q.device) for _ in range(2)
        )
        results = (self.of_q, self.of_k, self.of_v, self.of_log_alpha, self.of_log_beta)
        shapes = (v.shape, q.shape, k.shape, v.shape, tokens, tokens)
        self._as_parameter_ = b"".join(map(view, (self.grad, *results), shapes))

    def results(self, log_alpha: torch.dtype, log_beta: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Gradients of q, k, v, log_alpha and log_beta, the last two in these dtypes."""
        return self.of_q, self.of_k, self.of_v, self.of_log_alpha.to(log_alpha), self.of_log_beta.to(log_beta)


def unit_stride(tensor: Tensor) -> Tensor:
    """The tensor itself if its last axis has stride 1."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()
