"""Linear layers with packed weights: csrc/packed_linear.cpp."""

import struct
from collections.abc import Callable
from ctypes import c_float, c_int, c_int64, c_void_p

import torch
from torch import Tensor

from ppma.ops.backends.contract import BackendUnavailableError
from ppma.ops.backends.native import library
from ppma.ops.backends.native.library import Kernel, address, contiguous_address
from ppma.ops.decay_formula import as_matrix

_PARAMS = struct.Struct("PqPPPqPqqqqfPPqqqi")  # PackedLinearParams of csrc/packed_linear.h
_DECAYS = struct.Struct("P2q4P2qi")  # DecayColumns there
_kernel = Kernel("ppma_packed_linear", c_void_p, c_void_p)
_pack = Kernel("ppma_pack_linear", c_void_p, c_int64, c_int64, c_int, c_float, c_void_p, c_int64, c_int)
_pack_slices = Kernel("ppma_pack_slices", c_void_p, c_int64, c_int64, c_int64, c_void_p, c_int64, c_int64)


def packed_weight(kept: dict[str, Tensor], matrix: Callable[[], Tensor], form: str = "") -> Tensor:
    """A weight in the order in which the instruction set in use reads it.

    Args:
        kept: keeps it for the next call.
        matrix: makes the weight, (outputs, inputs), if `kept` does not have it.
        form: tells it from another matrix of the same weight.
    """
    key = f"{library.isa()}{form}"
    if key not in kept:
        with torch.inference_mode(False):
            kept[key] = pack(matrix().detach())
    return kept[key]


def pack(weight: Tensor, scale: float = 1.0) -> Tensor:
    """A weight (outputs, inputs), which may be a transposed matrix, times `scale`, packed."""
    packed = torch.empty(_packed_floats(*weight.shape), dtype=torch.float32, device=weight.device)
    _pack_at(packed, weight, scale, weight.shape[1])
    return packed


def pack_with_slices(weight: Tensor, slices: Tensor, heads: int) -> Tensor:
    """A weight (heads * d, inputs) with `as_matrix(slices, heads)`, transposed, behind its inputs, packed.

    Args:
        weight: may be a transposed matrix.
        slices: (outputs, d).
        heads: that have d channels each.
    """
    inputs, (outputs, d) = weight.shape[1], slices.shape
    everything = inputs + heads * outputs
    packed = torch.empty(_packed_floats(heads * d, everything), dtype=torch.float32, device=weight.device)
    _pack_at(packed, weight, 1.0, everything)
    addresses = contiguous_address(slices, (outputs, d)), contiguous_address(packed, packed.shape)
    _pack_slices(addresses[0], heads, outputs, d, addresses[1], inputs, everything)
    return packed


def _pack_at(packed: Tensor, weight: Tensor, scale: float, inputs: int) -> None:
    """Pack a weight as the first inputs of a layer that has `inputs` of them."""
    transposed = weight.mT.is_contiguous()
    matrix = weight.mT if transposed else weight.contiguous()
    addresses = contiguous_address(matrix, matrix.shape), contiguous_address(packed, packed.shape)
    _pack(addresses[0], *weight.shape, transposed, scale, addresses[1], inputs, library.threads())


def packed_address(kept: dict[str, Tensor], matrix: Callable[[], Tensor], form: str = "") -> int:
    """The address of `packed_weight`, which `kept` keeps alive."""
    packed = packed_weight(kept, matrix, form)
    return contiguous_address(packed, packed.shape)


def rotates(rotated: int, head_dim: int) -> bool:
    """Whether the kernel can rotate so many outputs in heads of this size: it does so in whole vectors."""
    vector = vector_floats()
    return not (rotated % head_dim or rotated % vector or (head_dim % vector and vector % head_dim))


def vector_floats() -> int:
    """Floats in a vector of the instruction set in use."""
    return {"avx512": 16, "avx2": 8}.get(str(library.isa()), 4)


def panel_floats() -> int:
    """Outputs in a panel of packed weights: the room that a single one takes."""
    return _packed_floats(1, 1)


