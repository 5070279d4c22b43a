"""Every kernel compiled ahead of time for GPUs that need not be there: what it takes, and what it does for a token."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from ppma.bench.gpu.assembly import LoopCost, has_scores, loop_cost
from ppma.bench.gpu.targets import Resources, compile_for, resources
from ppma.ops.backends.contract import Five
from ppma.ops.backends.triton.attention import polyline_attention, polyline_attention_backward
from ppma.ops.backends.triton.criss_cross import criss_cross_attention, criss_cross_attention_backward
from ppma.ops.backends.triton.decay_head import decay_head
from ppma.ops.backends.triton.depthwise import depthwise_conv
from ppma.ops.backends.triton.launch import Launch, recording
from ppma.ops.backends.triton.linear import BAND_ROWS, linear_attention, linear_attention_backward
from ppma.ops.backends.triton.rotary import rotary_split
from ppma.ops.backends.triton.scan import LONGEST_CHUNK, polyline_scan, polyline_scan_backward
from ppma.ops.options import COMBINES, AttentionOptions, Combine


def attention_inputs(batch: int, heads: int, height: int, width: int, d: int, dtype: torch.dtype) -> Five:
    """q, k, v as views of a packed projection, and two log-decays, without memory."""
    packed = torch.empty((batch, height, width, 3, heads, d), dtype=dtype, device="meta")
    q, k, v = packed.movedim(3, 0).movedim(-2, 2).unbind(0)
    decays = torch.empty((2, batch, heads, height, width), dtype=torch.float32, device="meta")
    return q, k, v, decays[0], decays[1]


def record_scan(tensors: Five, combine: Combine, backward: bool) -> None:
    """Both paths of a scan of v."""
    _, _, x, log_alpha, log_beta = tensors
    if backward:
        polyline_scan_backward(x, x, [log_beta, log_alpha], "both")
    else:
        polyline_scan(x, [log_beta, log_alpha], "both")


def record_attention(tensors: Five, combine: Combine, backward: bool, save: bool = True) -> None:
    """Full attention, both paths; `save` keeps what a backward pass will need."""
    options = AttentionOptions(combine, "2d", 1.0, save)
    with recording():  # the backward needs the shapes of the results only
        out, stats, first = polyline_attention(*tensors, options)
    if backward:
        polyline_attention_backward(out, *tensors, out, stats, first, options)
    else:
        polyline_attention(*tensors, options)


def record_criss_cross(tensors: Five, combine: Combine, backward: bool, save: bool = True) -> None:
    """Criss-cross attention, both paths. It keeps nothing for a backward pass in any case."""
    if backward:
        criss_cross_attention_backward(tensors[2], *tensors, AttentionOptions(combine, "2d", 1.0))
    else:
        criss_cross_attention(*tensors, AttentionOptions(combine, "2d", 1.0))


def record_linear(tensors: Five, combine: Combine, backward: bool) -> None:
    """Linear attention, both paths."""
    if backward:
        linear_attention_backward(tensors[2], *tensors, "2d")
    else:
        linear_attention(*tensors, "2d")


def record_rotary(tensors: Five, combine: Combine, backward: bool) -> None:
    """Rotary embeddings of a packed projection as wide as the heads."""
    batch, heads, height, width, d = tensors[2].shape
    packed = tensors[2].new_empty((batch, height * width, 3 * heads * d)).requires_grad_(backward)
    angles = packed.new_empty((height * width, d // 2), dtype=torch.float32)
    _forward_or_backward(lambda: rotary_split(packed, heads, angles, angles, overwrite=False), backward)


def record_depthwise(tensors: Five, combine: Combine, backward: bool) -> None:
    """The convolutions of a block: 3 x 3 of its input and of the feed-forward, 5 x 5 of the values."""
    batch, heads, height, width, d = tensors[2].shape
    x = tensors[2].new_empty((batch, height, width, heads * d)).requires_grad_(backward)
    bias = x.new_empty(heads * d, dtype=torch.float32)
    for size, residual, gelu in ((3, None, False), (3, None, True), (5, x, False)):
        weight = bias.new_empty((heads * d, 1, size, size)).requires_grad_(backward)
        _forward_or_backward(lambda: (depthwise_conv(x, weight, bias, residual, gelu),), backward)  # noqa: B023


def record_decay_head(tensors: Five, combine: Combine, backward: bool) -> None:
    """The decay head of the paper or, for "logit", of the authors' release."""
    batch, heads, height, width, d = tensors[2].shape
    x = tensors[2].new_empty((batch, height * width, heads * d)).requires_grad_(backward)
    weight, bias = (x.new_empty(shape, dtype=torch.float32) for shape in ((2, d), (heads, 2)))
    softplus = combine == "logit"
    _forward_or_backward(lambda: decay_head(x, weight, bias, bias if softplus else None, softplus), backward)


