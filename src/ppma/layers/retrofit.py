"""The attention of a timm ViT with a structured mask, its projections, norms and gate kept."""

import math
from typing import Any

import torch
from timm.layers import apply_rot_embed_cat
from torch import Tensor, nn

from ppma import masks
from ppma.layers.attention import AttentionInputs, attend
from ppma.layers.decay import DECAYS, DecayHead, ZeroStartDecay
from ppma.masks import PrefixedMask
from ppma.ops.options import BackendName, Combine

ATTENTIONS = ("Attention", "AttentionRope", "EvaAttention")  # timm's classes; their modules differ between versions
RETROFIT_DECAYS: dict[str, type[DecayHead]] = {"zero": ZeroStartDecay, **DECAYS}
_LAYERS = ("qkv", "q_proj", "k_proj", "v_proj", "q_norm", "k_norm", "norm", "gate", "proj", "proj_drop")
_BIASES = ("q_bias", "v_bias")  # of EVA's fused projection; its k_bias is a buffer of zeros


class GridRecorder:
    """A forward hook for a ViT's patch embedding: blocks see a sequence of tokens, and the mask needs their grid.

    Attributes:
        grid: (H, W) of the last images, None before the first.
    """

    def __init__(self) -> None:
        self.grid: tuple[int, int] | None = None

    def __call__(self, embedding: nn.Module, arguments: tuple[Any, ...], tokens: Tensor) -> None:
        if tokens.ndim == 4:  # timm's layout for dynamic sizes, (B, H, W, C)
            self.grid = (tokens.shape[1], tokens.shape[2])
        else:
            self.grid = embedding.dynamic_feat_size(arguments[0].shape[-2:])  # type: ignore[operator]


