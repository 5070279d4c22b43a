"""Published costs, from each of the counters people use."""

import pytest
import timm
import torch
from fvcore.nn import FlopCountAnalysis
from torch.utils.flop_counter import FlopCounterMode

import ppma
from ppma.models import flops
from ppma.models.profile import profile

# GFLOPs at 224 x 224, a multiply-add counted once
PUBLISHED = {"ppma_tiny": 2.709, "ppma_small": 4.919, "ppma_base": 10.634, "rmt_tiny": 2.651}


@pytest.mark.parametrize("name", PUBLISHED)
def test_profile_published_flops(name):
    total = profile(timm.create_model(name, formulation="release"), (224, 224)).total
    assert total.macs / 1e9 == pytest.approx(PUBLISHED[name], rel=5e-4)


@pytest.mark.parametrize("name", ["ppma_tiny", "rmt_tiny"])
def test_fvcore_published_flops(name):
    model = timm.create_model(name, formulation="release").eval()
    analysis = FlopCountAnalysis(model, torch.zeros(1, 3, 224, 224)).set_op_handle(**flops.fvcore_handles())
    analysis.unsupported_ops_warnings(False).uncalled_modules_warnings(False)
    assert analysis.total() / 1e9 == pytest.approx(PUBLISHED[name], rel=5e-4)
    assert analysis.total() == profile(model, (224, 224)).total.macs


def test_profile_formulations():
    totals = [profile(timm.create_model("ppma_tiny", formulation=f)).total.macs for f in ("paper", "release")]
    assert totals[0] == totals[1]


def test_profile_parts():
    model = timm.create_model("ppma_nano")
    report = profile(model, (48, 80))
    assert model.stem.layers[0].weight.device.type == "cpu"
    assert report.total.parameters == sum(p.numel() for p in model.parameters())
    stages = report.parts[1:-1]
    assert [part.grid for part in stages] == [(24, 40), (12, 20), (6, 10), (3, 5)]
    assert [part.attention for part in stages] == list(model.config.kinds)
    # the first stage's one block: position, qkv, decays, attention, local, proj, ffn in, local and out
    tokens, dim, heads = 24 * 40, 32, 2
    assert stages[0].activations == tokens * (dim + 3 * dim + 2 * heads + dim + dim + dim + 3 * dim + 3 * dim + dim)


@pytest.mark.parametrize("paths", ["v2h", "2d"])
def test_flops_forward_formulas(paths):
    B, heads, H, W, d, dv = 2, 3, 4, 5, 6, 7
    q, k, v = torch.randn(B, heads, H, W, d), torch.randn(B, heads, H, W, d), torch.randn(B, heads, H, W, dv)
    log_alpha, log_beta = -torch.rand(2, B, heads, H, W)
    N, count = H * W, 2 if paths == "2d" else 1
    with FlopCounterMode(display=False) as counter:
        ppma.polyline_attention(q, k, v, log_alpha, log_beta, paths=paths)
    assert counter.get_total_flops() == 2 * B * heads * N * N * (d + dv)
    with FlopCounterMode(display=False) as counter:
        ppma.criss_cross_attention(q, k, v, log_alpha, log_beta, paths=paths)
    assert counter.get_total_flops() == 2 * B * heads * N * (H + W) * (d + count * dv)
    with FlopCounterMode(display=False) as counter:
        ppma.polyline_scan(v, log_alpha, log_beta, paths=paths)
    assert counter.get_total_flops() == 2 * B * heads * N * dv * 4 * count


@pytest.mark.parametrize("function", [ppma.polyline_attention, ppma.criss_cross_attention, ppma.linear_attention])
def test_flops_backward(function):
    tensors = [torch.randn(1, 2, 3, 4, 8, requires_grad=True) for _ in range(3)]
    log_decays = [(-torch.rand(1, 2, 3, 4)).requires_grad_() for _ in range(2)]
    with FlopCounterMode(display=False) as forward:
        out = function(*tensors, *log_decays)
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    assert 2 * forward.get_total_flops() <= backward.get_total_flops() <= 3 * forward.get_total_flops()
