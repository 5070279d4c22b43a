"""How linear layers start: truncated normal weights (std 0.02), zero biases."""

from timm.layers import trunc_normal_
from torch import nn


def linear(inputs: int, outputs: int) -> nn.Linear:
    """A linear layer with bias, initialised."""
    layer = nn.Linear(inputs, outputs)
    trunc_normal_(layer.weight, std=0.02)
    nn.init.zeros_(layer.bias)
    return layer
