"""A block: local positions, masked attention, feed-forward, each added to its input."""

from timm.layers import DropPath, LayerScale
from torch import Tensor, nn

from ppma.layers.attention import PolylineAttention
from ppma.layers.convolution import DepthwiseConv, linear
from ppma.layers.recompute import recomputing

NORM_EPS = 1e-6


class ConvFeedForward(nn.Module):
    """Linear, GELU, plus a 3x3 depthwise convolution of itself, linear; on (B, H, W, dim)."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.expand = linear(dim, hidden)
        self.local = DepthwiseConv(hidden, 3)
        self.reduce = linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.expand(x)
        mixed = self.local.add(hidden, gelu=True)
        with recomputing(mixed, lambda: self.local.add(hidden, gelu=True)):
            return self.reduce(mixed)


class PolylineBlock(nn.Module):
    """`x += conv(x)`, `x += attention(norm(x))`, `x += ffn(norm(x))` on (B, H, W, dim).

    Args:
        dim: channels.
        heads: attention heads.
        kind: "full" or "criss_cross".
        mask: a mask of `ppma.masks.KINDS`.
        formulation: "paper" or "release".
        ffn_ratio: hidden channels of the feed-forward over dim.
        drop_path: probability of dropping a branch.
        layer_scale: initial scale of the two branches, None for no layer scale.
        fixed_decay_span: see `PolylineAttention`.
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
    ) -> None:
        super().__init__()

        def scale() -> nn.Module:
            return nn.Identity() if layer_scale is None else LayerScale(dim, layer_scale)

        self.position = DepthwiseConv(dim, 3)
        self.attn_norm = nn.LayerNorm(dim, eps=NORM_EPS)
        self.attn = PolylineAttention(
            dim,
            heads,
            kind=kind,
            mask=mask,
            formulation=formulation,
            rope=True,
            local_kernel=5,
            fixed_decay_span=fixed_decay_span,
        )
        self.attn_scale = scale()
        self.ffn_norm = nn.LayerNorm(dim, eps=NORM_EPS)
        self.ffn = ConvFeedForward(dim, int(dim * ffn_ratio))
        self.ffn_scale = scale()
        self.drop_path = DropPath(drop_path) if drop_path > 0 else nn.Identity()

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor] | None = None) -> Tensor:
        placed = self.position.add(x)
        normed = self.attn_norm(placed)
        with recomputing(normed, lambda: self.attn_norm.forward(placed)):
            attended = placed + self.drop_path(self.attn_scale(self.attn(normed, rotary=rotary)))
        normed = self.ffn_norm(attended)
        with recomputing(normed, lambda: self.ffn_norm.forward(attended)):
            return attended + self.drop_path(self.ffn_scale(self.ffn(normed)))
