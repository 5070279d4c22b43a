"""Machine code of compiled kernels: how many instructions the innermost loop spends on a score.

The inner loop is the one with the most matrix products; each turn computes a tile of scores.
Instructions are those of a thread: a warp of 32 that takes 320 instructions for 512 scores takes 20 for a score.
"""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from ppma.bench.gpu.targets import cuobjdump
from ppma.ops.backends.triton.launch import Launch


class LoopCost(NamedTuple):
    """What the inner loop spends on one score, padding included.

    Attributes:
        instructions: of any kind, those that load, store and branch among them.
        special: of these, exponentials and other special functions, which have fewer units.
    """

    instructions: float
    special: float


def matrix_products(launch: Launch) -> int:
    """Multiply-adds of matrix products for one score."""
    a = launch.arguments
    d, dv = a["BLOCK_D"], a["BLOCK_DV"]
    name = launch.kernel.__name__
    if name == "attention_forward":
        return d + dv * (2 if a["MODE"] == "logit" and a["V2H"] and a["H2V"] else 1)
    if name == "attention_backward":
        return 2 * d + dv * (2 if a["KEY_SIDE"] else 1)
    if name == "line_forward":
        return d + dv * (1 if a["second_v"] is None else 2)
    assert name == "line_backward", name
    products = d + dv * sum(a[grad] is not None for grad in ("grad_b", "second_grad_b"))
    return products + (d + dv * (1 if a["second_other_b"] is None else 2) if a["grad_a"] is not None else 0)


def _tile_scores(launch: Launch) -> int:
    a = launch.arguments
    if "BLOCK_M" in a:
        return a["BLOCK_M"] * a["BLOCK_N"]
    return a["ROWS"] * a["COLS"] * a["OTHER_ROWS"] * a["OTHER_COLS"]


def has_scores(launch: Launch) -> bool:
    """Whether a kernel computes tiles of scores."""
    return launch.kernel.__name__ in ("attention_forward", "attention_backward", "line_forward", "line_backward")


def loop_cost(compiled: Any, launch: Launch) -> LoopCost | None:
    """The cost of a score; None where products do not run on matrix units (float32), which mark the loop.

    Args:
        compiled: what `targets.compile_for` returned.
        launch: what it compiled.
    """
    if "cubin" in compiled.asm:
        instructions, loops, lanes = *_sass(compiled.asm["cubin"]), 32
    else:
        instructions, loops, lanes = *_amdgcn(compiled.asm["amdgcn"]), 64
    bodies = [instructions[first : last + 1] for first, last in _innermost(loops)]
    marked = [(sum(map(_multiply_adds, body)), body) for body in bodies]
    products, body = max(marked, key=lambda pair: pair[0], default=(0, []))
    if products == 0:
        return None
    scores = _tile_scores(launch) / compiled.metadata.num_warps  # loops with barriers are not unrolled
    body = [name for name in body if name not in ("NOP", "s_nop")]
    special = sum(name.startswith(("MUFU", "v_exp_", "v_log_", "v_rcp_")) for name in body)
    return LoopCost(len(body) * lanes / scores, special * lanes / scores)


def _multiply_adds(name: str) -> int:
    """Multiply-adds of a matrix instruction for a warp: from its shape, which is part of its name."""
    if found := re.match(r"HMMA\.(16)(8)(8|16|32)\b", name):
        m, n, k = map(int, found.groups())
        return m * n * k
    if found := re.match(r"HGMMA\.(\d+)x(\d+)x(\d+)", name):  # of four warps together
        m, n, k = map(int, found.groups())
        return m * n * k // 4
    if found := re.match(r"v_mfma_f32_(\d+)x(\d+)x(\d+)", name):
        m, n, k = map(int, found.groups())
        return m * n * k
    return 0


def _innermost(loops: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    def within(inner: tuple[int, int], outer: tuple[int, int]) -> bool:
        return inner != outer and outer[0] <= inner[0] and inner[1] <= outer[1]

    return [loop for loop in loops if not any(within(other, loop) for other in loops)]


def _sass(cubin: bytes) -> tuple[list[str], list[tuple[int, int]]]:
    """Names of all instructions, and the loops: first and last instruction of each."""
    text = cuobjdump(cubin, "-sass")
    names: list[str] = []
    loops = []
    places: dict[int, int] = {}
    for address, code in re.findall(r"/\*([0-9a-f]{4,})\*/\s+([^;]*);", text):
        words = re.sub(r"^@!?U?P\w+\s+", "", code.strip()).split()
        places[int(address, 16)] = len(names)
        target = re.search(r"0x[0-9a-f]+", code) if words[0].startswith("BRA") else None
        if target and int(target.group(), 16) in places:
            loops.append((places[int(target.group(), 16)], len(names)))
        names.append(words[0])
    return names, [loop for loop in loops if loop[0] < loop[1]]


def _amdgcn(text: str) -> tuple[list[str], list[tuple[int, int]]]:
    names: list[str] = []
    loops = []
    places: dict[str, int] = {}
    for line in text.splitlines():
        if label := re.match(r"(\.LBB\w+):", line):
            places[label.group(1)] = len(names)
        elif code := re.match(r"\s+([vs]_\w+|ds_\w+|global_\w+|buffer_\w+)\s*(.*)", line):
            name, operands = code.groups()
            if name.startswith(("s_cbranch", "s_branch")) and operands.split()[0] in places:
                loops.append((places[operands.split()[0]], len(names)))
            names.append(name)
    return names, loops
