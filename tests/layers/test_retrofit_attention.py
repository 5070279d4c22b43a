"""The parts of timm's attentions are kept, and the mask is that of `PolylineAttention`."""

import inspect

import pytest
import timm.layers
import torch
from timm.models.eva import EvaAttention
from timm.models.vision_transformer import Attention
from torch import nn

from ppma.layers import PolylineAttention, RetrofitAttention
from ppma.layers.retrofit import GridRecorder

GRID, DIM, HEADS = (3, 4), 24, 2


def recorder():
    recorder = GridRecorder()
    recorder.grid = GRID
    return recorder


def randomise(attention):
    torch.manual_seed(0)
    for parameter in attention.parameters():
        nn.init.normal_(parameter, std=0.3)
    return attention.double().eval()


# class, arguments; each skipped where timm is too old to have one of them
VARIANTS = {
    "norms": (Attention, {"qk_norm": True, "scale_norm": True, "norm_layer": nn.LayerNorm, "qkv_bias": True}),
    "gated": (Attention, {"gated": True}),
    "head_dim": (Attention, {"attn_head_dim": 7}),
    "eva_fused": (EvaAttention, {"num_prefix_tokens": 2, "norm_layer": nn.LayerNorm}),
    "eva_separate": (EvaAttention, {"num_prefix_tokens": 2, "qkv_fused": False, "norm_layer": nn.LayerNorm}),
    "eva_bias_added": (EvaAttention, {"num_prefix_tokens": 2, "qkv_bias_separate": True, "norm_layer": nn.LayerNorm}),
    "rope_half": ("AttentionRope", {"num_prefix_tokens": 2, "rotate_half": True, "gated": True}),
    "rope_grouped": ("AttentionRope", {"num_prefix_tokens": 2, "qkv_fused": False, "num_kv_heads": 1}),
}


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_retrofit_attention_keeps(variant):
    kind, arguments = VARIANTS[variant]
    kind = getattr(timm.layers, kind, None) if isinstance(kind, str) else kind
    if kind is None or not arguments.keys() <= inspect.signature(kind).parameters.keys():
        pytest.skip(f"timm {timm.__version__} has no {variant}")
    theirs = randomise(kind(DIM, num_heads=HEADS, **arguments))
    x, options = torch.randn(2, 2 + 12, DIM, dtype=torch.float64), {}
    if kind is not Attention:
        angles = torch.randn(12, DIM // HEADS, dtype=torch.float64)
        options["rope"] = torch.cat((angles.sin(), angles.cos()), -1)
    expected = theirs(x, **options)
    ours = RetrofitAttention(theirs, recorder(), prefix=2)
    torch.testing.assert_close(ours(x, **options), expected)
    assert {name for name in ours.state_dict() if ".decay." not in f".{name}"} == theirs.state_dict().keys()


@pytest.mark.parametrize("kind", ["full", "linear", "decomposed"])
@pytest.mark.parametrize("prefix", [0, 3])
@torch.no_grad()
def test_retrofit_attention_mask(kind, prefix):
    """The same as `PolylineAttention` in the release's formulation with the same weights."""
    theirs = randomise(Attention(DIM, num_heads=HEADS, qkv_bias=True))
    ours = RetrofitAttention(theirs, recorder(), prefix, kind=kind, decay="softplus").double()
    expected = PolylineAttention(DIM, HEADS, kind=kind, formulation="release").double()
    expected.load_state_dict(ours.state_dict())
    x = torch.randn(2, prefix + 12, DIM, dtype=torch.float64)
    torch.testing.assert_close(ours(x), expected(x, grid=GRID))


def test_retrofit_attention_refused():
    class Own(Attention):
        pass

    class Extra(Attention):
        __module__ = "timm.future"

        def __init__(self):
            super().__init__(DIM, HEADS)
            self.bias_table = nn.Parameter(torch.zeros(3))

    Extra.__name__ = "Attention"
    scaled = Attention(DIM, HEADS)
    scaled.scale = 1.0
    for attention, message in (
        (nn.MultiheadAttention(DIM, HEADS), "expected timm's .*, got MultiheadAttention"),
        (Own(DIM, HEADS), "expected timm's .*, got Own"),
        (Extra(), "expected the parts of a plain attention, got bias_table too"),
        (scaled, r"expected a scale of 12\*\*-0.5, got 1.0"),
    ):
        with pytest.raises(ValueError, match=message):
            RetrofitAttention(attention, recorder(), prefix=1)


def test_retrofit_attention_wrong_calls():
    ours = RetrofitAttention(Attention(DIM, HEADS), recorder(), prefix=1)
    with pytest.raises(ValueError, match="a retrofitted attention has its own mask"):
        ours(torch.randn(1, 13, DIM), attn_mask=torch.zeros(13, 13))
    with pytest.raises(ValueError, match=r"expected 1 prefix tokens and the grid \(3, 4\) .* got 14 tokens"):
        ours(torch.randn(1, 14, DIM))
