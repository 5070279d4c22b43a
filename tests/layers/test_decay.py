import pytest
import torch

from ppma.layers import DECAYS, ReluDecay, SoftplusDecay, ZeroStartDecay


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
