"""What a launch has to do, counted from the launch itself: bytes, matrix products, exponentials, other arithmetic.

Bytes are compulsory: every tensor crosses the memory bus once, as if caches were perfect. Arithmetic is what the tiles
do, padding included. With `mask=False` everything is left out that is there for the mask, so that the difference is the
price of the mask.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import triton
from torch import Tensor

from ppma.ops.backends.triton.configs import BLOCK_M
from ppma.ops.backends.triton.launch import Launch
from ppma.ops.backends.triton.tiles import Field


@dataclass(frozen=True)
class Work:
    """The work of one launch.

    Attributes:
        bytes: moved to and from memory.
        matrix: floating-point operations of matrix products.
        exponentials: exp2 instructions of single elements.
        vector: other float32 instructions of single elements.
    """

    bytes: int = 0
    matrix: int = 0
    exponentials: int = 0
    vector: int = 0

    def __add__(self, other: "Work") -> "Work":
        return Work(
            self.bytes + other.bytes,
            self.matrix + other.matrix,
            self.exponentials + other.exponentials,
            self.vector + other.vector,
        )


# Arguments that only the mask needs; `first` is of the second softmax, which only a mask asks for.
_OF_THE_MASK = {"alpha", "beta", "potential", "moved", "alpha_own", "alpha_corner", "beta_own", "beta_corner", "first"}
_FOR_EACH_SOFTMAX = {"stats": 2, "delta": 1}  # how many numbers of a token
_KERNELS_OF_THE_MASK = {"line_potentials", "log_decay_gradient"}

# Instructions for an element of a tile of scores, read off the kernels.
_DIFFERENCE = 3  # of two potentials: high parts, low parts, their sum (the sign is free)
_SOFTMAX = 4  # maximum, difference, log2(e), sum
_SOFTMAX_AGAIN = 4  # difference, log2(e), inverse sum, validity
_CUTS = 2  # a line and a minimum; as many where a weight is 1


def work_of(launch: Launch, mask: bool = True) -> Work:
    """Count the work of a recorded launch."""
    name = launch.kernel.__name__
    if not mask and name in _KERNELS_OF_THE_MASK:
        return Work()
    moved = _bytes(launch.arguments, mask)
    count = _ARITHMETIC.get(name)
    if count is None:
        return Work(bytes=moved)
    pairs, products, exponentials, vector = count(launch, mask)
    return Work(moved, 2 * pairs * products, pairs * exponentials, pairs * vector)


def _bytes(arguments: dict[str, Any], mask: bool) -> int:
    """Every tensor once, whichever names it has; of a band of rows its part."""
    tensors: dict[Any, Tensor] = {}
    for name, value in arguments.items():
        if isinstance(value, Field | Tensor) and (mask or name not in _OF_THE_MASK):
            tensor = value.data if isinstance(value, Field) else value
            if not mask and name in _FOR_EACH_SOFTMAX:
                tensor = tensor[: _FOR_EACH_SOFTMAX[name]]
            tensors[(tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.numel(), type(value))] = tensor
    band = arguments["rows"] / arguments["beta"].data.shape[3] if "start" in arguments else 1.0
    return sum(
        int(tensor.numel() * tensor.element_size() * (band if kind is Field else 1.0))
        for (*_, kind), tensor in tensors.items()
    )


def _attention_pairs(launch: Launch, mask: bool) -> int:
    """Scores of all tiles. Without a mask tiles need not follow the grid's rows."""
    a = launch.arguments
    batch_heads = launch.grid[0] // (triton.cdiv(a["H"], a["ROWS"]) * triton.cdiv(a["W"], a["COLS"]))
    if not mask:
        return batch_heads * (triton.cdiv(a["H"] * a["W"], BLOCK_M) * BLOCK_M) ** 2
    walked = min(a["band"], a["H"]) * triton.cdiv(a["W"], a["BLOCK_N"]) * a["BLOCK_N"]
    return launch.grid[0] * a["ROWS"] * a["COLS"] * walked


def _mask_work(a: dict[str, Any], near: bool, far: bool) -> tuple[int, int]:
    """Exponentials and other instructions of the masks of one score."""
    log = a["MODE"] == "logit"
    exponentials = vector = 0
    if near:  # one row: a product with a vector, or a sum of two logarithms
        several = a["ROWS"] > 1
        exponentials += several and not log
        vector += _DIFFERENCE + 1 if several else 1
    if far:
        exponentials += not log
        vector += _DIFFERENCE + 1
    # Sum of the paths and product with the softmax, or one sum for each path, with its cuts.
    vector += (int(near) + int(far)) * (1 + _CUTS if log else 1)
    return exponentials, vector


