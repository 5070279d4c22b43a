"""Random calls of every operator against the dense form in float64: outputs and all gradients.

A case is one number: `Case(number)` draws operator, backend, dtypes, grid, batch axes that broadcast, memory layouts,
decays and magnitudes from it, and a failure prints it. `PPMA_FUZZ_SEED` starts the numbers elsewhere.
"""

import functools
import os
import random
import time

import pytest
import torch

import ppma
from ppma.ops import dense
from ppma.ops.options import ND_PATHS, AttentionOptions
from ppma.testing import error_budget, outputs_and_gradients

QUICK, SLOW, BLOCK = 300, 20_000, 50
EXTENTS = (1, 1, 2, 3, 4, 5, 7, 8, 9, 14, 16, 17)
CHANNELS = (1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 32, 33)
BATCHES = ((), (1,), (2,), (3, 2), (2, 1, 2), (1, 1), (0,), (0, 2), (2, 0))
DTYPES = (torch.float32, torch.float32, torch.float32, torch.float64, torch.float16, torch.bfloat16)
# Of logits: ordinary, beyond what one exponential can hold, beyond what float32 can tell apart.
LOGITS = (0.0, 1.0, 1.0, 1.0, 8.0, 140.0, 1e3, 1e4, 1e6, 1e8)
DECAYS = {
    "mixed": lambda u, kind: torch.where(kind < 0.2, -torch.inf, torch.where(kind < 0.4, 0.0, -2 * u)),
    "ordinary": lambda u, kind: -u,
    "one": lambda u, kind: 0 * u,
    "zero": lambda u, kind: 0 * u - torch.inf,
    "near one": lambda u, kind: -1e-6 * u,
    "strong": lambda u, kind: -120 * u,
    "beyond": lambda u, kind: torch.where(kind < 0.5, -1e30 * u, -u),
}
SOFTMAX = ("full", "criss_cross")


