"""Masked attention as a module, for channel-last grids and for the token sequences of a plain ViT."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ppma import masks
from ppma.layers.constants import cached_constant
from ppma.layers.convolution import DepthwiseConv, apply_linear, linear, trains, unhooked
from ppma.layers.decay import DECAYS, Start, check_start
from ppma.layers.factors import FACTORS
from ppma.layers.rope import rotary_table
from ppma.masks import PrefixedMask, StructuredMask
from ppma.ops import backends, checks
from ppma.ops.options import BackendName, Combine
from ppma.ops.padding import zero_invalid
from ppma.ops.projection import project
from ppma.ops.rotary import rotary_split
from ppma.ops.trained_linear import trained_linear

ATTENTION_KINDS = ("full", "criss_cross", *FACTORS)


@dataclass(frozen=True)
class Formulation:
    """How mask and softmax are combined, and how decays are parametrised.

    Attributes:
        combine: "hadamard" or "logit".
        decay: a head of `ppma.layers.DECAYS`.
    """

    combine: Combine
    decay: str


FORMULATIONS = {
    "paper": Formulation(combine="hadamard", decay="relu"),
    "release": Formulation(combine="logit", decay="softplus"),
}


class AttentionInputs(NamedTuple):
    """The inputs of a masked attention.

    Attributes:
        q: (B, heads, H, W, d), rotated (RoPE); (B, heads, 1, prefix + H*W, d) with prefix tokens.
        k: like q.
        v: (B, heads, H, W, d), or as q with prefix tokens.
        mask: over the same tokens.
        grid: (H, W).
        prefix: number of tokens before the grid.
        values: v for another reader than the attention.
        valid: boolean (B, H, W), or (B, 1, prefix + H*W), of the keys that take part; None if all do.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: StructuredMask
    grid: tuple[int, int]
    prefix: int
    values: Tensor
    valid: Tensor | None = None


def attend(
    kind: str,
    mask: StructuredMask,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    combine: Combine,
    valid: Tensor | None = None,
    backend: BackendName = "auto",
) -> Tensor:
    """Attention of one of `ATTENTION_KINDS` with a mask.

    Args:
        kind: "full", "criss_cross", "linear" or "decomposed".
        mask: over the tokens of q.
        q: (B, heads, H, W, d).
        k: (B, heads, H, W, d).
        v: (B, heads, H, W, dv).
        combine: "hadamard" or "logit".
        valid: boolean (B, H, W), False at tokens that take no part as keys; all do if None.
        backend: selects the implementation.

    Returns:
        (B, heads, H, W, dv).
    """
    if kind in FACTORS:
        factors = FACTORS[kind](q, k, valid)
        return mask.decomposed(*factors, zero_invalid(v, valid), combine=combine, backend=backend)
    function = mask.attention if kind == "full" else mask.criss_cross
    return function(q, k, v, combine=combine, valid=valid, backend=backend)


@cached_constant
def _fixed_log_decay(heads: int, span: float, device: torch.device) -> Tensor:
    return masks.rmt_log_decay(heads, span, device)


