"""The implementation of a fused linear layer, chosen by measurement."""

import itertools

import pytest
import torch

from ppma.ops import choice
from ppma.ops import fused_linear as module
from ppma.ops.choice import fastest
from ppma.ops.fused_linear import PACKED, fused_linear, products

pytestmark = pytest.mark.native


@pytest.fixture
def no_choices(monkeypatch):
    monkeypatch.setattr(module, "_choices", {})


def inputs(rows=48):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in ((rows, 32), (64, 32), (64,), (rows, 64))]


@pytest.mark.parametrize("name", [PACKED, *products()])
def test_choice_accuracy(name, no_choices, monkeypatch):
    monkeypatch.setattr(module, "fastest", lambda candidates: name)
    x, weight, bias, residual = inputs()
    angles = torch.rand(12, 8)
    with torch.no_grad():
        options = {"norm_eps": 1e-6, "rotary": (angles.cos(), angles.sin()), "rotated": 32}
        result = fused_linear(x, weight, bias, residual, **options)  # not native: it takes no residual to rotate
        doubled = [tensor.double() for tensor in (x, weight, bias, residual)]
        exact = fused_linear(*doubled, **options, backend="torch")
    # A norm and a product of 32 terms each, some operations around them, of values below 32.
    assert (result.double() - exact).abs().max() < 2.0**-24 * (2 * 32 + 16) * 32
    assert list(module.choices().values()) == [name]


def test_choice_kept_by_shape(no_choices, monkeypatch):
    asked = []
    monkeypatch.setattr(module, "fastest", lambda candidates: asked.append(list(candidates)) or "torch")
    with torch.no_grad():
        for rows in (48, 33, 63, 64):  # three round down to 32
            fused_linear(*inputs(rows))
        fused_linear(*inputs(48), backend="native")
    assert asked == [[PACKED, *products()]] * 2
    assert {shape.rows for shape in module.choices()} == {32, 64}


def test_no_choice_with_gradients(no_choices):
    x, weight, bias, residual = inputs()
    fused_linear(x.requires_grad_(), weight, bias, residual).sum().backward()
    assert x.grad is not None
    assert not module.choices()


def test_fastest(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(choice.time, "perf_counter", lambda: now[0])

    def taking(*seconds):
        """A candidate that takes this long in its calls, in turn; the first call is not measured."""
        calls = itertools.cycle(seconds)

        def run():
            now[0] += next(calls)

        return run

    assert fastest({"a": taking(2.0), "b": taking(1.0)}) == "b"
    assert fastest({"a": taking(1.02), "b": taking(1.0)}) == "a"  # within the margin
    assert fastest({"a": taking(1.02), "b": taking(1.0)}, margin=1.0) == "b"
    assert fastest({"a": taking(2.0), "b": taking(1.0), "c": taking(0.5)}) == "c"
    assert fastest({"a": taking(2.0), "b": taking(1.0, 1.0, 1.0, 2.0)}) == "a"  # not in every round