class Case:
    """One random call."""

    def __init__(self, number: int) -> None:
        self.number = number
        draw = self.draw = random.Random(number)
        self.generator = torch.Generator().manual_seed(number)
        self.operator = draw.choice(("full", "full", "criss_cross", "criss_cross", "linear", "scan", "scan_nd"))
        self.dtype = draw.choice(DTYPES)
        self.backend = draw.choice(
            ("torch", "native", "native", "auto") if self.dtype == torch.float32 else ("torch", "auto")
        )
        self.decay_dtype = (
            torch.float64 if self.dtype == torch.float64 else draw.choice((torch.float32,) * 3 + (torch.float64,))
        )
        axes = draw.choice((1, 2, 3)) if self.operator == "scan_nd" else 2
        self.grid = tuple(draw.choice(EXTENTS[:6] if axes == 3 else EXTENTS) for _ in range(axes))
        self.batch = draw.choice(BATCHES)
        self.d, self.dv = draw.choice(CHANNELS), draw.choice(CHANNELS)
        self.decays = draw.choice(tuple(DECAYS))
        self.logits = draw.choice(LOGITS) if self.operator in SOFTMAX else 1.0
        if self.dtype == torch.float16:
            self.logits = min(self.logits, 1e3)
        self.combine = draw.choice(("hadamard", "logit"))
        self.paths = draw.choice(("v2h", "h2v", "2d"))
        self.scale = draw.choice((None, 1.0, 0.3))
        self.layouts: list[str] = []
        self.leaves, self.views = zip(*self._tensors(), strict=True)
        self.last = draw.choice(("plain", "sum", "transposed"))

    def __str__(self) -> str:
        return f"Case({self.number}): " + ", ".join(
            f"{name}={value}" for name, value in vars(self).items() if name in
            ("operator", "dtype", "backend", "decay_dtype", "grid", "batch", "d", "dv", "decays", "logits", "combine",
             "paths", "scale", "layouts", "last")
        )  # fmt: skip

    def _tensors(self):
        magnitude = (self.logits / self.d**0.5) ** 0.5  # of q and k, so that q k^T is about `logits`
        if self.scale is None:
            magnitude *= self.d**0.25
        channels = {"q": self.d, "k": self.d, "v": self.dv}
        for name in () if self.operator.startswith("scan") else ("q", "k"):
            yield self._leaf(magnitude * self._normal(self._part_of_batch(), channels[name]), self.dtype)
        yield self._leaf(self._normal(self._part_of_batch(), self.dv), self.dtype)
        for _ in self.grid:
            shape = (*self._part_of_batch(), *self.grid)
            uniform, kind = (torch.rand(shape, generator=self.generator, dtype=torch.float64) for _ in range(2))
            yield self._leaf(DECAYS[self.decays](uniform, kind), self.decay_dtype)

    def _normal(self, batch, channels):
        return torch.randn(*batch, *self.grid, channels, generator=self.generator, dtype=torch.float64)

    def _part_of_batch(self):
        """Batch axes that broadcast to those of the case."""
        kept = self.batch[self.draw.randrange(len(self.batch) + 1) if self.draw.random() < 0.3 else 0 :]
        return tuple(1 if self.draw.random() < 0.2 else extent for extent in kept)

    def _leaf(self, values, dtype):
        """A leaf, and how the call views it: the same values with another layout in memory."""
        values = values.to(dtype)
        layout = self.draw.choice(("plain", "plain", "permuted", "sliced", "expanded"))
        self.layouts.append(layout)
        order = list(range(values.ndim))
        self.draw.shuffle(order)
        back = [order.index(axis) for axis in range(values.ndim)]
        if layout == "permuted":
            return values.permute(order).contiguous(), lambda leaf: leaf.permute(back)
        if layout == "sliced":
            wide = torch.cat((values, values), -1)
            return wide, lambda leaf: leaf[..., : leaf.shape[-1] // 2]
        if layout == "expanded" and values.ndim > len(self.grid) + 1:
            return values[:1], lambda leaf, extent=values.shape[0]: leaf.expand(extent, *leaf.shape[1:])
        return values, lambda leaf: leaf

    def _call(self, leaves, function):
        out = function(*(view(leaf) for view, leaf in zip(self.views, leaves, strict=True)))
        # What comes back as the gradient of the output is then expanded, or lies in another order.
        return {"plain": lambda t: t, "sum": lambda t: t.sum(-1), "transposed": lambda t: t.mT}[self.last](out)

    def fast(self, *leaves):
        options = {"paths": self.paths, "backend": self.backend}
        if self.operator in SOFTMAX:
            options |= {"combine": self.combine, "scale": self.scale}
        if self.operator == "scan_nd":
            options["paths"] = ND_PATHS[self.paths]
            return self._call(leaves, lambda x, *decays: ppma.polyline_scan_nd(x, decays, **options))
        functions = {
            "full": ppma.polyline_attention,
            "criss_cross": ppma.criss_cross_attention,
            "linear": ppma.linear_attention,
            "scan": ppma.polyline_scan,
        }
        return self._call(leaves, functools.partial(functions[self.operator], **options))

    def exact(self, *leaves):
        def function(*tensors):
            axes = len(self.grid)
            batches = [
                t.shape[: t.ndim - axes - (position < len(tensors) - axes)] for position, t in enumerate(tensors)
            ]
            batch = torch.broadcast_shapes(*batches)
            canonical = [
                t.expand(*batch, *t.shape[len(own) :]).reshape(1, -1, *t.shape[len(own) :])
                for t, own in zip(tensors, batches, strict=True)
            ]
            out = self._dense(*canonical)
            return out.reshape(*batch, *out.shape[2:])

        return self._call(leaves, function)

    def _dense(self, *tensors):
        if self.operator == "scan_nd":
            return dense.polyline_scan(tensors[0], tensors[1:], ND_PATHS[self.paths])
        if self.operator == "scan":
            x, log_alpha, log_beta = tensors
            return dense.polyline_scan(x, [log_beta, log_alpha], ND_PATHS[self.paths])
        if self.operator == "linear":
            return dense.linear_attention(*tensors, self.paths)
        scale = self.d**-0.5 if self.scale is None else self.scale
        if self.operator == "criss_cross":
            return dense.criss_cross_attention(*tensors, AttentionOptions(self.combine, self.paths, scale))
        return dense.polyline_attention(*tensors, AttentionOptions(self.combine, self.paths, scale))[0]

    def roundings(self):
        """One for each term that a result sums: channels, tokens, edges of two paths; a gradient sums batches too."""
        tokens = 1
        for extent in self.grid:
            tokens *= extent
        batch = 1
        for extent in self.batch:
            batch *= max(extent, 1)
        return 16 + self.d + self.dv + tokens * batch + 2 * sum(self.grid)

    def saturation(self, eps):
        """The error that `P (dP - D)` has where one weight is nearly 1 and dP - D should vanish but for rounding.

        Moving the inputs does not show it, because the exact result hardly moves. dP is a dot product of the
        output's gradient with v; the difference reaches q times k, k times q, and the decays.
        """
        if self.operator not in SOFTMAX:
            return [0.0] * (1 + len(self.leaves))
        q, k, v, *_ = (leaf.double() for leaf in self.leaves)
        paths = 2 if self.paths == "2d" else 1
        difference = eps * 4 * paths * self.dv * 4 * v.abs().max().item()  # the cotangent is normal: at most about 4
        tokens = self.grid[0] * self.grid[1]
        scale = self.d**-0.5 if self.scale is None else self.scale
        return [
            0.0,
            difference * scale * k.abs().max().item(),
            difference * scale * q.abs().max().item(),
            0.0,
            difference * tokens**0.5,
            difference * tokens**0.5,
        ]

    def check(self):
        if any(view(leaf).numel() == 0 for view, leaf in zip(self.views, self.leaves, strict=True)):
            self._check_empty()
            return
        working = torch.finfo(torch.float64 if self.dtype == torch.float64 else torch.float32)
        roundings = self.roundings() * (2 if self.dtype == torch.float64 else 1)  # the oracle rounds as often
        budgets = error_budget(self.exact, self.leaves, self.dtype, roundings)
        # Numbers below the normal range count as 0, in the computation and in the result.
        largest = max(1.0, *(leaf[leaf > -torch.inf].abs().max().item() for leaf in self.leaves[: -len(self.grid)]))
        lost = roundings * working.tiny * largest**2 + torch.finfo(self.dtype).tiny * torch.finfo(self.dtype).eps
        allowed = [b + roundings * s + lost for b, s in zip(budgets, self.saturation(working.eps), strict=True)]
        expected = outputs_and_gradients(self.exact, [leaf.double() for leaf in self.leaves])
        actual = outputs_and_gradients(self.fast, self.leaves)
        for position, (a, e, budget) in enumerate(zip(actual, expected, allowed, strict=True)):
            name = "output" if position == 0 else f"gradient {position - 1}"
            assert a.shape == e.shape, f"{name} of {self}: shape {tuple(a.shape)}, expected {tuple(e.shape)}"
            fits = e.abs() < torch.finfo(a.dtype).max
            assert torch.isfinite(a[fits]).all(), f"{name} of {self}: not finite"
            error = (a.double() - e)[fits].abs().max().item() if fits.any() else 0.0
            assert error <= budget, f"{name} of {self}: off by {error:.3e}, budget {budget:.3e}"

    def _check_empty(self):
        out, *gradients = outputs_and_gradients(self.fast, self.leaves)
        assert out.numel() == 0, f"{self}: {tuple(out.shape)} is not empty"
        for leaf, gradient in zip(self.leaves, gradients, strict=True):
            assert gradient.shape == leaf.shape, f"{self}: gradient {tuple(gradient.shape)} of {tuple(leaf.shape)}"
            assert (gradient == 0).all(), f"{self}: a gradient of nothing is not 0"


def run(first, count):
    for number in range(first, first + count):
        Case(number).check()


@pytest.mark.parametrize("block", range(QUICK // BLOCK))
def test_random_calls(block):
    run(int(os.environ.get("PPMA_FUZZ_SEED", 0)) + block * BLOCK, BLOCK)


@pytest.mark.slow
def test_many_random_calls():
    first = int(os.environ.get("PPMA_FUZZ_SEED", time.time_ns() // 1000 % 10**9))
    print(f"PPMA_FUZZ_SEED={first}")
    run(first, SLOW)