def _forward(launch: Launch, mask: bool) -> tuple[int, int, int, int]:
    a = launch.arguments
    near, far = a["V2H"], a["H2V"]
    softmaxes = {"hadamard": 1, "logit": (near + far) if mask else 1, "linear": 0}[a["MODE"]]
    mask_exponentials, mask_vector = _mask_work(a, near, far) if mask else (0, 0)
    products = a["BLOCK_D"] + a["BLOCK_DV"] * max(1, softmaxes)
    # Scale, validity, rounding of the weights.
    vector = 3 + _SOFTMAX * softmaxes + mask_vector
    return _attention_pairs(launch, mask), products, softmaxes + mask_exponentials, vector


def _backward(launch: Launch, mask: bool) -> tuple[int, int, int, int]:
    a = launch.arguments
    near, far = a["NEAR"], a["FAR"]
    softmaxes = {"hadamard": 1, "logit": (near + far) if mask else 1, "linear": 0}[a["MODE"]]
    mask_exponentials, mask_vector = _mask_work(a, near, far) if mask else (0, 0)
    products = 2 * a["BLOCK_D"] + a["BLOCK_DV"] * (2 if a["KEY_SIDE"] else 1)
    # Scale, and for each softmax its weights and the gradient of the score; rounding of what is multiplied.
    of_softmax = _SOFTMAX_AGAIN + 2 + _CUTS if softmaxes else 4
    vector = 1 + of_softmax * max(1, softmaxes) + (2 if a["KEY_SIDE"] else 1)
    if mask:  # gradients of the log masks and their sums
        vector += mask_vector + 3 * near + 2 * far
    return _attention_pairs(launch, mask), products, softmaxes + mask_exponentials, vector


def _line_pairs(launch: Launch) -> int:
    a = launch.arguments
    return launch.grid[0] * a["BLOCK_M"] * triton.cdiv(a["n"], a["BLOCK_N"]) * a["BLOCK_N"]


def _line_mask_work(a: dict[str, Any], mask: bool) -> tuple[int, int]:
    if not mask:
        return 0, 0
    return (1, _DIFFERENCE + 1) if a["MODE"] == "hadamard" else (0, _DIFFERENCE + _CUTS + 1)


def _line_forward(launch: Launch, mask: bool) -> tuple[int, int, int, int]:
    a = launch.arguments
    values = 1 if a["second_v"] is None else 2
    exponentials, vector = _line_mask_work(a, mask)
    return _line_pairs(launch), a["BLOCK_D"] + values * a["BLOCK_DV"], 1 + exponentials, 3 + _SOFTMAX + vector


def _line_backward(launch: Launch, mask: bool) -> tuple[int, int, int, int]:
    a = launch.arguments
    exponentials, vector = _line_mask_work(a, mask)
    products, vector = a["BLOCK_D"], vector + 2 + _SOFTMAX_AGAIN  # scale and rounding
    if a["grad_a"] is not None:
        products += a["BLOCK_D"] + a["BLOCK_DV"] * (1 if a["second_other_b"] is None else 2)
        vector += 3 + _CUTS + (2 if mask else 0)
    products += a["BLOCK_DV"] * sum(a[name] is not None for name in ("grad_b", "second_grad_b"))
    return _line_pairs(launch), products, 1 + exponentials, vector


def _pass_states(launch: Launch, mask: bool) -> tuple[int, int, int, int]:
    a = launch.arguments
    sources = a["rows"] * triton.cdiv(a["W"], a["BLOCK_N"]) * a["BLOCK_N"] if a["MIXED"] else a["ROWS"]
    return launch.grid[0] * sources, a["BLOCK_D"] * a["BLOCK_DV"], 1, a["BLOCK_DV"]


def _read_near(launch: Launch, mask: bool) -> tuple[int, int, int, int]:
    a = launch.arguments
    return launch.grid[0] * a["COLS"] * a["W"], a["BLOCK_D"] * a["BLOCK_DV"], 1, 2 * a["BLOCK_DV"]


def _read_far(launch: Launch, mask: bool) -> tuple[int, int, int, int]:
    a = launch.arguments
    return launch.grid[0] * a["ROWS"], a["BLOCK_D"] * a["BLOCK_DV"], 1, 2 * a["BLOCK_DV"]


_ARITHMETIC: dict[str, Callable[[Launch, bool], tuple[int, int, int, int]]] = {
    "attention_forward": _forward,
    "attention_backward": _backward,
    "line_forward": _line_forward,
    "line_backward": _line_backward,
    "pass_states": _pass_states,
    "read_near": _read_near,
    "read_far": _read_far,
}
