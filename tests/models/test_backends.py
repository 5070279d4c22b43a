"""What a model computes with the backend that was chosen, on an empty batch, and in forward mode."""

import copy

import pytest
import timm
import torch
import torch.autograd.forward_ad as forward_ad

import ppma
from ppma.ops.backends.native import library as native_library


def nano():
    torch.manual_seed(0)
    return timm.create_model("ppma_nano", num_classes=7)


@pytest.mark.parametrize("name", ["torch", "reference"])
def test_set_backend_torch_without_native_kernels(name, monkeypatch):
    def refuse(kernel, *_):
        raise AssertionError(f"{kernel.name} ran")

    monkeypatch.setattr(native_library.Kernel, "__call__", refuse)
    model = nano()
    with pytest.raises(AssertionError, match="ran"):
        model(torch.randn(1, 3, 32, 32))
    model.set_backend(name)
    model(torch.randn(1, 3, 32, 32)).sum().backward()


def test_set_backend_native_unsupported():
    model = nano().double()
    model.set_backend("native")
    with pytest.raises(ppma.BackendUnavailableError, match="float32"):
        model(torch.randn(1, 3, 32, 32, dtype=torch.float64))


def test_empty_batch():
    model = nano().eval()
    for name in ("auto", "torch"):
        model.set_backend(name)
        model.zero_grad()
        image = torch.randn(0, 3, 32, 32, requires_grad=True)
        logits = model(image)
        assert logits.shape == (0, model.num_classes)
        logits.sum().backward()
        assert image.grad.shape == image.shape
        assert all((p.grad == 0).all() for p in model.parameters())
        assert [f.shape[0] for f in model.forward_intermediates(image, intermediates_only=True)] == [0] * 4


def test_jvp_model():
    """The tangent of the native model is that of the float64 model in plain PyTorch."""
    torch.manual_seed(0)
    model, image = nano().eval(), torch.randn(1, 3, 32, 32)
    direction = torch.randn_like(image)
    exact = copy.deepcopy(model).double()
    exact.set_backend("torch")
    _, expected = torch.func.jvp(exact, (image.double(),), (direction.double(),))
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(model(forward_ad.make_dual(image, direction))).tangent
    torch.testing.assert_close(tangent.double(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.func.jvp(model, (image,), (direction,))[1], tangent)
