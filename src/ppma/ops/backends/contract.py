"""The contract of a backend: a module with these functions, some of which it may lack."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ppma.ops.options import AttentionOptions, Combine, NdPaths, Paths

Five = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


class BackendUnavailableError(RuntimeError):
    """A backend cannot run here. Raised to the user only if that backend was chosen explicitly."""


class LinearWeights(NamedTuple):
    """A linear layer of a block.

    Attributes:
        weight: (outputs, inputs).
        bias: (outputs,).
        norm_eps: epsilon of a layer norm of the input without scale and shift, None for no norm.
        packed: copies of the weight that a backend keeps.
    """

    weight: Tensor
    bias: Tensor
    norm_eps: float | None
    packed: dict[str, Tensor]


class ConvWeights(NamedTuple):
    """A depthwise convolution of a block: weight (C, 1, k, k) and bias (C,)."""

    weight: Tensor
    bias: Tensor


class Conv3x3Weights(NamedTuple):
    """A convolution between blocks; see `ppma.ops.fused_conv.fused_conv`.

    Attributes:
        weight: (outputs, inputs, 3, 3).
        bias: (outputs,).
        stride: 1 or 2.
        gelu: with GELU behind it.
        packed: copies of the weight that a backend keeps.
    """

    weight: Tensor
    bias: Tensor
    stride: int
    gelu: bool
    packed: dict[str, Tensor]

    def output_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """(B, H / stride, W / stride, outputs), rounded up, from (B, H, W, inputs)."""
        batch, height, width, _ = shape
        return batch, -(-height // self.stride), -(-width // self.stride), self.weight.shape[0]


class BlockWeights(NamedTuple):
    """What a block of a backbone computes for inference, in the order of its steps.

    Attributes:
        position: 3x3, added to its input.
        qkv: q, k, v and behind them the logits of the learned decays, (heads, outputs).
        rotary: cosines and sines, (H * W, head_dim / 2).
        decay: bias and rate of the logits, (heads, outputs) each, and whether the activation is softplus, as
            `decay_head` takes them; None where no decay is learned.
        log_decay: (heads,) of a mask with constant decays, None where they are learned.
        local: 5x5, of the values, added to the result of the attention.
        proj: its result is added to the input of the attention.
        expand: to the hidden channels.
        mix: 3x3, of GELU of the hidden channels, added to that.
        reduce: its result is added to the input of the feed-forward.
        heads: attention heads.
        full: full attention instead of criss-cross attention.
        combine: of mask and softmax.
        paths: of the mask.
        kept: a backend keeps here what it derives from all of these; it is theirs as long as they are neither moved nor
            changed.
    """

    position: ConvWeights
    qkv: LinearWeights
    rotary: tuple[Tensor, Tensor]
    decay: tuple[Tensor, Tensor | None, bool] | None
    log_decay: Tensor | None
    local: ConvWeights
    proj: LinearWeights
    expand: LinearWeights
    mix: ConvWeights
    reduce: LinearWeights
    heads: int
    full: bool
    combine: Combine
    paths: Paths
    kept: dict[object, Any]

    def output_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """That of the input."""
        return tuple(shape)


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
            `first`, where there are two softmaxes, the output of the first, (1, B, heads, H, W, dv), or zeros that may
            share their memory if the backend's backward pass needs none; else (0, ...).
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
    def conv3x3(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int) -> Tensor:
        """`conv(x) + bias` of channel-last x (B, H, W, inputs); differentiable by itself."""

    @staticmethod
    def depthwise_conv(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, gelu: bool) -> Tensor:
        """`residual + conv(act(x)) + bias` of channel-last x (B, H, W, C); differentiable by itself."""

    @staticmethod
    def depthwise_linear(
        x: Tensor,
        taps: Tensor,
        offsets: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        residual: Tensor | None = None,
        factors: Tensor | None = None,
    ) -> Tensor:
        """`trained_linear` of `gelu(x) + conv(gelu(x)) + offsets` of channel-last x; differentiable by itself."""

    @staticmethod
    def trained_linear(
        x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, factors: Tensor | None
    ) -> Tensor:
        """`residual + factors * linear(x)`, `factors` for each image; differentiable by itself."""

    @staticmethod
    def rotary_split(
        packed: Tensor, heads: int, cos: Tensor, sin: Tensor, overwrite: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated q and k, and v (B, N, heads, d), of a packed (B, N, 3 * heads * d); differentiable by itself."""

    @staticmethod
    def project(
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        heads: int,
        cos: Tensor,
        sin: Tensor,
        decay_weight: Tensor | None,
        decay_bias: Tensor | None,
        rate: Tensor | None,
        softplus: bool,
    ) -> tuple[Tensor, ...]:
        """q, k, v, v again and the log-decays of `ppma.ops.projection.project`; differentiable by itself."""

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

    @staticmethod
    def fused_conv(
        x: Tensor, weight: Tensor, bias: Tensor, stride: int, gelu: bool, packed: dict[str, Tensor]
    ) -> Tensor:
        """As `ppma.ops.fused_conv.fused_conv`."""

    @staticmethod
    def fused_layers(x: Tensor, layers: Sequence[BlockWeights | Conv3x3Weights]) -> Tensor:
        """At least one layer of a backbone for inference, one after the other, of channel-last x (B, H, W, C)."""
