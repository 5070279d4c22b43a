"""The layers of the backbones, usable in other models: decay heads, attention, block, stem."""

from ppma.layers.attention import PolylineAttention
from ppma.layers.block import ConvFeedForward, PolylineBlock
from ppma.layers.decay import DECAYS, DecayHead, DecayStart, ReluDecay, SoftplusDecay, ZeroStartDecay
from ppma.layers.factors import linear_factors, softmax_factors
from ppma.layers.retrofit import RetrofitAttention
from ppma.layers.rope import rotary_table
from ppma.layers.stem import Downsample, Stem

__all__ = [
    "DECAYS",
    "ConvFeedForward",
    "DecayHead",
    "DecayStart",
    "Downsample",
    "PolylineAttention",
    "PolylineBlock",
    "ReluDecay",
    "RetrofitAttention",
    "SoftplusDecay",
    "Stem",
    "ZeroStartDecay",
    "linear_factors",
    "rotary_table",
    "softmax_factors",
]
