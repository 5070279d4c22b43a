"""Warming up runs the model and leaves it as it was."""

import pytest
import timm
import torch

import ppma


@pytest.mark.parametrize("train", [False, True])
def test_warmup_leaves_model_unchanged(train):
    model = timm.create_model("ppma_tiny", depths=(1, 1, 1, 1)).train(train)
    first = next(model.parameters())
    first.grad = torch.ones_like(first)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    sizes = []
    model.register_forward_hook(lambda module, args, out: sizes.append(tuple(args[0].shape)))
    ppma.warmup(model, [(64, 64), (64, 96)])
    assert sizes == [(2, 3, 64, 64), (2, 3, 64, 96)]
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())
    assert first.grad.eq(1).all()
    assert all(value.grad is None for value in list(model.parameters())[1:])
    assert torch.get_rng_state().equal(random)