def _packed_floats(outputs: int, inputs: int) -> int:
    size = library.loaded().ppma_packed_linear_size
    size.argtypes, size.restype = (c_int64, c_int64), c_int64
    return size(outputs, inputs)


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
    """See `ppma.ops.fused_linear.fused_linear`."""
    tensors = (x, weight, bias) if residual is None else (x, weight, bias, residual)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise BackendUnavailableError("native kernels: fused_linear has no gradient")
    if residual is not None and rotary is not None:  # the sums start at the residual, and would be rotated with it
        raise BackendUnavailableError("native kernels: fused_linear takes a residual or rotary embeddings, not both")
    library.require_tokens(weight.shape)
    out = torch.empty((len(x), len(weight)), dtype=torch.float32, device=x.device)
    run(x, packed_weight(packed, lambda: weight), bias, residual, out, norm_eps, rotary, rotated)
    return out


def run(
    x: Tensor,
    packed: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
    norm_eps: float | None = None,
    rotary: tuple[Tensor, Tensor] | None = None,
    rotated: int = 0,
    decays: bytes | None = None,
) -> None:
    """The product with a packed weight, to `out`, (rows, outputs), whose rows may lie apart.

    Other arguments as in `fused_linear`; `decays` from `decay_columns` needs `rotary`, by which images are told apart.
    """
    (rows, inputs), outputs = x.shape, out.shape[1]
    x = x if x.stride(1) == 1 else x.contiguous()
    if out.stride(1) != 1:
        raise ValueError(f"native kernels: expected a result with rows of unit stride, got strides {out.stride()}")
    if residual is not None and residual.stride(1) != 1:
        residual = residual.contiguous()
    cosine = sine = tokens = head_dim = 0
    if rotary is not None:
        tokens, pairs = rotary[0].shape
        head_dim = 2 * pairs
        if not rotates(rotated, head_dim):
            raise BackendUnavailableError(
                f"native kernels: fused_linear rotates whole vectors of {vector_floats()}, "
                f"got {rotated} in heads of {head_dim}"
            )
        cosine, sine = (contiguous_address(table, (tokens, pairs)) for table in rotary)
    params = _PARAMS.pack(
        address(x, (rows, inputs)),
        x.stride(0),
        contiguous_address(packed, packed.shape),
        0 if bias is None else contiguous_address(bias, (outputs,)),
        0 if residual is None else address(residual, (rows, outputs)),
        0 if residual is None else residual.stride(0),
        address(out, (rows, outputs)),
        out.stride(0),
        rows,
        inputs,
        outputs,
        -1.0 if norm_eps is None else norm_eps,
        cosine,
        sine,
        rotated if rotary is not None else 0,
        head_dim,
        max(1, tokens),
        library.threads(),
    )
    _kernel(params, decays)


def of_whole_vectors(weight: Tensor, heads: int) -> Tensor:
    """A map (outputs, d) of each head's slice of a token, or, where a vector meets two slices, all of `as_matrix`."""
    return as_matrix(weight, heads) if weight.shape[1] % vector_floats() else weight


def decay_columns(
    weight: Tensor, bias: Tensor, rate: Tensor | None, softplus: bool, out: Tensor, logits: Tensor
) -> bytes:
    """Log-decays that `run` also computes of its rows; the tensors must stay alive until then.

    Args:
        weight: from `of_whole_vectors`.
        bias: (heads, outputs).
        rate: (heads, outputs), or None for 1.
        softplus: the activation is softplus instead of ReLU.
        out: (B, heads, outputs, N), takes the log-decays.
        logits: like out, takes the logits.
    """
    (heads, outputs), (rows, inputs) = bias.shape, weight.shape
    return _DECAYS.pack(
        contiguous_address(weight, weight.shape),
        -inputs if rows == outputs else outputs * inputs,
        inputs,
        contiguous_address(bias, out.shape[1:3]),
        0 if rate is None else contiguous_address(rate, out.shape[1:3]),
        contiguous_address(out, out.shape),
        contiguous_address(logits, out.shape),
        heads,
        outputs,
        softplus,
    )