class RetrofitAttention(nn.Module):
    """The attention of a timm ViT with a structured mask; made by `ppma.retrofit`.

    It owns the layers of the attention it replaces under the same names, so timm's weights still fit, and adds a decay
    head that reads the same tokens as the projections.

    Args:
        attention: `Attention`, `AttentionRope` or `EvaAttention` of timm.
        recorder: gives the grid of the tokens.
        prefix: number of class and register tokens before the grid.
        mask: a mask with learned decays.
        kind: as in `PolylineAttention`.
        combine: "logit" or "hadamard".
        decay: "zero" for log-decays that start at 0, "relu" or "softplus" for the heads of `PolylineAttention`.
        backend: selects the implementation of the attention.

    Raises:
        ValueError: the attention has a part that a mask cannot keep; the message names it.
    """

    # Those that the attention lacks are None.
    qkv: nn.Module | None
    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module
    q_norm: nn.Module | None
    k_norm: nn.Module | None
    norm: nn.Module | None
    gate: nn.Module | None
    proj: nn.Linear
    proj_drop: nn.Module
    q_bias: Tensor | None
    v_bias: Tensor

    def __init__(
        self,
        attention: nn.Module,
        recorder: GridRecorder,
        prefix: int,
        *,
        mask: str = "2d",
        kind: str = "full",
        combine: Combine = "logit",
        decay: str = "zero",
        backend: BackendName = "auto",
    ) -> None:
        super().__init__()
        reason = unsupported_reason(attention)
        if reason is not None:
            raise ValueError(f"attention: {reason}")
        for name in (*_LAYERS, *_BIASES):
            setattr(self, name, getattr(attention, name, None))
        self.recorder, self.prefix, self.backend = recorder, prefix, backend
        self.mask, self.kind, self.combine = mask, kind, combine
        self.heads, self.head_dim = _heads(attention)
        self.key_heads = getattr(attention, "num_kv_heads", self.heads)
        self.rotate_half = getattr(attention, "rotate_half", False)
        weight = self.proj.weight
        head = RETROFIT_DECAYS[decay](self.proj.out_features, self.heads, masks.KINDS[mask].learned)
        self.decay = head.to(weight.device, weight.dtype)

    def forward(
        self, x: Tensor, *, rope: Tensor | None = None, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """Attend; called by timm's blocks.

        Args:
            x: (B, prefix + H*W, dim).
            rope: sines and cosines of the grid's tokens, as timm's blocks pass them.
            attn_mask: must be None.
            is_causal: must be False.

        Returns:
            (B, prefix + H*W, dim).
        """
        q, k, v, mask, *_ = self.inputs(x, rope=rope, attn_mask=attn_mask, is_causal=is_causal)
        out = attend(self.kind, mask, q, k, v, combine=self.combine, backend=self.backend)
        out = out.flatten(2, 3).transpose(1, 2).flatten(-2)
        if self.norm is not None:
            out = self.norm(out)
        if self.gate is not None:
            out = out * self.gate(x).sigmoid()
        return self.proj_drop(self.proj(out))

    def inputs(
        self, x: Tensor, *, rope: Tensor | None = None, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> AttentionInputs:
        """The inputs of the attention; arguments as in `forward`."""
        if attn_mask is not None or is_causal:
            raise ValueError("attn_mask, is_causal: expected None and False, a retrofitted attention has its own mask")
        N, grid = x.shape[1], self.recorder.grid
        if grid is None or self.prefix + grid[0] * grid[1] != N:
            raise ValueError(
                f"x: expected {self.prefix} prefix tokens and the grid {grid} of the last images, got {N} tokens"
            )
        q, k, v = self._project(x)
        if rope is not None:
            q, k = (self._rotate(tokens, rope).to(v.dtype) for tokens in (q, k))
        if self.key_heads != self.heads:
            k, v = (tokens.repeat_interleave(self.heads // self.key_heads, 1) for tokens in (k, v))
        build = masks.KINDS[self.mask].build
        assert build is not None
        mask, shape = build(*self.decay(x[:, self.prefix :].unflatten(1, grid), self.backend)), grid
        if self.prefix:
            mask, shape = PrefixedMask(mask, self.prefix, grid), (1, N)
        q, k, v = (tokens.unflatten(-2, shape) for tokens in (q, k, v))
        return AttentionInputs(q, k, v, mask, grid, self.prefix, v)

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v, (B, heads, N, head_dim) each."""
        if self.qkv is None:
            parts = (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        else:
            packed = self.qkv(x)
            if self.q_bias is not None:
                packed = packed + torch.cat((self.q_bias, torch.zeros_like(self.q_bias), self.v_bias))
            parts = packed.chunk(3, -1)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in parts)
        return (q if self.q_norm is None else self.q_norm(q)), (k if self.k_norm is None else self.k_norm(k)), v

    def _rotate(self, tokens: Tensor, rope: Tensor) -> Tensor:
        half = {"half": True} if self.rotate_half else {}  # timm 1.0.15 has interleaved channels only
        rotated = apply_rot_embed_cat(tokens[:, :, self.prefix :], rope, **half)
        return torch.cat((tokens[:, :, : self.prefix], rotated), 2)

    def extra_repr(self) -> str:
        return f"mask={self.mask}, kind={self.kind}, combine={self.combine}, prefix={self.prefix}"


def _heads(attention: Any) -> tuple[int, int]:
    """Number and size of an attention's heads."""
    return attention.num_heads, attention.proj.in_features // attention.num_heads


def unsupported_reason(attention: Any) -> str | None:
    """What `RetrofitAttention` cannot keep of an attention, None if it can keep everything."""
    name = type(attention).__name__
    if name not in ATTENTIONS or not type(attention).__module__.startswith("timm."):
        return f"expected timm's {', '.join(ATTENTIONS)}, got {name}"
    parts = {part for part, _ in (*attention.named_children(), *attention.named_parameters(recurse=False))}
    unknown = sorted(parts - {*_LAYERS, *_BIASES, "attn_drop"})
    if unknown:
        return f"expected the parts of a plain attention, got {', '.join(unknown)} too"
    if attention.attn_drop.p > 0:
        return f"expected attn_drop_rate=0, masked attention has no dropout of its weights, got {attention.attn_drop.p}"
    heads, head_dim = _heads(attention)
    if not math.isclose(attention.scale, head_dim**-0.5):
        return f"expected a scale of {head_dim}**-0.5, got {attention.scale}"
    inputs, outputs = (attention.qkv or attention.q_proj).in_features, attention.proj.out_features
    if inputs != outputs or inputs % heads:
        return f"expected as many channels out as in, a multiple of {heads} heads, got {inputs} in, {outputs} out"
    return None
