"""Native linear attention against the reference in float64: values, every gradient, any strides, any thread."""

import functools
import multiprocessing
import resource

import pytest
import torch

import ppma
from ppma.ops.backends.native import library
from ppma.testing import GRIDS, assert_accurate, outputs_and_gradients, random_log_decay

pytestmark = pytest.mark.native

PATHS = ["v2h", "h2v", "2d"]


def attention(paths="2d", backend="native"):
    return functools.partial(ppma.linear_attention, paths=paths, backend=backend)


def inputs(grid, d, dv, batch=(2, 2), seed=0):
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(*batch, *grid, d, generator=generator) for _ in range(2))
    v = torch.randn(*batch, *grid, dv, generator=generator)
    return [q, k, v, *(random_log_decay(*batch, *grid, generator=generator) for _ in range(2))]


def roundings(grid, d, dv):
    """The scan's two chains along each axis, and the sums over features and channels."""
    return 2 * sum(grid) + d + dv + 8


@pytest.mark.parametrize("paths", PATHS)
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_accuracy(grid, paths):
    assert_accurate(attention(paths), attention(paths, "reference"), inputs(grid, 5, 3), roundings(grid, 5, 3))


@pytest.mark.parametrize(("d", "dv"), [(1, 1), (1, 40), (20, 1), (16, 16), (7, 33), (35, 8)])
def test_accuracy_any_channels(d, dv):
    grid = (3, 4)
    assert_accurate(
        attention(), attention(backend="reference"), inputs(grid, d, dv, batch=(1,)), roundings(grid, d, dv)
    )


@pytest.mark.parametrize("isa", library.INSTRUCTION_SETS)
def test_every_instruction_set(isa, monkeypatch):
    if isa not in library.INSTRUCTION_SETS[library.INSTRUCTION_SETS.index(library.isa()) :]:
        pytest.skip(f"this CPU has no {isa}")
    monkeypatch.setattr(library, "forced_isa", isa)
    grid = (5, 6)
    for paths in PATHS:
        assert_accurate(
            attention(paths), attention(paths, "reference"), inputs(grid, 4, 19, batch=(1,)), roundings(grid, 4, 19)
        )


@pytest.mark.parametrize(("grid", "d", "dv"), [((140, 256), 2, 3), ((3, 600), 3, 17), ((40, 50), 18, 5)], ids=str)
def test_accuracy_large_grid(grid, d, dv):
    """Against the PyTorch backend in float64; gradients of the first in several blocks of rows."""
    tensors = inputs(grid, d, dv, batch=(1,))
    assert_accurate(attention(), attention(backend="torch"), tensors, roundings(grid, d, dv))


@pytest.mark.parametrize("log_decay", [0.0, -torch.inf])
def test_constant_decays(log_decay):
    grid = (6, 5)
    q, k, v, *_ = inputs(grid, 4, 6)
    decays = [torch.full((2, 2, *grid), log_decay) for _ in range(2)]
    assert_accurate(attention(), attention(backend="reference"), [q, k, v, *decays], roundings(grid, 4, 6))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_edges_outside_grid(value):
    tensors = inputs((4, 5), 3, 6)
    before = outputs_and_gradients(attention(), tensors)
    tensors[3][..., :, 0] = value
    tensors[4][..., 0, :] = value
    after = outputs_and_gradients(attention(), tensors)
    for a, b in zip(before, after, strict=True):
        assert torch.equal(a, b)
    assert not after[4][..., :, 0].any()
    assert not after[5][..., 0, :].any()


@pytest.mark.parametrize("dv", [16, 9])
def test_bits_any_strides(dv):
    """q, k and v as slices of one packed projection, channels first, and gradients expanded."""
    grid, d = (5, 6), 4
    q, k, v, log_alpha, log_beta = inputs(grid, d, dv)
    packed = torch.cat([q, k, v], -1).transpose(1, 2).transpose(2, 3).contiguous()  # (B, H, W, heads, channels)
    slices = [part.movedim(3, 1) for part in packed.split([d, d, dv], -1)]
    first = [tensor.movedim(-1, 1).contiguous().movedim(1, -1) for tensor in (q, k, v)]
    decays = [decay.mT.contiguous().mT for decay in (log_alpha, log_beta)]
    grad = torch.ones(()).expand(v.shape)

    def run(q, k, v, log_alpha, log_beta, grad):
        out = torch.ops.ppma.linear_attention(q, k, v, log_alpha, log_beta, "2d", "native")
        return [out, *torch.ops.ppma.linear_attention_backward(grad, q, k, v, log_alpha, log_beta, "2d", "native")]

    plain = run(q, k, v, log_alpha, log_beta, grad.contiguous())
    for others in (slices, first):
        for a, b in zip(plain, run(*others, *decays, grad), strict=True):
            assert torch.equal(a, b)


def test_expanded_inputs():
    q, k, v, log_alpha, log_beta = inputs((4, 5), 3, 6, batch=())
    expanded = [tensor.expand(2, 3, *tensor.shape) for tensor in (q, k, v, log_alpha, log_beta)]
    copies = [tensor.contiguous() for tensor in expanded]
    for a, b in zip(*(outputs_and_gradients(attention(), tensors) for tensors in (expanded, copies)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("grid", "d", "dv", "batch"), [((33, 20), 3, 16, (1,)), ((8, 9), 18, 40, (2, 3)), ((150, 256), 2, 8, (1,))], ids=str
)
def test_bits_any_threads(grid, d, dv, batch):
    tensors = inputs(grid, d, dv, batch)
    before = torch.get_num_threads()
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(outputs_and_gradients(attention(), tensors))
    torch.set_num_threads(before)
    for one, two, three in zip(*results, strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one, three)


def test_bits_python_threads(assert_bits_in_python_threads):
    assert_bits_in_python_threads(attention(), [inputs((6, 7 + seed), 3, 5, seed=seed) for seed in range(4)])


def test_bits_after_fork(assert_bits_after_fork):
    assert_bits_after_fork(attention(), inputs((12, 14), 5, 16))


def test_decomposed_attention():
    s1, s2, v, log_alpha, log_beta = inputs((4, 5), 6, 7)
    assert torch.equal(
        ppma.decomposed_attention(s1, s2, v, log_alpha, log_beta, backend="native"),
        attention()(s1, s2, v, log_alpha, log_beta),
    )


@pytest.mark.parametrize("paths", PATHS)
def test_opcheck(paths):
    tensors = [tensor.requires_grad_() for tensor in inputs((3, 4), 3, 5)]
    torch.library.opcheck(torch.ops.ppma.linear_attention.default, (*tensors, paths, "native"))
    tensors = [tensor.detach() for tensor in tensors]
    torch.library.opcheck(torch.ops.ppma.linear_attention_backward.default, (tensors[2], *tensors, paths, "native"))


def _peak_of_a_large_grid(queue):
    tensors = inputs((1024, 1024), 16, 16, batch=(1,))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outputs_and_gradients(attention(), tensors)
    queue.put((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)


@pytest.mark.slow
def test_memory_linear_in_tokens():
    """A million tokens: K outer V alone would take 1 GiB."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=_peak_of_a_large_grid, args=(queue,))
    child.start()
    peak = queue.get(timeout=600)
    child.join(60)
    values = 1024 * 1024 * 16 * 4
    # Copies of q, k, v as leaves, the output and its cotangent in float64 and float32, three gradients: 10 of them.
    assert peak < 12 * values
