"""The contract of a backend: a module with these functions, some of which it may lack."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ppma.ops.options import AttentionOptions, NdPaths, Paths

Five = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


class BackendUnavailableError(RuntimeError):
    """A backend cannot run here. Raised to the user only if that backend was chosen explicitly."""


class Backend(Protocol):
    """The operators under their public names, on the canonical shapes of `ppma.ops.layout`.

    q and k are (B, heads, H, W, d), v (B, heads, H, W, dv), x (B, heads, *grid, C), log-decays (B, heads, *grid). A
    backward function takes the gradient of the output first and returns the gradients of the tensors in their order.

    `valid` is a boolean (B, H, W), False at keys that take no part (`ppma.ops.padding`), passed only if there is one: a
    backend without that parameter is passed over.
    """

    @staticmethod
    def unsupported_reason(device: torch.device, dtype: torch.dtype) -> str | None:
        """Why tensors of this device and dtype are not supported, or None."""

    @staticmethod
    def polyline_scan(x: Tensor, log_decays: Sequence[Tensor], paths: NdPaths) -> Tensor:
        """Like x."""

    @staticmethod
    def polyline_scan_backward(grad: Tensor, x: Tensor, log_decays: Sequence[Tensor], paths: NdPaths) -> list[Tensor]:
        """Gradients of x and of each log-decay."""

    @staticmethod
    def polyline_attention(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_alpha: Tensor,
        log_beta: Tensor,
        options: AttentionOptions,
        valid: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The output, and what the backward pass needs beside it.

        Returns:
            The output (B, heads, H, W, dv); `stats` (2 * softmaxes, B, heads, H, W), for each softmax the largest logit
            of every row and then the sum of the exponentials of logits minus that, in the backend's own units; and
            `first`, where there are two softmaxes, the output of the first, (1, B, heads, H, W, dv), else (0, ...).
        """

    @staticmethod
    def polyline_attention_backward(
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_alpha: Tensor,
        log_beta: Tensor,
        out: Tensor,
        stats: Tensor,
        first: Tensor,
        options: AttentionOptions,
        valid: Tensor | None = None,
    ) -> Five:
        """Gradients of q, k, v, log_alpha, log_beta."""

    @staticmethod
    def criss_cross_attention(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_alpha: Tensor,
        log_beta: Tensor,
        options: AttentionOptions,
        valid: Tensor | None = None,
    ) -> Tensor:
        """(B, heads, H, W, dv)."""

    @staticmethod
    def criss_cross_attention_backward(
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_alpha: Tensor,
        log_beta: Tensor,
        options: AttentionOptions,
        valid: Tensor | None = None,
    ) -> Five:
        """Gradients of q, k, v, log_alpha, log_beta."""

    @staticmethod
    def linear_attention(q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, log_beta: Tensor, paths: Paths) -> Tensor:
        """(B, heads, H, W, dv)."""

    @staticmethod
    def linear_attention_backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, log_beta: Tensor, paths: Paths
    ) -> Five:
        """Gradients of q, k, v, log_alpha, log_beta."""

    @staticmethod
    def depthwise_conv(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, gelu: bool) -> Tensor:
        """`residual + conv(act(x)) + bias` of channel-last x (B, H, W, C); differentiable by itself."""

    @staticmethod
    def rotary_split(
        packed: Tensor, heads: int, cos: Tensor, sin: Tensor, overwrite: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated q and k, and v (B, N, heads, d), of a packed (B, N, 3 * heads * d); differentiable by itself."""

    @staticmethod
    def decay_head(x: Tensor, weight: Tensor, bias: Tensor, rate: Tensor | None, softplus: bool) -> tuple[Tensor, ...]:
        """The tokens x and what `ppma.ops.decay_head.decay_head` returns; differentiable by itself."""

    @staticmethod
    def fused_linear(
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        residual: Tensor | None,
        norm_eps: float | None,
        rotary: tuple[Tensor, Tensor] | None,
        rotated: int,
        packed: dict[str, Tensor],
    ) -> Tensor:
        """As `ppma.ops.fused_linear.fused_linear`; a backend may keep packed copies of the weight in `packed`."""
