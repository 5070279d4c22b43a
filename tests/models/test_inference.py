"""Folding changes nothing but the speed."""

import pytest
import timm
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import ppma
from ppma.layers import fused
from ppma.ops import backends, fused_conv, fused_linear
from ppma.ops.backends import native
from ppma.ops.backends.native import library


def randomized(name, **options):
    """A model whose norms and scales are far from their initial values, so that a wrong fold shows."""
    torch.manual_seed(0)
    model = timm.create_model(name, **options)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.3)
            module.running_mean.normal_(std=0.3)
            module.running_var.uniform_(0.5, 2)
        if isinstance(module, timm.layers.LayerScale):
            nn.init.uniform_(module.gamma, 0.5, 1.5)
    return model.eval()


@pytest.mark.parametrize("name", ["ppma_nano", "ppma_tiny", "ppma_base", "rmt_tiny"])
def test_optimize_outputs(name):
    model = randomized(name)
    fast = ppma.optimize_for_inference(model)
    images = torch.randn(2, 3, 64, 96)
    with torch.no_grad():
        expected = model(images)
        torch.testing.assert_close(fast(images), expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())
    assert not any(isinstance(m, nn.BatchNorm2d | timm.layers.LayerScale) for m in fast.modules())
    assert not any(p.requires_grad for p in fast.parameters())


def test_optimize_leaves_model():
    model = randomized("ppma_nano").train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    ppma.optimize_for_inference(model)
    assert model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(p.requires_grad for p in model.parameters())


def test_optimize_wrapped_models():
    model = randomized("ppma_nano", features_only=True)
    wrapped = nn.ModuleDict({"backbone": model})
    images = torch.randn(1, 3, 64, 64)
    fast = ppma.optimize_for_inference(wrapped)["backbone"]
    with torch.no_grad():
        for a, b in zip(model(images), fast(images), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * b.abs().max().item())


@pytest.mark.native
def test_native_backend_measures_nothing(monkeypatch):
    """The same bits in every process: no implementation depends on a measurement."""
    for module in (fused, fused_conv, fused_linear):
        monkeypatch.setattr(module, "fastest", lambda candidates: pytest.fail("measured"))
        monkeypatch.setattr(module, "_choices", {})
    model = randomized("ppma_nano")
    fast, images = ppma.optimize_for_inference(model), torch.randn(2, 3, 32, 32)
    fast.set_backend("native")
    with torch.no_grad():
        torch.testing.assert_close(fast(images), model(images), rtol=1e-5, atol=1e-5)


@pytest.fixture
def calls(monkeypatch):
    """The number of layers of each call of the kernel."""
    counts, kernel = [], native.fused_layers
    monkeypatch.setattr(native, "fused_layers", lambda x, layers: counts.append(len(layers)) or kernel(x, layers))
    return counts


def optimized(backend="native", **options):
    fast = ppma.optimize_for_inference(randomized("ppma_nano", **options))
    fast.set_backend(backend)
    return fast


def layer_counts(model):
    """Of the stem and of each stage."""
    return [len(model.stem.layers), *(len(stage.blocks) + (index > 0) for index, stage in enumerate(model.stages))]


def one_by_one(model, images):
    x = images.permute(0, 2, 3, 1)
    for conv in model.stem.layers:
        x = conv(x)
    for stage in model.stages:
        x = stage.downsample(x)
        for block in stage.blocks:
            x = block(x)
    return x


@pytest.mark.native
def test_model_runs_in_one_call(calls):
    """Stem and stages together; up to each stage where its output is wanted; none where tokens are padding."""
    fast, images = optimized(), torch.randn(1, 3, 32, 32)
    stem, first, *others = layer_counts(fast)
    with torch.no_grad():
        fast(images)
        assert calls == [stem + first + sum(others)]
        calls.clear()
        fast.forward_intermediates(images)
        assert calls == [stem + first, *others]
        calls.clear()
        fast.forward_intermediates(images, [1, len(others)])
        assert calls == [stem + first + others[0], sum(others[1:])]
        calls.clear()
        fast.forward_intermediates(images, [0], stop_early=True)
        assert calls == [stem + first]
        calls.clear()
        fast.stages[1](fast.stages[0](fast.stem(images)))
        assert calls == [first, others[0]]
        calls.clear()
        fast.forward_features(images, valid=torch.ones(1, 32, 32, dtype=torch.bool))
        assert not calls


@pytest.mark.native
@pytest.mark.parametrize("isa", library.available())
@pytest.mark.parametrize("shape", [(1, 3, 32, 32), (2, 3, 37, 53), (3, 3, 1, 5), (0, 3, 32, 40)], ids=str)
def test_one_call_same_bits(monkeypatch, calls, isa, shape):
    """As the layers one by one, for images in any strides."""
    monkeypatch.setattr(library, "forced_isa", isa)
    fast, images = optimized(formulation="release"), torch.randn(shape)
    with torch.no_grad():
        expected = one_by_one(fast, images)
        calls.clear()
        assert torch.equal(fast.forward_features(images), expected)
        assert torch.equal(fast.forward_features(images.contiguous(memory_format=torch.channels_last)), expected)
        assert torch.equal(fast.forward_features(images.mT.contiguous().mT), expected)
        assert len(calls) == 3
        last, features = fast.forward_intermediates(images, output_fmt="NHWC")
        assert torch.equal(last, expected)
        assert torch.equal(features[-1], expected)
        assert torch.equal(features[0], fast.stages[0](fast.stem(images)))


