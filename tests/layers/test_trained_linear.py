"""Blocks in training: the last layer of a branch adds it to its input, unless somebody follows the calls between."""

import copy

import pytest
import torch
from torch import nn

from ppma.layers import PolylineBlock, attention
from ppma.layers import convolution as layers
from ppma.layers.convolution import apply_linear, trains
from ppma.ops.backends import excluding
from ppma.ops.projection import project

pytestmark = pytest.mark.native


def block(drop_path=0.3, **options):
    torch.manual_seed(0)
    return PolylineBlock(32, 4, drop_path=drop_path, **options).train()


def step(model, x):
    """Output, and the gradients of x and the parameters, from the same random numbers in every call."""
    x = x.clone().requires_grad_()
    torch.manual_seed(1)
    out = model(x)
    out.square().mean().backward()
    return [out.detach(), x.grad, *(parameter.grad for parameter in model.parameters())], torch.get_rng_state()


@pytest.mark.parametrize("size", [(16, 20), (3, 4)], ids=["packed products", "few rows"])
@pytest.mark.parametrize("kind", ["full", "criss_cross"])
def test_block_as_composed(kind, size):
    """The same images are dropped, and the generator is left in the same state."""
    model, x = block(kind=kind), torch.randn(8, *size, 32)
    assert model.attn.trains(x)
    assert model.ffn.trains(x)
    composed = copy.deepcopy(model).double()
    results, state = step(model, x)
    torch.manual_seed(1)
    expected, state_composed = step(composed, x.double())
    assert torch.equal(state, state_composed)
    for ours, theirs in zip(results, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-4 * theirs.abs().max().item())


def test_dropped_images_pass():
    model, x = block(drop_path=1.0 - 1e-9), torch.randn(4, 17, 16, 32)
    torch.testing.assert_close(model(x), x + model.position(x))


@pytest.mark.parametrize(
    "name", ["attn", "attn.proj", "ffn", "ffn.reduce", "drop_path", "attn_scale", "attn.qkv", "ffn.expand"]
)
def test_hooks_see_every_call(name):
    """A module with a hook is called, and sees its own output."""
    model, x, seen = block(), torch.randn(4, 17, 16, 32), []
    expected, _ = step(copy.deepcopy(model), x)
    model.get_submodule(name).register_forward_hook(lambda module, inputs, output: seen.append(output.detach()))
    results, _ = step(model, x)
    assert len(seen) == (2 if name == "drop_path" else 1)
    assert all(output.shape[:1] == x.shape[:1] and not torch.equal(output, results[0]) for output in seen)
    for ours, theirs in zip(results, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * theirs.abs().max().item())


def test_projection_is_one_operator(monkeypatch):
    """Unless somebody follows the calls of the decay head or of the projection."""
    calls, model, x = [], block(), torch.randn(4, 17, 16, 32)
    monkeypatch.setattr(
        attention, "project", lambda *arguments, **options: calls.append(arguments) or project(*arguments, **options)
    )
    expected, _ = step(copy.deepcopy(model), x)
    assert len(calls) == 1
    for name in ("decay", "qkv"):
        hooked = copy.deepcopy(model)
        hooked.attn.get_submodule(name).register_forward_hook(lambda *_: None)
        results, _ = step(hooked, x)
        for ours, theirs in zip(results, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * theirs.abs().max().item())
    assert len(calls) == 1


@pytest.mark.parametrize("mask", ["none", "rmt", "shared", "2d"])
@pytest.mark.parametrize("formulation", ["paper", "release"])
def test_projection_as_composed(mask, formulation):
    """Without log-decays, with one and with two, and with padding."""
    model, x = block(0.0, mask=mask, formulation=formulation), torch.randn(4, 17, 16, 32)
    valid = torch.arange(16).expand(4, 17, 16) < torch.tensor([16, 9, 1, 12])[:, None, None]
    for padding in (None, valid):
        found = []
        for dtype in (torch.float32, torch.float64):
            leaves = x.to(dtype).clone().requires_grad_()
            here = copy.deepcopy(model).to(dtype)
            out = here(leaves, valid=padding)
            (out if padding is None else out[padding]).square().mean().backward()
            found.append([leaves.grad, *(parameter.grad for parameter in here.parameters())])
        for ours, theirs in zip(*found, strict=True):
            torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-4 * theirs.abs().max().item())


def test_layer_scale_is_applied():
    model, x = block(drop_path=0.0, layer_scale=0.5), torch.randn(2, 24, 24, 32)
    y = x + model.position(x)
    y = y + 0.5 * model.attn(model.attn_norm(y))
    y = y + 0.5 * model.ffn(model.ffn_norm(y))
    torch.testing.assert_close(model(x), y, rtol=1e-4, atol=1e-4)


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def test_trains_only_where_nobody_follows():
    layer, x = nn.Linear(8, 8), torch.randn(2, 5, 8)
    assert trains(layer, x)
    assert not trains(Doubled(8, 8), x)
    assert not trains(layer, x.double())
    assert not trains(layer, x, "torch")
    with torch.no_grad():
        assert not trains(layer, x)
    with excluding("native"):
        assert not trains(layer, x)
    with torch.autocast("cpu", torch.bfloat16):
        assert not trains(layer, x)
    with torch.profiler.profile():
        assert not trains(layer, x)
    everywhere = nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert not trains(layer, x)
    everywhere.remove()
    assert trains(layer, x)
    layer.register_full_backward_hook(lambda *_: None)
    assert not trains(layer, x)


def test_apply_linear_uses_the_operator(monkeypatch):
    calls, layer = [], nn.Linear(8, 4)
    monkeypatch.setattr(layers, "trained_linear", lambda *arguments, **options: calls.append(arguments))
    apply_linear(layer, torch.randn(2, 5, 8))
    assert len(calls) == 1
