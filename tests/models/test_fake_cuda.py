"""On a GPU a forward pass does nothing on the CPU: a constant built there is a copy in every compiled forward."""

import pytest
import timm
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ppma.models  # noqa: F401  (registers the models)


class Devices(TorchDispatchMode):
    """Records which operations return tensors that are not on the GPU."""

    def __init__(self):
        super().__init__()
        self.operations, self.elsewhere = 0, []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        out = operator(*args, **(kwargs or {}))
        self.operations += 1
        self.elsewhere += [
            str(operator) for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor) and leaf.device.type != "cuda"
        ]
        return out


@pytest.mark.parametrize("options", [{}, {"mask": "rmt"}, {"mask": "none"}], ids=str)
def test_forward_cuda_only(options):
    model = timm.create_model("ppma_tiny", **options)
    with FakeTensorMode():
        state = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda")
            for name, tensor in model.state_dict(keep_vars=True).items()
        }
        images = torch.empty(1, 3, 96, 96, device="cuda")
        with Devices() as devices:
            torch.func.functional_call(model, state, images)
    assert devices.operations > 100
    assert devices.elsewhere == []
