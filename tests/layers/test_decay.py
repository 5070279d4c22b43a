import json
import math

import pytest
import torch

from ppma.layers import DECAYS, PolylineAttention, PolylineBlock, ReluDecay, SoftplusDecay, ZeroStartDecay
from ppma.models import CONFIGS, BackboneConfig, PolylineBackbone


def written_out(head, x):
    """Log-decays (B, heads, H, W, outputs), one token and head at a time."""
    B, H, W, C = x.shape
    d = C // head.heads
    out = torch.empty(B, head.heads, H, W, head.weight.shape[0], dtype=x.dtype)
    for h in range(head.heads):
        logits = x[..., h * d : (h + 1) * d] @ head.weight.T
        if isinstance(head, ReluDecay):
            out[:, h] = -(logits + head.bias[h]).clamp_min(0)
        else:
            out[:, h] = -head.A_log[h].exp() * torch.log1p((logits + head.dt_bias[h]).exp())
    return out


@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("name", DECAYS)
def test_log_decays_formula(name, outputs):
    head = DECAYS[name](12, 3, outputs).double()
    torch.nn.init.normal_(head.weight)
    x = torch.randn(2, 4, 5, 12, dtype=torch.float64)
    log_alpha, log_beta = head(x)
    expected = written_out(head, x)
    torch.testing.assert_close(log_alpha, expected[..., 0])
    torch.testing.assert_close(log_beta, expected[..., outputs - 1])
    assert log_alpha.max() <= 0


@pytest.mark.parametrize("name", DECAYS)
def test_log_decays_initial_range(name):
    torch.manual_seed(0)
    head = DECAYS[name](64, 32)
    log_alpha, log_beta = head(torch.zeros(1, 1, 1, 64))
    for log_decay in (log_alpha, log_beta):
        assert log_decay.max() <= -0.001 * (1 - 1e-5)
        assert log_decay.min() >= -0.1 * 1.1 * (1 + 1e-5)
    # log-uniform: about as many heads below exp(-0.01) as above
    assert 8 <= (log_alpha < -0.01).sum() <= 24


def test_log_decays_initial_gradient():
    head = ReluDecay(8, 2)
    log_alpha, log_beta = head(torch.randn(2, 3, 3, 8))
    (log_alpha.sum() + log_beta.sum()).backward()
    assert head.weight.grad.abs().min() > 0
    assert torch.equal(head.bias.grad, torch.full((2, 2), -18.0))


@pytest.mark.parametrize("name", DECAYS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_log_decays_half_precision(name, dtype):
    head = DECAYS[name](64, 2)
    torch.nn.init.normal_(head.weight, std=0.2)
    x = torch.randn(1, 4, 4, 64).to(dtype)
    exact, _ = head(x.float())
    with torch.autocast("cpu", dtype=dtype):
        under_autocast, _ = head(x)
    assert under_autocast.dtype == torch.float32
    torch.testing.assert_close(under_autocast, exact)
    cast, _ = head.to(dtype)(x)
    assert cast.dtype == torch.float32


def test_softplus_decay_parameter_shapes():
    assert {name: tuple(p.shape) for name, p in SoftplusDecay(64, 4).named_parameters()} == {
        "weight": (2, 16),
        "dt_bias": (4,),
        "A_log": (4,),
    }


def test_zero_start_decay():
    """Exactly 0 at first, with a gradient; a rate below 0 means no decay, and can come back."""
    head = ZeroStartDecay(8, 2).double()
    x = torch.randn(1, 3, 3, 8, dtype=torch.float64)
    assert all(torch.equal(log_decay, torch.zeros_like(log_decay)) for log_decay in head(x))
    torch.nn.init.normal_(head.weight)
    for rate in (0.7, 0.0, -0.3):
        torch.nn.init.constant_(head.rate, rate)
        head.zero_grad()
        log_decay = torch.stack(head(x), -1)
        slices = x.unflatten(-1, (2, 4)).movedim(-2, 1) @ head.weight.T
        softplus = torch.log1p((slices + head.bias[:, None, None]).exp())
        torch.testing.assert_close(log_decay, -max(rate, 0.0) * softplus)
        log_decay.sum().backward()
        torch.testing.assert_close(head.rate.grad, -softplus.sum((0, 2, 3)))


@pytest.mark.parametrize("name", DECAYS)
def test_decay_start_range(name):
    """Zero tokens have decays in the range, log-uniform; the weights have the spread."""
    torch.manual_seed(0)
    head = DECAYS[name](64 * 32, 32, start=(0.2, 0.9, 0.5))
    log_alpha, log_beta = head(torch.zeros(1, 1, 1, 64 * 32))
    for log_decay in (log_alpha, log_beta):
        assert math.log(0.2) * (1 + 1e-5) <= log_decay.min() < log_decay.max() <= math.log(0.9) * (1 - 1e-5)
    middle = -math.sqrt(math.log(0.2) * math.log(0.9))
    assert 8 <= (log_alpha < middle).sum() <= 24
    assert 0.4 < head.weight.std() < 0.6


@pytest.mark.parametrize(("name", "rate"), [("relu", 1.0), ("softplus", 0.3)])
def test_decay_start_strong(name, rate):
    head = DECAYS[name](64, 2, start="strong")
    for log_decay in head(torch.zeros(1, 1, 1, 64)):
        torch.testing.assert_close(log_decay, torch.full_like(log_decay, -rate))
    assert head.weight.std() > 0.2
    decays = head(torch.randn(1, 16, 16, 64))[0].exp()  # tokens differ, and some are masked from the first step on
    assert decays.min() < 0.3
    assert decays.max() > 0.8


@pytest.mark.parametrize(
    "start",
    [
        "weak",
        (0.5, 0.9),
        (0.9, 0.5, 0.1),
        (0.0, 0.5, 0.1),
        (0.5, 1.0, 0.1),
        (0.5, 0.9, -1),
        (0.5, 0.9, True),
        0.5,
        None,
    ],
)
def test_decay_start_invalid(start):
    with pytest.raises(ValueError, match=r"^decay_start: expected one of"):
        PolylineAttention(8, 2, decay_start=start)


@pytest.mark.parametrize("formulation", ["paper", "release"])
def test_decay_start_in_models(formulation):
    """Of a block and a backbone; every value survives a round trip, and weights fit whatever the start was."""
    block = PolylineBlock(8, 2, formulation=formulation, decay_start="strong")
    assert block.attn.decay.weight.std() > 0.1
    config = CONFIGS["ppma_nano"].replace(num_classes=2, formulation=formulation, decay_start=[0.3, 0.6, 0.2])
    assert BackboneConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    model, plain = PolylineBackbone(config), PolylineBackbone(config.replace(decay_start="release"))
    head = model.stages[3].blocks[0].attn.decay
    alpha = head(torch.zeros(1, 1, 1, 128))[0].exp()
    assert alpha.min() >= 0.3 * (1 - 1e-5)
    assert alpha.max() <= 0.6 * (1 + 1e-5)
    plain.load_state_dict(model.state_dict())