class PolylineAttention(nn.Module):
    """Multi-head attention with a structured mask whose decays come from the tokens.

    It takes (B, H, W, dim), or (B, N, dim) with `grid=(H, W)`, and returns the same shape. A sequence may begin with
    N - H*W prefix tokens (a class token, registers): they attend to every token and every token attends to them with a
    mask of 1 for each path. Where two paths are summed ("2d" in the paper's formulation) that makes 2, which is also
    what a token has for itself. Prefix tokens need the dense form of the mask, O(N^2) memory, but for full attention in
    the paper's formulation; everything else runs on the fused operators.

    Args:
        dim: channels, a multiple of heads.
        heads: attention heads.
        kind: "full", O(N^2); "criss_cross" for attention within rows and within columns, O(N^1.5); "linear" or
            "decomposed" for weights of low rank in place of the softmax, O(N) (`ppma.layers.factors`).
        mask: "none", "rmt", "cross", "hilbert", "v2h", "2d" or "shared".
        formulation: "paper" (mask after the softmax, ReLU decays) or "release" (mask inside, softplus decays).
        rope: rotate q and k by the token's position (RoPE), for kinds of low rank before the feature map.
        local_kernel: size of a depthwise convolution of v that is added to the result, 0 for none.
        fixed_decay_span: how far the fixed decays of the "rmt" mask spread over the heads.
        decay_start: where learned decays start: "release" as in the authors' trainings, "strong", or the three numbers
            of a `ppma.layers.DecayStart`; see "Making the mask learn" in the documentation.
        backend: selects the implementation of every operator in the module.

    Examples:
        >>> import torch
        >>> from ppma.layers import PolylineAttention
        >>> attention = PolylineAttention(64, heads=4, kind="criss_cross")
        >>> attention(torch.randn(2, 8, 6, 64)).shape
        torch.Size([2, 8, 6, 64])
        >>> attention = PolylineAttention(64, heads=4)
        >>> attention(torch.randn(2, 1 + 8 * 6, 64), grid=(8, 6)).shape
        torch.Size([2, 49, 64])
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        kind: str = "full",
        mask: str = "2d",
        formulation: str = "paper",
        rope: bool = False,
        local_kernel: int = 0,
        fixed_decay_span: float = 4.0,
        decay_start: Start = "release",
        backend: BackendName = "auto",
    ) -> None:
        super().__init__()
        checks.one_of("kind", kind, ATTENTION_KINDS)
        checks.one_of("mask", mask, masks.KINDS)
        checks.one_of("formulation", formulation, FORMULATIONS)
        check_start("decay_start", decay_start)
        if dim % heads or (rope and dim // heads % 2):
            raise ValueError(
                f"heads: expected a divisor of dim={dim}{' with an even quotient' if rope else ''}, got {heads}"
            )
        if local_kernel and local_kernel % 2 == 0:
            raise ValueError(f"local_kernel: expected an odd number or 0, got {local_kernel}")
        self.heads, self.head_dim = heads, dim // heads
        self.kind, self.mask, self.formulation, self.rope = kind, mask, formulation, rope
        self.fixed_decay_span = fixed_decay_span
        learned, decay = masks.KINDS[mask].learned, DECAYS[FORMULATIONS[formulation].decay]
        self.qkv = linear(dim, 3 * dim)
        self.decay = decay(dim, heads, learned, decay_start) if learned else None
        self.local = DepthwiseConv(dim, local_kernel) if local_kernel else None
        self.proj = linear(dim, dim)
        self.backend = backend

    @property
    def backend(self) -> BackendName:
        """Selects the implementation of every operator in the module."""
        return self._backend

    @backend.setter
    def backend(self, name: BackendName) -> None:
        checks.one_of("backend", name, backends.NAMES)
        self._backend = name
        if self.local is not None:
            self.local.backend = name

    def structured_mask(self, x: Tensor) -> StructuredMask:
        """The mask for the tokens x (B, H, W, dim), the attention's own input."""
        log_decays = () if self.decay is None else self.decay(x, self.backend)
        return self.mask_of(log_decays, (x.shape[1], x.shape[2]), x.device)

    def mask_of(self, log_decays: tuple[Tensor, ...], grid: tuple[int, int], device: torch.device) -> StructuredMask:
        """The mask with these log-decays; () for masks that learn none."""
        if self.decay is not None:
            build = masks.KINDS[self.mask].build
            assert build is not None
            return build(*log_decays)
        if self.mask == "none":
            return masks.none(grid, device=device)
        return masks.rmt(_fixed_log_decay(self.heads, self.fixed_decay_span, device), grid)

    def forward(
        self,
        x: Tensor,
        grid: tuple[int, int] | None = None,
        rotary: tuple[Tensor, Tensor] | None = None,
        valid: Tensor | None = None,
    ) -> Tensor:
        """Attend.

        Args:
            x: (B, H, W, dim), or (B, prefix + H*W, dim) with `grid`.
            grid: (H, W) of a token sequence.
            rotary: the `rotary_table` of this grid, for callers that share it between modules.
            valid: boolean (B, H, W), False at padding: these tokens take no part as keys, and the local convolution
                reads 0 there. All tokens are valid if None.

        Returns:
            Like x; the results at invalid tokens are of no use.
        """
        return apply_linear(self.proj, self._mix(x, grid, rotary, valid), self.backend).reshape(x.shape)

    def trains(self, x: Tensor) -> bool:
        """Whether `add_to` has kernels for x and nobody would miss the call of `proj`."""
        return trains(self.proj, x, self.backend)

    def add_to(
        self,
        residual: Tensor,
        factors: Tensor | None,
        x: Tensor,
        rotary: tuple[Tensor, Tensor] | None = None,
        valid: Tensor | None = None,
    ) -> Tensor:
        """`residual + factors * forward(x, ...)` in training, of x (B, H, W, dim); see `trained_linear`."""
        mixed = self._mix(x, None, rotary, valid).unflatten(1, x.shape[1:3])
        return trained_linear(mixed, self.proj.weight, self.proj.bias, residual, factors, backend=self.backend)

    def _mix(
        self,
        x: Tensor,
        grid: tuple[int, int] | None,
        rotary: tuple[Tensor, Tensor] | None,
        valid: Tensor | None,
    ) -> Tensor:
        """Everything but the projection, (B, tokens, dim); arguments as in `forward`."""
        q, k, v, mask, (H, W), prefix, values, valid = self.inputs(x, grid, rotary, valid)
        combine = FORMULATIONS[self.formulation].combine
        if valid is not None:
            values = v = zero_invalid(v, valid)
        out = attend(self.kind, mask, q, k, v, combine=combine, valid=valid, backend=self.backend)

        out = out.movedim(1, -2).flatten(1, 2).flatten(-2)  # (B, tokens, dim)
        if self.local is not None:
            values = values.movedim(1, -2).flatten(1, 2).flatten(-2)
            on_grid = (t[:, prefix:].unflatten(1, (H, W)) for t in (values, out))
            local = self.local.add(*on_grid).flatten(1, 2)
            out = torch.cat((out[:, :prefix], local), 1) if prefix else local
        return out

    def inputs(
        self,
        x: Tensor,
        grid: tuple[int, int] | None = None,
        rotary: tuple[Tensor, Tensor] | None = None,
        valid: Tensor | None = None,
    ) -> AttentionInputs:
        """The inputs of the attention; arguments as in `forward`."""
        tokens, (H, W), prefix = self._as_tokens(x, grid)
        if not prefix and self._projects(tokens):
            return self._projected(tokens, (H, W), rotary, valid)
        on_grid = tokens[:, prefix:].unflatten(1, (H, W))
        if self.decay is None or prefix:
            mask = self.structured_mask(on_grid)
        else:
            tokens, *log_decays = self.decay(on_grid, self.backend, tapped=True)
            mask = self.mask_of(tuple(log_decays), (H, W), x.device)
        packed = apply_linear(self.qkv, tokens, self.backend)
        if self.rope:
            cos, sin = rotary if rotary is not None else rotary_table(H, W, self.head_dim, x.device)
            if prefix:  # rotated by 0
                cos, sin = F.pad(cos, (0, 0, prefix, 0), value=1.0), F.pad(sin, (0, 0, prefix, 0))
            # A hook on the projection may have kept what it saw.
            q, k, v = rotary_split(
                packed, self.heads, cos, sin, overwrite=not self.qkv._forward_hooks, backend=self.backend
            )
        else:
            q, k, v = packed.unflatten(-1, (3, self.heads, self.head_dim)).unbind(2)
        shape = (H, W)
        if valid is not None:
            checks.valid(valid, x.shape[:1], (H, W), x.device)
        if prefix:
            mask, shape = PrefixedMask(mask, prefix, (H, W)), (1, tokens.shape[1])
            valid = None if valid is None else F.pad(valid.flatten(-2), (prefix, 0), value=True).unsqueeze(-2)
        q, k, v = (t.unflatten(1, shape).movedim(-2, 1) for t in (q, k, v))
        return AttentionInputs(q, k, v, mask, (H, W), prefix, v, valid)

    def _projects(self, x: Tensor) -> bool:
        """Whether `_projected` has kernels for x and nobody would miss the calls of `qkv` and `decay`."""
        return self.rope and (self.decay is None or unhooked(self.decay)) and trains(self.qkv, x, self.backend)

    def _projected(
        self, x: Tensor, grid: tuple[int, int], rotary: tuple[Tensor, Tensor] | None, valid: Tensor | None
    ) -> AttentionInputs:
        """`inputs` of tokens (B, H * W, dim) in training."""
        if valid is not None:
            checks.valid(valid, x.shape[:1], grid, x.device)
        rotary = rotary_table(*grid, self.head_dim, x.device) if rotary is None else rotary
        decay = None if self.decay is None else (self.decay.weight, *self.decay.terms())
        bias = x.new_zeros(len(self.qkv.weight)) if self.qkv.bias is None else self.qkv.bias
        projected = project(x, self.qkv.weight, bias, self.heads, rotary, decay, backend=self.backend)
        q, k, v, values = (t.unflatten(1, grid).movedim(-2, 1) for t in projected[:4])
        log_decays = tuple(log_decay.unflatten(-1, grid) for log_decay in projected.log_decays)
        if len(log_decays) == 1:
            log_decays *= 2
        return AttentionInputs(q, k, v, self.mask_of(log_decays, grid, x.device), grid, 0, values, valid)

    def _as_tokens(self, x: Tensor, grid: tuple[int, int] | None) -> tuple[Tensor, tuple[int, int], int]:
        """The tokens (B, N, dim), their grid, and the number of tokens before it."""
        dim = self.heads * self.head_dim
        if grid is None:
            if x.ndim != 4 or x.shape[-1] != dim:
                raise ValueError(
                    f"x: expected shape (B, H, W, {dim}), or (B, N, {dim}) with grid=(H, W), got {tuple(x.shape)}"
                )
            return x.flatten(1, 2), (x.shape[1], x.shape[2]), 0
        H, W = grid
        if x.ndim != 3 or x.shape[-1] != dim or x.shape[1] < H * W:
            raise ValueError(f"x: expected shape (B, N, {dim}) with N >= {H}*{W} for grid={grid}, got {tuple(x.shape)}")
        prefix = x.shape[1] - H * W
        if prefix and self.kind == "criss_cross":
            raise ValueError(
                f"x: criss-cross attention takes no prefix tokens, expected N = {H}*{W} tokens for "
                f"grid={grid}, got {x.shape[1]}"
            )
        return x, (H, W), prefix
