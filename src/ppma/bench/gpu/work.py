"""What a launch has to do: bytes and matrix products from the launch itself, instructions from the compiled kernel.

Bytes are compulsory: every tensor crosses the memory bus once, as if caches were perfect. Scores are those of the
tiles, padding included; what each costs is counted in the machine code of the inner loop.
"""

from dataclasses import dataclass, replace
from typing import Any

import triton
from torch import Tensor

from ppma.bench.gpu.assembly import LoopCost, has_scores, loop_cost, matrix_products
from ppma.bench.gpu.targets import compile_for
from ppma.ops.backends.triton.launch import Launch
from ppma.ops.backends.triton.tiles import Field


@dataclass(frozen=True)
class Work:
    """The work of one launch.

    Attributes:
        bytes: moved to and from memory.
        matrix: floating-point operations of matrix products.
        instructions: of all threads.
        special: of these, special functions.
    """

    bytes: float = 0
    matrix: float = 0
    instructions: float = 0
    special: float = 0


# Launches that there would not be without a mask, and arguments that only the mask needs.
_KERNELS_OF_THE_MASK = {"line_potentials", "mask_tables", "log_decay_gradients"}
_OF_THE_MASK = (
    "alpha", "beta", "row_table", "column_table", "potential", "moved", "alpha_own", "alpha_corner", "beta_own",
    "beta_corner", "first",
)  # fmt: skip


def without_mask(launch: Launch) -> Launch | None:
    """The same launch for attention without a mask, or None where it would not be needed."""
    if launch.kernel.__name__ in _KERNELS_OF_THE_MASK:
        return None
    arguments = dict(launch.arguments)
    arguments.update((name, None) for name in _OF_THE_MASK if name in arguments)
    arguments.update((name, False) for name in ("V2H", "H2V", "NEAR", "FAR", "TABLES") if name in arguments)
    if "MODE" in arguments:
        arguments["MODE"] = "hadamard"  # one softmax, and no product with a mask that is not there
    if "CHECK" in arguments:  # no table tells which columns are padding
        arguments["CHECK"] = True
    for name, planes in (("stats", 2), ("norms", 2)):  # of one softmax
        if isinstance(arguments.get(name), Field):
            arguments[name] = arguments[name]._replace(data=arguments[name].data[:planes])
    return replace(launch, arguments=arguments)


def scores(launch: Launch) -> int:
    """Scores of all tiles of a launch."""
    a = launch.arguments
    if launch.kernel.__name__.startswith("line"):
        return launch.grid[0] * a["BLOCK_M"] * triton.cdiv(a["n"], a["BLOCK_N"]) * a["BLOCK_N"]
    rows = triton.cdiv(min(a["band"], a["H"]), a["OTHER_ROWS"]) * a["OTHER_ROWS"]
    columns = triton.cdiv(a["W"], a["OTHER_COLS"]) * a["OTHER_COLS"]
    return launch.grid[0] * a["ROWS"] * a["COLS"] * rows * columns


_costs: dict[Any, LoopCost | None] = {}


def cost_of_a_score(launch: Launch, target: str) -> LoopCost | None:
    """Compile a launch, or one like it, and count; None for kernels without scores and without matrix units."""
    if not has_scores(launch):
        return None
    arguments = launch.arguments.items()
    variant = tuple((name, value) for name, value in arguments if name.isupper() or name in ("num_warps", "num_stages"))
    absent = tuple(name for name, value in arguments if value is None)
    dtypes = tuple(value.data.dtype for _, value in arguments if isinstance(value, Field))
    key = (launch.kernel.__name__, target, variant, absent, dtypes)
    if key not in _costs:
        _costs[key] = loop_cost(compile_for(launch, target), launch)
    return _costs[key]


def work_of(launch: Launch, target: str) -> Work:
    """The work of a recorded launch on a target."""
    moved = bytes_of(launch)
    if not has_scores(launch):
        return Work(bytes=moved)
    count, cost = scores(launch), cost_of_a_score(launch, target) or LoopCost(0, 0)
    return Work(moved, 2 * count * matrix_products(launch), count * cost.instructions, count * cost.special)


def bytes_of(launch: Launch) -> int:
    """Every tensor once, or twice if it is overwritten, whichever names it has; of a band of rows its part."""
    arguments, tensors = launch.arguments, dict[Any, Tensor]()
    for name, argument in arguments.items():
        for value in argument if type(argument) is tuple else (argument,):  # a field is another kind of tuple
            if isinstance(value, Field | Tensor):
                tensor = value.data if isinstance(value, Field) else value
                place = (tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.numel())
                key = (*place, name.startswith("out_"), type(value))
                tensors[key] = tensor
    band = arguments["rows"] / arguments["beta"].data.shape[3] if "start" in arguments else 1.0
    return sum(
        int(tensor.numel() * tensor.element_size() * (band if kind is Field else 1.0))
        for (*_, kind), tensor in tensors.items()
    )