@pytest.mark.native
def test_one_call_follows_weights():
    """Loaded, moved, replaced and written in place."""
    fast, images = optimized(), torch.randn(1, 3, 32, 32)
    other = {name: tensor * 1.1 for name, tensor in fast.state_dict().items() if name.endswith(("weight", "bias"))}
    conv, block = fast.stages[1].downsample.conv, fast.stages[1].blocks[0]
    changes = (
        lambda: fast.load_state_dict(other, strict=False),
        lambda: fast.double().float(),
        lambda: setattr(conv, "bias", conv.bias + 1.0),
        lambda: conv.bias.add_(1.0),
        lambda: block.mix.weight.mul_(2.0),
    )
    with torch.no_grad():
        result = fast.forward_features(images)
        for change in changes:
            change()
            before, result = result, fast.forward_features(images)
            assert torch.equal(result, one_by_one(fast, images))
            assert change is changes[1] or not torch.equal(result, before)


MODULES = {
    "stem": lambda model: model.stem,
    "sequence": lambda model: model.stem.layers,
    "convolution": lambda model: model.stem.layers[2],
    "stage": lambda model: model.stages[2],
    "no downsampling": lambda model: model.stages[0].downsample,
    "downsampling": lambda model: model.stages[1].downsample,
    "its convolution": lambda model: model.stages[1].downsample.conv,
    "its norm": lambda model: model.stages[1].downsample.norm,
    "block": lambda model: model.stages[3].blocks[0],
    "linear": lambda model: model.stages[0].blocks[0].expand,
}


def wrap(module, seen):
    forward = module.forward
    module.forward = lambda *arguments, **options: seen.append(1) or forward(*arguments, **options)


WATCHERS = {
    "hook": lambda module, seen: module.register_forward_hook(lambda *_: seen.append(1)),
    "hook before": lambda module, seen: module.register_forward_pre_hook(lambda *_: seen.append(1)),
    "wrapper": wrap,
}


@pytest.mark.native
@pytest.mark.parametrize("watcher", WATCHERS)
@pytest.mark.parametrize("module", MODULES)
def test_watched_modules_are_called(calls, module, watcher):
    """Once each, and the result is the same."""
    fast, images, seen = optimized(), torch.randn(2, 3, 32, 32), []
    with torch.no_grad():
        expected = fast.forward_features(images)
        calls.clear()
        WATCHERS[watcher](MODULES[module](fast), seen)
        result = fast.forward_features(images)
    assert seen == [1]
    assert sum(layer_counts(fast)) not in calls
    if module == "linear":  # the steps of its block round otherwise than the block in one call
        torch.testing.assert_close(result, expected)
    else:
        assert torch.equal(result, expected)


@pytest.mark.native
@pytest.mark.parametrize("module", ["stem", "stage", "downsampling"])
def test_derived_modules_are_called(calls, module):
    """They may compute something else."""
    fast, images = optimized(), torch.randn(1, 3, 32, 32)
    derived = MODULES[module](fast)
    kind, seen = type(derived), []

    class Derived(kind):
        def forward(self, *arguments):
            seen.append(1)
            return super().forward(*arguments)

    derived.__class__ = Derived
    with torch.no_grad():
        result = fast.forward_features(images)
        assert seen == [1]
        assert sum(layer_counts(fast)) not in calls
        derived.__class__ = kind
        assert torch.equal(result, fast.forward_features(images))


@pytest.mark.native
def test_stem_in_sequence():
    """Somebody's wrapper around the stem gets the image as it is."""
    fast, images = optimized(), torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        expected = fast.forward_features(images)
        fast.stem = nn.Sequential(fast.stem)
        assert torch.equal(fast.forward_features(images), expected)


@pytest.mark.native
def test_layers_one_by_one_where_somebody_watches(calls):
    """Gradients, modes, profilers, other dtypes, autocast, excluded and other backends."""
    fast, images = optimized("auto"), torch.randn(1, 3, 32, 32)
    seen = []
    fast(images)
    with torch.no_grad():
        with FlopCounterMode(display=False) as flops:
            fast(images)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
            fast(images)
        with torch.autocast("cpu", torch.bfloat16):
            fast(images)
        with backends.excluding("native"):
            fast(images)
        optimized("auto").double()(images.double())
        handle = torch.nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(module))
        fast(images)
        handle.remove()
        fast.set_backend("torch")
        fast(images)
    assert not any(count > 1 for count in calls)
    assert flops.get_total_flops() > 0
    assert {*fast.stem.modules(), *fast.stages} <= set(seen)


@pytest.mark.native
@pytest.mark.parametrize(("slow", "expected"), [(0, [15]), (3, [11]), (64, [1, 3, 4, 2])])
def test_measured_layers_in_one_call(monkeypatch, calls, slow, expected):
    """From the second image on; convolutions of so many channels run in PyTorch, if that was faster."""
    for module in (fused, fused_conv):
        monkeypatch.setattr(module, "_choices", {})
    monkeypatch.setattr(fused, "fastest", lambda candidates: fused.WHOLE)

    def chosen(candidates):
        _, weight, *_ = candidates["torch"].args
        return "torch" if weight.shape[1] == slow else "packed"

    monkeypatch.setattr(fused_conv, "fastest", chosen)
    fast, images = optimized("auto"), torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        fast(images)
        assert set(calls) == {1}
        calls.clear()
        result = fast.forward_features(images)
        assert calls == expected
        assert torch.equal(result, one_by_one(fast, images))
