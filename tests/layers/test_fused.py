"""Blocks for inference: in one call of the native kernel, step by step, and as they were trained."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ppma import masks
from ppma.layers import PolylineBlock, fused
from ppma.layers.fused import STEPS, WHOLE, FusedBlock, FusedConv
from ppma.layers.together import run_together
from ppma.ops import fused_conv as module
from ppma.ops.backends.native import library

pytestmark = pytest.mark.native

KERNEL_MASKS = [name for name in masks.KINDS if name not in ("cross", "hilbert")]


@pytest.fixture(params=library.available() or ["none"])
def isa(request, monkeypatch):
    monkeypatch.setattr(library, "forced_isa", request.param)
    return request.param


def make(dim=32, heads=2, **options):
    """A block with weights and decays far from where they start, and tokens of two images."""
    torch.manual_seed(0)
    block = PolylineBlock(dim, heads, **options).eval().requires_grad_(False)
    for parameter in block.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.2)
    return block


def fuse(block, backend):
    fast = FusedBlock(block)
    fast.attn.backend = backend
    return fast


def check(x, change=lambda block: None, **options):
    """Compare the kernel with float64.

    The steps in plain PyTorch round as often, in another order. On tiny grids these errors may happen to be near 0,
    hence the 16 roundings.
    """
    blocks = [make(**options) for _ in range(3)]
    for block in blocks:
        change(block)
    with torch.no_grad():
        whole = fuse(blocks[0], "native")
        assert fused.kernel_serves(x)
        assert whole.kernel_weights(x.shape, x.dtype) is not None
        result, rounded, exact = whole(x), fuse(blocks[1], "torch")(x), blocks[2].double()(x.double())
    error, allowed = ((value.double() - exact).abs().max() for value in (result, rounded))
    assert error <= 4 * allowed + 16 * 2.0**-24 * exact.abs().max()


def tokens(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("formulation", ["paper", "release"])
@pytest.mark.parametrize("kind", ["full", "criss_cross"])
@pytest.mark.parametrize("mask", KERNEL_MASKS)
def test_whole_block(isa, mask, kind, formulation):
    check(tokens(2, 5, 7, 32), mask=mask, kind=kind, formulation=formulation)


@pytest.mark.parametrize("grid", [(1, 1), (1, 9), (8, 1), (33, 33), (3, 70)], ids=str)
def test_whole_block_grids(isa, grid):
    check(tokens(2, *grid, 32))


@pytest.mark.parametrize(("dim", "heads"), [(416, 26), (800, 50)])
def test_wide_blocks(isa, dim, heads):
    """Inputs that are summed in two and three parts, and more decays than a panel of weights holds."""
    check(tokens(3, 4, 3, dim), dim=dim, heads=heads)


def test_whole_block_groups(isa):
    """Images pass the block in groups; the result does not depend on the others, nor on the threads."""
    x = tokens(70, 8, 16, 32)  # groups of 32
    block, before = fuse(make(), "native"), torch.get_num_threads()
    results = []
    with torch.no_grad():
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(block(x))
        alone = torch.cat([block(image[None]) for image in x[::23]])
    torch.set_num_threads(before)
    assert all(torch.equal(results[0], result) for result in results)
    assert torch.equal(results[0][::23], alone)


def test_whole_block_strides_and_empty(isa):
    block = fuse(make(), "native")
    x = torch.randn(2, 6, 5, 32)
    with torch.no_grad():
        assert torch.equal(block(x.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)), block(x))
        assert block(x[:0]).shape == (0, 6, 5, 32)
        x[0, 0, 0, 0] = torch.nan
        assert block(x)[0].isnan().all()
        assert not block(x)[1].isnan().any()


@pytest.mark.parametrize("bias", [-1e4, 1e4])
def test_extreme_decays(isa, bias):
    """Decays of exactly 1, and of 0 in float32."""
    check(tokens(1, 6, 6, 32), lambda block: block.attn.decay.bias.fill_(bias))


@pytest.mark.parametrize("bias", [-90.0, -20.0, -1.0, 0.0, 1.0, 20.0, 200.0])
def test_softplus_decays(isa, bias):
    """From logits far below 0, where softplus is the exponential, to far above."""
    check(tokens(1, 6, 6, 32), lambda block: block.attn.decay.dt_bias.fill_(bias), formulation="release")


def replace_parameter(fast):
    fast.position.weight = torch.nn.Parameter(tokens(*fast.position.weight.shape), requires_grad=False)


def replace_data(fast):
    fast.mix.weight.data = tokens(*fast.mix.weight.shape)


def replace_layer(fast):
    fast.mix = copy.deepcopy(fast.mix)
    fast.mix.weight.mul_(2.0)


def load(fast):
    fast.load_state_dict({name: tensor + 0.01 for name, tensor in fast.state_dict().items()})


CHANGES = {
    "decay": lambda fast: fast.attn.decay.dt_bias.add_(1.0),
    "rate": lambda fast: fast.attn.decay.A_log.add_(1.0),
    "convolution": lambda fast: fast.attn.local.weight.mul_(2.0),
    "replaced": replace_parameter,
    "data": replace_data,
    "layer": replace_layer,
    "loaded": load,
    "moved": lambda fast: fast.double().float(),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("made_in_inference_mode", [False, True])
def test_changed_weights(change, made_in_inference_mode):
    """What the kernel keeps from call to call follows the weights."""
    x = tokens(1, 6, 5, 32)
    with torch.inference_mode(made_in_inference_mode), torch.no_grad():
        fast = fuse(make(formulation="release"), "native")
        before, twin = fast(x), copy.deepcopy(fast)
        CHANGES[change](fast)
        fresh = fuse(make(formulation="release"), "native")
        CHANGES[change](fresh)
        expected = fresh(x)
        assert torch.equal(fast(x), expected)
        assert torch.equal(twin(x), before)
        if change != "moved":
            assert not torch.equal(before, expected)


def test_weights_kept():
    """A second call finds what the first made, also with another batch; another grid does not."""
    x = tokens(2, 6, 5, 32)
    with torch.no_grad():
        fast = fuse(make(), "native")
        fast(x)
        first = fast._kept.weights
        fast(x[:1])
        assert fast._kept.weights is first
        fast(x[:, :3])
        assert fast._kept.weights is not first


def test_write_while_weights_are_made(monkeypatch):
    """As from another thread: the next call notices."""
    x = tokens(1, 6, 5, 32)
    with torch.no_grad():
        fast = fuse(make(), "native")
        new_weights = fast._new_weights

        def made_then_written(*arguments):
            made = new_weights(*arguments)
            monkeypatch.undo()
            fast.mix.weight.mul_(2.0)
            return made

        monkeypatch.setattr(fast, "_new_weights", made_then_written)
        fast(x)
        first = fast._kept.weights
        fast(x)
        assert fast._kept.weights is not first


def test_python_threads():
    """Threads that run one block on different grids get the results of their own."""
    with torch.no_grad():
        fast = fuse(make(), "native")
        inputs = [tokens(1, height, 5, 32) for height in (2, 3, 6, 7)]
        expected = [fast(x) for x in inputs]

    def repeat(x):
        with torch.no_grad():
            return [fast(x) for _ in range(20)]

    with ThreadPoolExecutor(4) as pool:
        for results, exact in zip(pool.map(repeat, inputs), expected, strict=True):
            assert all(torch.equal(result, exact) for result in results)


def test_choice(monkeypatch):
    x, block = torch.randn(1, 6, 6, 32), fuse(make(), "auto")
    results = {}
    for name in (WHOLE, STEPS):
        monkeypatch.setattr(fused, "_choices", {})
        monkeypatch.setattr(fused, "fastest", lambda candidates, name=name: name)
        with torch.no_grad():
            results[name] = block(x)
        assert list(fused.block_choices().values()) == [name]
    torch.testing.assert_close(*results.values())


def test_steps_where_somebody_watches(monkeypatch):
    """Hooks, modes, gradients, padding and other dtypes see the steps."""
    called = []
    monkeypatch.setattr(FusedBlock, "weights", lambda *arguments: called.append(1))
    x, block = torch.randn(1, 6, 6, 32), fuse(make(), "auto")
    with torch.no_grad():
        block(x, valid=torch.ones(1, 6, 6, dtype=torch.bool))
        with FlopCounterMode(display=False) as flops:
            block(x)
        seen = []
        handle = block.proj.register_forward_hook(lambda *arguments: seen.append(1))
        block(x)
        handle.remove()
        fuse(make(), "auto").double()(x.double())
        with torch.autocast("cpu", torch.bfloat16):
            block(x)
    block(x)
    assert not called
    assert seen
    assert flops.get_total_flops() > 0


@pytest.mark.parametrize("mask", ["cross", "hilbert"])
def test_masks_without_kernel(mask):
    x = torch.randn(1, 6, 6, 32)
    with torch.no_grad():
        torch.testing.assert_close(fuse(make(mask=mask), "auto")(x), make(mask=mask)(x))


def sequence(count, **options):
    """Blocks with weights of their own."""
    blocks = [fuse(make(**options), "native") for _ in range(count)]
    for index, block in enumerate(blocks):
        block.proj.weight.mul_(1 + index)
    return blocks


def convolution(inputs, outputs, stride=1, gelu=False):
    torch.manual_seed(inputs + outputs)
    conv = FusedConv(torch.nn.Conv2d(inputs, outputs, 3, stride, 1), gelu)
    conv.backend = "native"
    return conv


def one_by_one(layers, x):
    for layer in layers:
        x = layer(x)
    return x


@pytest.mark.parametrize("kind", ["criss_cross", "full"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_together_same_bits(isa, kind, count):
    x, blocks = tokens(3, 40, 42, 32), sequence(count, kind=kind)  # two images at a time
    before = x.clone()
    with torch.no_grad():
        together = run_together(blocks, x)
        assert torch.equal(together, one_by_one(blocks, x))
        blocks[-1].mix.weight.mul_(2)
        changed = run_together(blocks, x)
        assert torch.equal(changed, one_by_one(blocks, x))
        assert not torch.equal(changed, together)
    assert torch.equal(x, before)
    assert not torch.equal(together, x)


SEQUENCES = {
    "convolution": lambda: [convolution(5, 32)],
    "convolutions": lambda: [convolution(5, 16, gelu=True), convolution(16, 24, 2), convolution(24, 24)],
    "convolutions, blocks": lambda: [
        convolution(5, 16, gelu=True),
        convolution(16, 32, 2),
        *sequence(2, kind="criss_cross"),
    ],
    "ends with a convolution": lambda: [convolution(5, 32), *sequence(1, kind="criss_cross"), convolution(32, 8, 2)],
    "between blocks": lambda: [
        convolution(5, 32),
        *sequence(2, kind="criss_cross"),
        convolution(32, 32, 2),
        *sequence(3),
    ],
    "two between blocks": lambda: [
        convolution(5, 32),
        *sequence(1, kind="criss_cross"),
        convolution(32, 40, 2),
        convolution(40, 32),
        *sequence(1),
    ],
}


@pytest.mark.parametrize("name", SEQUENCES)
def test_together_with_convolutions(isa, name):
    """Also on batches that pass several convolutions in groups of 4 or 6 images for each thread."""
    layers, threads = SEQUENCES[name](), torch.get_num_threads()
    for x in (tokens(3, 7, 10, 5), tokens(7, 62, 66, 5), tokens(2, 9, 10, 6)[..., 1:], tokens(1, 9, 10, 5)[:0]):
        with torch.no_grad():
            expected = one_by_one(layers, x)
            for count in (1, 2):
                torch.set_num_threads(count)
                result = run_together(layers, x)
                torch.set_num_threads(threads)
                assert torch.equal(result, expected)


def test_together_wrong_channels():
    with torch.no_grad(), pytest.raises(ValueError, match="expected 5 channels for a convolution, got 6"):
        run_together([convolution(5, 32), convolution(32, 32)], tokens(1, 9, 10, 6))


def test_together_without_kernel():
    """Heads that the kernel does not rotate, and convolutions of other sizes."""
    with torch.no_grad():
        x, block = tokens(1, 6, 6, 36), fuse(make(dim=36, heads=2), "native")
        assert run_together([block], x) is None
        pointwise = FusedConv(torch.nn.Conv2d(36, 8, 1), gelu=False)
        pointwise.backend = "native"
        assert run_together([pointwise], x) is None


def test_together_empty_batch():
    blocks, x = sequence(2), torch.empty(0, 6, 6, 32)
    with torch.no_grad():
        assert run_together(blocks, x).shape == x.shape


def test_together_only_where_nobody_watches(monkeypatch):
    """Other modules, hooks, modes, gradients, dtypes and layers that are not known to run in the kernel."""
    monkeypatch.setattr(fused, "_choices", {})
    monkeypatch.setattr(module, "_choices", {})
    x, blocks = tokens(1, 6, 6, 32), sequence(2)
    conv = convolution(32, 32)
    layers = [blocks[0], conv, blocks[1]]
    assert run_together(layers, x) is None  # gradients
    with torch.no_grad():
        assert run_together(layers, x) is not None
        assert run_together([], x) is None
        assert run_together([*layers, make()], x) is None
        assert run_together([*layers, torch.nn.Conv2d(6, 6, 1)], x) is None
        assert run_together(layers, x.double()) is None
        with FlopCounterMode(display=False):
            assert run_together(layers, x) is None
        for watched in (blocks[1], blocks[1].proj, conv):
            handle = watched.register_forward_hook(lambda *arguments: None)
            assert run_together(layers, x) is None
            handle.remove()
        for watched in (blocks[1], blocks[1].proj, conv):
            watched.forward = watched.forward
            assert run_together(layers, x) is None
            del watched.forward
        assert run_together(layers, x) is not None
        blocks[1].attn.backend = "auto"
        assert run_together(layers, x) is None  # not measured yet
        monkeypatch.setattr(fused, "fastest", lambda candidates: STEPS)
        blocks[1](x)
        assert run_together(layers, x) is None
        blocks[1].attn.backend = "torch"
        assert run_together(layers, x) is None
        blocks[1].attn.backend, conv.backend = "native", "auto"
        assert run_together(layers, x) is None  # not measured yet
        for choice in ("packed", "torch"):
            monkeypatch.setattr(module, "_choices", {})
            monkeypatch.setattr(module, "fastest", lambda candidates, choice=choice: choice)
            conv(x)
            assert (run_together(layers, x) is None) == (choice == "torch")
        conv.backend = "torch"
        assert run_together(layers, x) is None


def test_together_convolution_with_other_tensors():
    """Other dtypes, subclasses and parameters run as the convolution by itself runs them."""

    class Marked(torch.Tensor):
        pass

    x = tokens(1, 6, 6, 32)
    with torch.no_grad():
        for change in (torch.Tensor.double, lambda weight: weight.as_subclass(Marked), torch.nn.Parameter):
            conv = convolution(32, 32)
            assert run_together([conv], x) is not None
            conv.weight = change(conv.weight)
            assert run_together([conv], x) is None
