"""Folding changes nothing but the speed."""

import pytest
import timm
import torch
from torch import nn

import ppma
from ppma.layers import fused
from ppma.ops import fused_conv, fused_linear
from ppma.ops.backends import native


def randomized(name, **options):
    """A model whose norms and scales are far from their initial values, so that a wrong fold shows."""
    torch.manual_seed(0)
    model = timm.create_model(name, **options)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.3)
            module.running_mean.normal_(std=0.3)
            module.running_var.uniform_(0.5, 2)
        if isinstance(module, timm.layers.LayerScale):
            nn.init.uniform_(module.gamma, 0.5, 1.5)
    return model.eval()


@pytest.mark.parametrize("name", ["ppma_nano", "ppma_tiny", "ppma_base", "rmt_tiny"])
def test_optimize_outputs(name):
    model = randomized(name)
    fast = ppma.optimize_for_inference(model)
    images = torch.randn(2, 3, 64, 96)
    with torch.no_grad():
        expected = model(images)
        torch.testing.assert_close(fast(images), expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())
    assert not any(isinstance(m, nn.BatchNorm2d | timm.layers.LayerScale) for m in fast.modules())
    assert not any(p.requires_grad for p in fast.parameters())


def test_optimize_leaves_model():
    model = randomized("ppma_nano").train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    ppma.optimize_for_inference(model)
    assert model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(p.requires_grad for p in model.parameters())


def test_optimize_wrapped_models():
    model = randomized("ppma_nano", features_only=True)
    wrapped = nn.ModuleDict({"backbone": model})
    images = torch.randn(1, 3, 64, 64)
    fast = ppma.optimize_for_inference(wrapped)["backbone"]
    with torch.no_grad():
        for a, b in zip(model(images), fast(images), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * b.abs().max().item())


@pytest.mark.native
def test_native_backend_measures_nothing(monkeypatch):
    """The same bits in every process: no implementation depends on a measurement."""
    for module in (fused, fused_conv, fused_linear):
        monkeypatch.setattr(module, "fastest", lambda candidates: pytest.fail("measured"))
        monkeypatch.setattr(module, "_choices", {})
    model = randomized("ppma_nano")
    fast, images = ppma.optimize_for_inference(model), torch.randn(2, 3, 32, 32)
    fast.set_backend("native")
    with torch.no_grad():
        torch.testing.assert_close(fast(images), model(images), rtol=1e-5, atol=1e-5)


@pytest.mark.native
def test_stage_runs_blocks_together(monkeypatch):
    """One call for a stage, and none where tokens are padding."""
    calls = []
    kernel = native.fused_blocks
    monkeypatch.setattr(native, "fused_blocks", lambda x, blocks: calls.append(len(blocks)) or kernel(x, blocks))
    model = randomized("ppma_nano")
    fast, images = ppma.optimize_for_inference(model), torch.randn(1, 3, 32, 32)
    fast.set_backend("native")
    with torch.no_grad():
        fast(images)
        assert calls == [len(stage.blocks) for stage in model.stages]
        fast.forward_features(images, valid=torch.ones(1, 32, 32, dtype=torch.bool))
    assert len(calls) == len(model.stages)
