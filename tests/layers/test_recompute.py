"""Activations recomputed in the backward pass: the same bits, and not saved."""

import functools
import weakref

import pytest
import timm
import torch
import torch.utils.checkpoint
from torch.autograd.graph import disable_saved_tensors_hooks, save_on_cpu, saved_tensors_hooks

from ppma.layers import recompute
from ppma.layers.block import ConvFeedForward
from ppma.layers.recompute import recomputing

pytestmark = pytest.mark.native


@pytest.fixture(autouse=True)
def any_size(monkeypatch):
    monkeypatch.setattr(recompute, "SMALLEST", 0)


def model(**options):
    torch.manual_seed(0)
    return timm.create_model("ppma_nano", num_classes=10, **options).train()


def gradients(network, images, run=None):
    """Of a fixed cotangent: a forward pass without gradients, as of reentrant checkpointing, may round differently."""
    network.zero_grad()
    torch.manual_seed(1)  # for the branches that are dropped
    out = (run or network)(images)
    out.backward(torch.linspace(-1, 1, out.numel()).view(out.shape))
    return [parameter.grad.clone() for parameter in network.parameters()]


def keep(tensor):
    return tensor


class Recomputed:
    """A value with two readers, and the recomputations that their backward passes asked for."""

    def __init__(self):
        self.x = torch.randn(5, 4, requires_grad=True)
        self.weights = [torch.randn(4, 3, requires_grad=True) for _ in range(2)]
        self.made = []
        value = self.x.sin()
        with recomputing(value, self._again):
            self.results = [(value @ weight).sum() for weight in self.weights]
        value.detach().zero_()  # would spoil the gradients, or raise, if it were kept

    def _again(self):
        value = self.x.sin()
        self.made.append(weakref.ref(value))
        return value

    def expected(self):
        plain = self.x.sin()
        return torch.autograd.grad(sum((plain @ weight).sum() for weight in self.weights), self.inputs)

    @property
    def inputs(self):
        return [self.x, *self.weights]


def test_value_recomputed_once():
    value = Recomputed()
    assert not value.made
    actual = torch.autograd.grad(sum(value.results), value.inputs)
    assert len(value.made) == 1
    assert value.made[0]() is None  # not kept behind its last reader
    assert all(torch.equal(a, b) for a, b in zip(actual, value.expected(), strict=True))


def test_value_recomputed_in_each_backward_pass():
    value = Recomputed()
    for passes in (1, 2):
        actual = torch.autograd.grad(sum(value.results), value.inputs, retain_graph=True)
        assert len(value.made) == passes
        assert all(torch.equal(a, b) for a, b in zip(actual, value.expected(), strict=True))


def test_value_of_one_reader():
    value = Recomputed()
    for result, weight in zip(value.results, value.weights, strict=True):
        (actual,) = torch.autograd.grad(result, weight, retain_graph=True)
        assert torch.equal(actual, value.x.sin().t() @ torch.ones(5, 3))


def test_small_value_kept(monkeypatch):
    x, weight = torch.randn(5, 4, requires_grad=True), torch.randn(4, 3, requires_grad=True)
    value = x.sin()
    monkeypatch.setattr(recompute, "SMALLEST", value.nbytes + 1)
    with recomputing(value, lambda: pytest.fail("recomputed")):
        result = value @ weight
    torch.autograd.grad(result.sum(), [x, weight])


@pytest.mark.parametrize("formulation", ["paper", "release"])
def test_model_gradients_same_bits(formulation):
    network, images = model(formulation=formulation), torch.randn(2, 3, 32, 48)
    less = gradients(network, images)
    with saved_tensors_hooks(keep, keep):  # other hooks switch it off
        everything = gradients(network, images)
    assert all(torch.equal(a, b) for a, b in zip(less, everything, strict=True))


def test_gradient_checkpointing():
    network, images = model(), torch.randn(2, 3, 32, 32)
    plain = gradients(network, images)
    network.set_grad_checkpointing()
    assert all(torch.equal(a, b) for a, b in zip(plain, gradients(network, images), strict=True))


