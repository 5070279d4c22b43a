"""A block: positional convolution, masked attention, feed-forward, each added to its input."""

from typing import Any

from timm.layers import DropPath, LayerScale
from torch import Tensor, nn

from ppma.layers.attention import PolylineAttention
from ppma.layers.convolution import DepthwiseConv, apply_linear, linear, trains, unhooked
from ppma.layers.decay import Start
from ppma.layers.norm import LayerNorm
from ppma.layers.recompute import recomputing, worthwhile
from ppma.ops.depthwise import depthwise_linear
from ppma.ops.trained_linear import trained_linear

NORM_EPS = 1e-6


def zero_invalid_tokens(x: Tensor, valid: Tensor | None) -> Tensor:
    """A (B, H, W, channels) with 0 where `valid`, (B, H, W), is False; the same tensor if it is None."""
    return x if valid is None else x.masked_fill(~valid[..., None], 0.0)


class ConvFeedForward(nn.Module):
    """Linear, GELU, plus a 3x3 depthwise convolution of the result, linear; on (B, H, W, dim).

    Args:
        dim: channels.
        hidden: channels between the linear layers.
    """

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.expand = linear(dim, hidden)
        self.local = DepthwiseConv(hidden, 3)
        self.reduce = linear(hidden, dim)

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        """(B, H, W, dim) to the same; the convolution reads 0 where the boolean (B, H, W) `valid` is False."""
        if self.trains(x):
            return self.add_to(None, None, x, valid)
        hidden = zero_invalid_tokens(self.expand(x), valid)
        mixed = self.local.add(hidden, gelu=True)
        with recomputing(mixed, lambda: self.local.add(hidden, gelu=True)):
            return self.reduce(mixed)

    def trains(self, x: Tensor) -> bool:
        """Whether `add_to` has kernels for x and nobody would miss the call of `reduce`."""
        return trains(self.reduce, x, self.local.backend)

    def add_to(self, residual: Tensor | None, factors: Tensor | None, x: Tensor, valid: Tensor | None = None) -> Tensor:
        """`residual + factors * forward(x, valid)` in training; see `trained_linear`."""
        backend, last = self.local.backend, (self.reduce.weight, self.reduce.bias, residual, factors)
        hidden = zero_invalid_tokens(apply_linear(self.expand, x, backend), valid)
        if worthwhile(hidden):
            return depthwise_linear(hidden, self.local.weight, self.local.bias, *last, backend=backend)
        return trained_linear(self.local.add(hidden, gelu=True), *last, backend=backend)


class PolylineBlock(nn.Module):
    """`x += conv(x)`, `x += attention(norm(x))`, `x += ffn(norm(x))` on (B, H, W, dim).

    Args:
        dim: channels.
        heads: attention heads.
        kind: "full", "criss_cross", "linear" or "decomposed".
        mask: a mask of `ppma.masks.KINDS`.
        formulation: "paper" or "release".
        ffn_ratio: hidden channels of the feed-forward over dim.
        drop_path: probability of dropping a branch.
        layer_scale: initial scale of the two branches, None for no layer scale.
        fixed_decay_span: see `PolylineAttention`.
        decay_start: see `PolylineAttention`.

    Examples:
        >>> import torch
        >>> from ppma.layers import PolylineBlock
        >>> PolylineBlock(64, heads=4, kind="criss_cross")(torch.randn(2, 8, 6, 64)).shape
        torch.Size([2, 8, 6, 64])
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        kind: str = "full",
        mask: str = "2d",
        formulation: str = "paper",
        ffn_ratio: float = 3.0,
        drop_path: float = 0.0,
        layer_scale: float | None = None,
        fixed_decay_span: float = 4.0,
        decay_start: Start = "release",
    ) -> None:
        super().__init__()

        def scale() -> nn.Module:
            return nn.Identity() if layer_scale is None else LayerScale(dim, layer_scale)

        self.position = DepthwiseConv(dim, 3)
        self.attn_norm = LayerNorm(dim, eps=NORM_EPS)
        self.attn = PolylineAttention(
            dim,
            heads,
            kind=kind,
            mask=mask,
            formulation=formulation,
            rope=True,
            local_kernel=5,
            fixed_decay_span=fixed_decay_span,
            decay_start=decay_start,
        )
        self.attn_scale = scale()
        self.ffn_norm = LayerNorm(dim, eps=NORM_EPS)
        self.ffn = ConvFeedForward(dim, int(dim * ffn_ratio))
        self.ffn_scale = scale()
        self.drop_path = DropPath(drop_path) if drop_path > 0 else nn.Identity()

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor] | None = None, valid: Tensor | None = None) -> Tensor:
        """Arguments and result as in `PolylineAttention.forward`; x is (B, H, W, dim).

        What invalid tokens hold reaches no valid one: they are no keys, and convolutions read 0 there.
        """
        placed = self.position.add(zero_invalid_tokens(x, valid))
        normed = self.attn_norm(placed)
        with recomputing(normed, lambda: self.attn_norm.forward(placed)):
            attended = self._add(placed, self.attn, self.attn_scale, normed, valid=valid, rotary=rotary)
        normed = self.ffn_norm(attended)
        with recomputing(normed, lambda: self.ffn_norm.forward(attended)):
            return self._add(attended, self.ffn, self.ffn_scale, normed, valid=valid)

    def _add(
        self, x: Tensor, branch: PolylineAttention | ConvFeedForward, scale: nn.Module, normed: Tensor, **options: Any
    ) -> Tensor:
        """The sum of x and what a branch makes of `normed`, in training by the last layer of the branch."""
        plain = isinstance(scale, nn.Identity) and type(self.drop_path) in (nn.Identity, DropPath)
        if plain and unhooked(branch, scale, self.drop_path) and branch.trains(normed):
            # What stochastic depth multiplies an image by, drawn as it would draw it for the image itself.
            drops = isinstance(self.drop_path, DropPath) and self.drop_path.training and self.drop_path.drop_prob
            factors = self.drop_path(x.new_ones(len(x), 1, 1, 1)).flatten() if drops else None
            return branch.add_to(x, factors, normed, **options)
        return x + self.drop_path(scale(branch(normed, **options)))
