"""A block for inference, with norms, residuals, rotary embeddings and decays in its four products."""

import torch
from torch import Tensor, nn

from ppma.layers.attention import FORMULATIONS, attend
from ppma.layers.block import PolylineBlock, zero_invalid_tokens
from ppma.layers.decay import DecayHead
from ppma.layers.rope import rotary_table
from ppma.ops.fused_linear import fused_linear
from ppma.ops.layout import compute_dtype
from ppma.ops.options import BackendName
from ppma.ops.padding import zero_invalid


class FusedLinear(nn.Module):
    """A linear layer with the layer norm of its input folded in; see `fused_linear`.

    Args:
        weight: (outputs, inputs).
        bias: (outputs,).
        norm: layer norm of the input, None for none.
    """

    weight: Tensor
    bias: Tensor

    def __init__(self, weight: Tensor, bias: Tensor, norm: nn.LayerNorm | None = None) -> None:
        super().__init__()
        if norm is not None:
            bias = bias + weight @ norm.bias
            weight = weight * norm.weight
        self.norm_eps = None if norm is None else norm.eps
        self.register_buffer("weight", weight.detach().clone())
        self.register_buffer("bias", bias.detach().clone())
        self._packed: dict[str, Tensor] = {}

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]
        self._packed.clear()  # the weight moves or changes its dtype
        return super()._apply(fn, recurse)

    def _load_from_state_dict(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        self._packed.clear()
        super()._load_from_state_dict(*args, **kwargs)

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        rotary: tuple[Tensor, Tensor] | None = None,
        rotated: int = 0,
        backend: BackendName = "auto",
    ) -> Tensor:
        """(rows, inputs) to (rows, outputs)."""
        return fused_linear(
            x,
            self.weight,
            self.bias,
            residual,
            norm_eps=self.norm_eps,
            rotary=rotary,
            rotated=rotated,
            packed=self._packed,
            backend=backend,
        )


class FusedBlock(nn.Module):
    """Computes what a `PolylineBlock` computes, up to rounding, in fewer passes over memory.

    One product makes q, k, v and the logits of the decays, the other three add the residual as they write. On the CPU
    they run with packed weights.

    Args:
        block: without drop path, layer scales folded into the weights; its convolutions and decay head are used.
    """

    def __init__(self, block: PolylineBlock) -> None:
        super().__init__()
        attn, ffn = block.attn, block.ffn
        weight: Tensor = attn.qkv.weight
        bias: Tensor = attn.qkv.bias
        if attn.decay is not None:
            rows = _block_diagonal(attn.decay)
            weight, bias = torch.cat((weight, rows)), torch.cat((bias, bias.new_zeros(len(rows))))
        self.position, self.mix = block.position, ffn.local
        self.qkv = FusedLinear(weight, bias, block.attn_norm)
        self.proj = FusedLinear(attn.proj.weight, attn.proj.bias)
        self.expand = FusedLinear(ffn.expand.weight, ffn.expand.bias, block.ffn_norm)
        self.reduce = FusedLinear(ffn.reduce.weight, ffn.reduce.bias)
        del attn.qkv, attn.proj  # the rest serves: mask, local convolution, backend
        self.attn = attn

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor] | None = None, valid: Tensor | None = None) -> Tensor:
        """As `PolylineBlock.forward`."""
        attn = self.attn
        backend: BackendName = attn.backend if attn.backend in ("auto", "native") else "torch"
        B, H, W, dim = x.shape
        placed = self.position.add(zero_invalid_tokens(x, valid)).reshape(-1, dim)
        rotary = rotary_table(H, W, attn.head_dim, x.device) if rotary is None else rotary
        packed = self.qkv(placed, rotary=rotary, rotated=2 * dim, backend=backend)
        heads = packed[:, : 3 * dim].unflatten(-1, (3, attn.heads, attn.head_dim)).unflatten(0, (B, H, W))
        q, k, v = (part.movedim(3, 1) for part in heads.unbind(3))
        log_decays: tuple[Tensor, ...] = ()
        if attn.decay is not None:
            logits = packed[:, 3 * dim :].unflatten(-1, (attn.heads, -1)).unflatten(0, (B, H * W))
            log_decays = attn.decay.from_logits(logits.to(compute_dtype(logits.dtype)), (H, W))
        mask, combine = attn.mask_of(log_decays, (H, W), x.device), FORMULATIONS[attn.formulation].combine
        v = zero_invalid(v, valid)
        out = attend(attn.kind, mask, q, k, v, combine=combine, valid=valid, backend=attn.backend)
        out = out.movedim(1, -2).flatten(-2)
        if attn.local is not None:
            out = attn.local.add(v.movedim(1, -2).flatten(-2), out)
        attended = self.proj(out.reshape(-1, dim), placed, backend=backend)
        hidden = self.expand(attended, backend=backend).view(B, H, W, -1)
        mixed = self.mix.add(zero_invalid_tokens(hidden, valid), gelu=True)
        return self.reduce(mixed.reshape(-1, hidden.shape[-1]), attended, backend=backend).view(B, H, W, dim)


def _block_diagonal(decay: DecayHead) -> Tensor:
    """The decay head's map of each head's slice as one matrix, (heads * outputs, dim)."""
    outputs, size = decay.weight.shape
    rows = decay.weight.new_zeros(decay.heads, outputs, decay.heads, size)
    for head in range(decay.heads):
        rows[head, :, head] = decay.weight
    return rows.flatten(2).flatten(0, 1)