def _forward_or_backward(function: Callable[[], tuple[torch.Tensor, ...]], backward: bool) -> None:
    if not backward:
        function()
        return
    with recording():
        results = function()
    torch.autograd.backward(results, [torch.empty_like(result) for result in results])


Recorder = Callable[[Five, Combine, bool], None]


@dataclass(frozen=True)
class Case:
    """Launches worth looking at: an operator on a grid.

    Attributes:
        operator: its name.
        record: launches it.
        height: of the grid.
        width: of the grid.
        combines: how masks are combined with scores.
    """

    operator: str
    record: Recorder
    height: int
    width: int
    combines: tuple[Combine, ...]

    def launches(self, d: int, dtype: torch.dtype) -> Iterator[tuple[str, Launch]]:
        """The launches of forward and backward, each with a name."""
        for combine in self.combines:
            tensors = attention_inputs(8, 4, self.height, self.width, d, dtype)
            for backward in (False, True):
                with recording() as launches:
                    self.record(tensors, combine, backward)
                for launch in launches:
                    yield _name(launch), launch


# Tiles of 16 and of 8 columns, tables and potentials; lines of one chunk and of several; one band and several.
CASES = (
    Case("polyline_scan", record_scan, 14, LONGEST_CHUNK + 16, ("hadamard",)),
    Case("criss_cross_attention", record_criss_cross, 14, 56, COMBINES),
    Case("polyline_attention", record_attention, 14, 14, COMBINES),
    Case("polyline_attention", record_attention, 7, 7, COMBINES),
    Case("polyline_attention", record_attention, 56, 72, COMBINES),
    Case("linear_attention", record_linear, BAND_ROWS + 32, 56, ("hadamard",)),
    Case("rotary_split", record_rotary, 14, 14, ("hadamard",)),
    Case("decay_head", record_decay_head, 14, 14, COMBINES),
    Case("depthwise_conv", record_depthwise, 14, 14, ("hadamard",)),
)


def _name(launch: Launch) -> str:
    """The kernel, with what distinguishes its variants."""
    a = launch.arguments
    words = [launch.kernel.__name__]
    if a.get("MODE"):
        words.append(a["MODE"])
    if "KEY_SIDE" in a:
        words.append("keys" if a["KEY_SIDE"] else "queries")
    if launch.kernel.__name__.startswith("line_") and "BLOCK_M" in a:
        words.append(f"{a['BLOCK_M']} tokens")
        words += ["two values"] if a.get("second_v") or a.get("second_other_b") else []
        words += ["transposed only"] if "grad_a" in a and a["grad_a"] is None else []
    elif "COLS" in a and "ROWS" in a:
        words.append(f"{a['ROWS']}x{a['COLS']}")
        words += ["tables"] if a.get("TABLES") else []
    if "K" in a:
        words += [f"{a['K']}x{a['K']}", *(["GELU"] if a["GELU"] else [])]
    words += ["softplus"] if a.get("SOFTPLUS") else []
    if "BACK" in a:
        words.append("backward" if a["BACK"] else "forward")
    if "CHUNK" in a:
        words.append(f"chunks of {a['CHUNK']}")
    if "MIXED" in a:
        words.append("far" if a["MIXED"] else "near")
    return ", ".join(words)


@dataclass(frozen=True)
class Row:
    """A kernel.

    Attributes:
        operator: that launches it.
        kernel: with what distinguishes its variants.
        resources: on each target.
        costs: of a score on each target; None for kernels without scores, and without matrix units.
    """

    operator: str
    kernel: str
    resources: dict[str, Resources]
    costs: dict[str, LoopCost | None]


def rows(
    targets: Iterable[str], d: int = 32, dtype: torch.dtype = torch.float16, operators: Iterable[str] | None = None
) -> Iterator[Row]:
    """Compile every kernel for every target.

    Args:
        targets: names of `targets.TARGETS`.
        d: channels of a head.
        dtype: of the values.
        operators: those of CASES to compile; None for all.
    """
    targets = list(targets)
    seen: set[tuple[str, str]] = set()
    for case in CASES:
        if operators is not None and case.operator not in operators:
            continue
        for name, launch in case.launches(d, dtype):
            if (case.operator, name) in seen:
                continue
            seen.add((case.operator, name))
            compiled = {target: compile_for(launch, target) for target in targets}
            costs = {target: loop_cost(one, launch) if has_scores(launch) else None for target, one in compiled.items()}
            yield Row(case.operator, name, {target: resources(one) for target, one in compiled.items()}, costs)