def test_error_inside():
    value, other = (torch.randn(3, requires_grad=True).sin() for _ in range(2))
    with (
        pytest.raises(RuntimeError, match="from inside"),
        recomputing(value, value.clone),
        recomputing(other, other.clone),
    ):
        raise RuntimeError("from inside")
    assert not recompute._hooked()
    assert recompute._recomputable.get() is None


def test_hooked():
    assert not recompute._hooked()
    for hooks in (saved_tensors_hooks(keep, keep), save_on_cpu()):
        with hooks:
            assert recompute._hooked()
    assert not recompute._hooked()


def test_other_hooks():
    x, weight = torch.randn(5, 4, requires_grad=True), torch.randn(4, 3, requires_grad=True)
    value, packed = x.sin(), []
    with saved_tensors_hooks(lambda tensor: packed.append(tensor) or tensor, keep), recomputing(value, x.sin):
        value @ weight
    assert any(torch.equal(tensor, value) for tensor in packed if tensor.shape == value.shape)


def test_disabled_hooks_and_no_grad():
    x, weight = torch.randn(5, 4, requires_grad=True), torch.randn(4, 3, requires_grad=True)
    value = x.sin()
    with disable_saved_tensors_hooks("no hooks here"), recomputing(value, x.sin):
        result = value @ weight
    assert len(torch.autograd.grad(result.sum(), [x, weight])) == 2
    with torch.no_grad(), recomputing(value, x.sin):
        assert not (value @ weight).requires_grad


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_gradients_same_bits(reentrant):
    network, images = model(), torch.randn(2, 3, 32, 32, requires_grad=True)
    plain = gradients(network, images)
    run = functools.partial(torch.utils.checkpoint.checkpoint, network, use_reentrant=reentrant)
    assert all(torch.equal(a, b) for a, b in zip(plain, gradients(network, images, run), strict=True))


def test_projection_hook_keeps_result():
    network, images, seen = model().eval(), torch.randn(1, 3, 32, 32), []
    with torch.no_grad():
        expected = network(images)
        projection = next(module for name, module in network.named_modules() if name.endswith("attn.qkv"))
        handle = projection.register_forward_hook(lambda module, inputs, output: seen.append((inputs[0], output)))
        assert torch.equal(network(images), expected)
        handle.remove()
        tokens, kept = seen[0]
        assert torch.equal(projection(tokens), kept)


def feed_forward():
    torch.manual_seed(0)
    return ConvFeedForward(8, 24), torch.randn(2, 5, 6, 8, requires_grad=True)


def test_feed_forward_keeps_no_output_of_its_convolution():
    layer, x = feed_forward()
    saved = []
    with saved_tensors_hooks(lambda tensor: saved.append(tensor.shape) or tensor, keep):
        layer(x)
    # The result of the first layer alone, which the convolution reads.
    assert saved.count(torch.Size([2, 5, 6, 24])) == 1


@pytest.mark.parametrize("watch", ["hook", "pre-hook", "other layer"])
def test_feed_forward_calls_a_layer_that_is_watched(watch):
    layer, x = feed_forward()
    calls = []
    expected = torch.autograd.grad(layer(x).square().sum(), [x, *layer.parameters()])
    if watch == "hook":
        layer.reduce.register_forward_hook(lambda *arguments: calls.append(1))
    elif watch == "pre-hook":
        layer.reduce.register_forward_pre_hook(lambda *arguments: calls.append(1))
    else:

        class Counting(torch.nn.Linear):
            def forward(self, values):
                calls.append(1)
                return super().forward(values)

        layer.reduce.__class__ = Counting
    results = torch.autograd.grad(layer(x).square().sum(), [x, *layer.parameters()])
    assert calls == [1]
    for result, value in zip(results, expected, strict=True):
        torch.testing.assert_close(result, value)
