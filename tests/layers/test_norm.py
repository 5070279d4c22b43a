"""Layer norm under autocast."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from ppma.layers import PolylineBlock
from ppma.layers.norm import LayerNorm


class Copies(TorchDispatchMode):
    """Tokens that are copied to float32."""

    def __init__(self, numel):
        super().__init__()
        self.numel, self.count = numel, 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        out = operator(*args, **(kwargs or {}))
        if operator is torch.ops.aten._to_copy.default and out.dtype == torch.float32 and out.numel() == self.numel:
            self.count += 1
        return out


@pytest.fixture
def autocast():
    """To bfloat16 on CUDA, whether there is a GPU or not."""
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    yield
    torch.set_autocast_enabled("cuda", False)


@pytest.mark.parametrize(("kind", "copies"), [(nn.LayerNorm, 1), (LayerNorm, 0)])
def test_layer_norm_autocast_no_copies(kind, copies, autocast):
    with FakeTensorMode():
        norm, x = kind(8, device="cuda"), torch.empty(3, 5, 8, device="cuda", dtype=torch.bfloat16)
        with Copies(x.numel()) as counted:
            out = norm(x)
        assert counted.count == copies
        assert out.dtype == (torch.float32 if copies else torch.bfloat16)
        assert norm(x.float()).dtype == torch.float32  # values in float32 stay there


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layer_norm_cpu_as_pytorch(dtype):
    x = torch.randn(3, 8).to(dtype)
    for enabled in (False, dtype == torch.bfloat16):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            assert LayerNorm(8, dtype=dtype)(x).equal(nn.LayerNorm(8, dtype=dtype)(x))


def test_block_norms_half_precision():
    block = PolylineBlock(16, 2)
    assert isinstance(block.attn_norm, LayerNorm)
    assert isinstance(block.ffn_norm, LayerNorm)
