"""Convolutions and blocks for inference, with norms, activations, residuals and decays in their products."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from ppma.layers.attention import FORMULATIONS, PolylineAttention, attend
from ppma.layers.block import PolylineBlock, zero_invalid_tokens
from ppma.layers.convolution import DepthwiseConv, unhooked
from ppma.layers.rope import rotary_table
from ppma.masks import PolylineMask
from ppma.ops import backends
from ppma.ops.backends.contract import (
    BackendUnavailableError,
    BlockWeights,
    Conv3x3Weights,
    ConvWeights,
    LinearWeights,
)
from ppma.ops.choice import fastest, rounded_down
from ppma.ops.decay_formula import as_matrix
from ppma.ops.fused_conv import fused_conv, runs_packed
from ppma.ops.fused_linear import fused_linear, widened
from ppma.ops.layout import compute_dtype
from ppma.ops.options import BackendName, Paths
from ppma.ops.padding import zero_invalid
from ppma.ops.watching import captured, observed


class _PackedModule(nn.Module):
    """A layer whose weight a backend keeps packed."""

    weight: Tensor
    bias: Tensor

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight.detach().clone())
        self.register_buffer("bias", bias.detach().clone())
        self._packed: dict[str, Tensor] = {}

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]
        self._packed.clear()  # the weight moves or changes its dtype
        return super()._apply(fn, recurse)

    def _load_from_state_dict(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        self._packed.clear()
        super()._load_from_state_dict(*args, **kwargs)


class FusedConv(_PackedModule):
    """A 3x3 convolution with a border of one zero, and GELU behind it; see `fused_conv`.

    Args:
        conv: with batch norm folded in.
        gelu: with the activation.

    Attributes:
        backend: selects the implementation.
    """

    def __init__(self, conv: nn.Conv2d, gelu: bool) -> None:
        assert conv.bias is not None
        # in the order in which it is packed
        super().__init__(conv.weight.contiguous(memory_format=torch.channels_last), conv.bias)
        self.stride, self.gelu = conv.stride[0], gelu
        self.backend: BackendName = "auto"

    def forward(self, x: Tensor) -> Tensor:
        """(B, H, W, inputs) to (B, H / stride, W / stride, outputs), rounded up."""
        return fused_conv(
            x,
            self.weight,
            self.bias,
            stride=self.stride,
            gelu=self.gelu,
            packed=self._packed,
            backend=self.backend,
        )

    def kernel_weights(self, shape: Sequence[int], dtype: torch.dtype) -> Conv3x3Weights | None:
        """For the kernel of several layers; None if `forward` is not known to run the kernel for such an x."""
        weight, bias = self._buffers.get("weight"), self._buffers.get("bias")
        if weight is None or bias is None or weight.dtype != dtype:  # somebody made them parameters, or an error is due
            return None
        if not runs_packed(shape, weight, bias, self.stride, self.gelu, self.backend):
            return None
        return Conv3x3Weights(widened(weight, self._packed), bias.float(), self.stride, self.gelu, self._packed)


class FusedLinear(_PackedModule):
    """A linear layer with the layer norm of its input folded in; see `fused_linear`.

    Args:
        weight: (outputs, inputs).
        bias: (outputs,).
        norm: layer norm of the input, None for none.
    """

    def __init__(self, weight: Tensor, bias: Tensor, norm: nn.LayerNorm | None = None) -> None:
        if norm is not None:
            bias = bias + weight @ norm.bias
            weight = weight * norm.weight
        super().__init__(weight, bias)
        self.norm_eps = None if norm is None else norm.eps

    def weights(self) -> LinearWeights:
        """For the kernel of a whole block."""
        return LinearWeights(self.weight, self.bias, self.norm_eps, self._packed)

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


WHOLE, STEPS = "whole", "steps"
_CPU = torch.device("cpu")  # where the kernel runs
_choices: dict[tuple, str] = {}


def block_choices() -> Mapping[tuple, str]:
    """How this process runs blocks, by shape: "whole" in one call, or in "steps"."""
    return _choices


class _Slot(NamedTuple):
    """A parameter or buffer, where its module keeps it, and what changes when it is moved or written."""

    tensors: dict[str, Any]
    name: str
    tensor: Tensor
    address: int
    version: int


def _slots(layers: tuple[Any, ...]) -> list[_Slot] | None:
    """The tensors of the layers; None if one was made in inference mode: PyTorch does not count writes to it."""
    slots = []
    for layer in layers:
        for tensors in () if layer is None else (layer._parameters, layer._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    if tensor.is_inference():
                        return None
                    slots.append(_Slot(tensors, name, tensor, tensor.data_ptr(), tensor._version))
    return slots


class _Kept(NamedTuple):
    """The weights of a block's last call and what they were made of.

    It holds the tensors themselves, so that no other one can take the place of one of them in memory.
    """

    layers: tuple[Any, ...]
    rotary: tuple[Tensor, Tensor]
    grid: tuple[int, int]
    slots: list[_Slot] | None  # from before the weights were made; None if changes would not show
    weights: BlockWeights

    def current(self, layers: tuple[Any, ...], rotary: tuple[Tensor, Tensor], grid: tuple[int, int]) -> bool:
        """Whether the same layers have the same tensors, unchanged."""
        if (
            self.slots is None
            or self.layers != layers
            or self.grid != grid
            or self.rotary[0] is not rotary[0]
            or self.rotary[1] is not rotary[1]
        ):
            return False
        for tensors, name, tensor, address, version in self.slots:
            if tensors.get(name) is not tensor or tensor.data_ptr() != address or tensor._version != version:
                return False
        return True


class FusedBlock(nn.Module):
    """Computes what a `PolylineBlock` computes, up to rounding, in fewer passes over memory.

    One product makes q, k, v and the logits of the decays, the other three add the residual as they write. On the CPU
    they run with packed weights, and either one by one or, where that is faster, all steps of the block in one call
    (`block_choices`).

    Args:
        block: without drop path, layer scales folded into the weights; its convolutions and decay head are used.
    """

    def __init__(self, block: PolylineBlock) -> None:
        super().__init__()
        attn, ffn = block.attn, block.ffn
        weight: Tensor = attn.qkv.weight
        bias: Tensor = attn.qkv.bias
        if attn.decay is not None:
            rows = as_matrix(attn.decay.weight, attn.heads)
            weight, bias = torch.cat((weight, rows)), torch.cat((bias, bias.new_zeros(len(rows))))
        self.position, self.mix = block.position, ffn.local
        self.qkv = FusedLinear(weight, bias, block.attn_norm)
        self.proj = FusedLinear(attn.proj.weight, attn.proj.bias)
        self.expand = FusedLinear(ffn.expand.weight, ffn.expand.bias, block.ffn_norm)
        self.reduce = FusedLinear(ffn.reduce.weight, ffn.reduce.bias)
        del attn.qkv, attn.proj  # the rest serves: mask, local convolution, backend
        self.attn = attn
        # What the speed of a block depends on beside its input and the threads.
        self._key = (self.qkv.weight.shape[1], attn.kind, attn.mask, attn.formulation, attn.heads)
        self._kept: _Kept | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_kept": None}  # a copy has tensors of its own

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor] | None = None, valid: Tensor | None = None) -> Tensor:
        """As `PolylineBlock.forward`."""
        rotary = rotary_table(x.shape[1], x.shape[2], self.attn.head_dim, x.device) if rotary is None else rotary
        by_steps = partial(self._by_steps, x, rotary, valid)
        if valid is not None or not (kernel_serves(x) and self._fits_kernel(x.dtype)):
            return by_steps()
        try:
            weights = self.weights(rotary, (x.shape[1], x.shape[2]))
            whole = partial(backends.call, "native", "fused_layers", x, (weights,))
            if self._attention().backend == "native":
                return whole()
            key = self._choice(x.shape, x.dtype)
            if key not in _choices:
                _choices[key] = fastest({WHOLE: whole, STEPS: by_steps})
            return whole() if _choices[key] == WHOLE else by_steps()
        except BackendUnavailableError:  # heads of a size that the kernel does not rotate
            return by_steps()

    def _choice(self, shape: Sequence[int], dtype: torch.dtype) -> tuple:
        """The key of `block_choices`."""
        return rounded_down(shape[0]), rounded_down(shape[1] * shape[2]), *self._key, torch.get_num_threads(), dtype

    def kernel_weights(self, shape: Sequence[int], dtype: torch.dtype) -> BlockWeights | None:
        """For the kernel of several layers; None if `forward` is not known to run the kernel for such an x."""
        attn = self._attention()
        if not self._fits_kernel(dtype):
            return None
        if attn.backend != "native" and _choices.get(self._choice(shape, dtype)) != WHOLE:
            return None
        return self.weights(rotary_table(shape[1], shape[2], attn.head_dim, _CPU), (shape[1], shape[2]))

    def _attention(self) -> PolylineAttention:
        """`attn`, straight from the dictionary of modules: the look-up by attribute takes ten times as long."""
        return cast(PolylineAttention, self._modules["attn"])

    def _fits_kernel(self, dtype: torch.dtype) -> bool:
        """Whether the kernel of a whole block computes what this one does to an x; hooks would not see its steps."""
        attn = self._attention()
        *_, qkv, proj, expand, reduce = self._layers()
        return (
            attn.backend in ("auto", "native")
            and attn.kind in ("full", "criss_cross")
            and attn.mask not in ("cross", "hilbert")
            and attn._modules["local"] is not None
            and qkv._buffers["weight"].dtype == dtype
            and unhooked(qkv, proj, expand, reduce)
        )

    def weights(self, rotary: tuple[Tensor, Tensor], grid: tuple[int, int]) -> BlockWeights:
        """What the kernel computes, in float32; kept as long as no tensor is replaced, moved or changed."""
        layers = self._layers()
        kept = self._kept  # another thread may replace it
        if kept is None or not kept.current(layers, rotary, grid):
            self._kept = kept = _Kept(layers, rotary, grid, _slots(layers), _wide(self._new_weights(rotary, grid)))
        return kept.weights

    def _layers(self) -> tuple[Any, ...]:
        """The modules whose tensors the kernel reads; None where there is none. The last four are linear layers."""
        layers, of_attention = self._modules, self._attention()._modules
        return (
            layers["position"],
            of_attention["local"],
            layers["mix"],
            of_attention.get("decay"),
            layers["qkv"],
            layers["proj"],
            layers["expand"],
            layers["reduce"],
        )

    def _new_weights(self, rotary: tuple[Tensor, Tensor], grid: tuple[int, int]) -> BlockWeights:
        attn = self.attn
        decay = log_decay = None
        paths: Paths = "v2h" if attn.mask == "v2h" else "2d"
        if attn.decay is not None:
            decay = attn.decay.terms()
        else:
            mask = attn.mask_of((), grid, rotary[0].device)
            assert isinstance(mask, PolylineMask)
            log_decay, paths = mask.log_alpha[..., 0, 0].expand(attn.heads).contiguous(), mask.operator_paths
        return BlockWeights(
            position=_conv_weights(self.position),
            qkv=self.qkv.weights(),
            rotary=rotary,
            decay=decay,
            log_decay=log_decay,
            local=_conv_weights(attn.local),
            proj=self.proj.weights(),
            expand=self.expand.weights(),
            mix=_conv_weights(self.mix),
            reduce=self.reduce.weights(),
            heads=attn.heads,
            full=attn.kind == "full",
            combine=FORMULATIONS[attn.formulation].combine,
            paths=paths,
            kept={},
        )

    def _by_steps(self, x: Tensor, rotary: tuple[Tensor, Tensor], valid: Tensor | None) -> Tensor:
        attn = self.attn
        backend: BackendName = attn.backend if attn.backend in ("auto", "native") else "torch"
        B, H, W, dim = x.shape
        placed = self.position.add(zero_invalid_tokens(x, valid)).reshape(-1, dim)
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


def kernel_serves(x: Tensor) -> bool:
    """Whether the kernel of whole layers may run: it is invisible to modes and profilers, and has no gradient."""
    return (
        not captured()
        and not torch.is_grad_enabled()
        and x.is_cpu
        and x.dtype in backends.NATIVE_DTYPES
        and not observed(x)
        and backends.kernels_serve("auto", "fused_layers", x)
    )


def _wide(value: Any) -> Any:
    """Tuples of tuples and tensors, with the tensors in float32."""
    if isinstance(value, Tensor):
        return value.float()
    if not isinstance(value, tuple):
        return value
    parts = map(_wide, value)
    return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)


def _conv_weights(conv: DepthwiseConv | None) -> ConvWeights:
    assert conv is not None
    assert conv.bias is not None
    return ConvWeights(conv.weight, conv.bias)
