"""The native softmax attentions against the reference, on every instruction set that this CPU has."""

import concurrent.futures
import functools
import multiprocessing
import subprocess
import sys

import pytest
import torch

import ppma
from ppma.ops.backends import native
from ppma.ops.backends.native import library
from ppma.ops.options import AttentionOptions
from ppma.testing import GRIDS, error_budget, outputs_and_gradients, random_log_decay

pytestmark = pytest.mark.native

PATHS = ["v2h", "h2v", "2d"]
COMBINES = ["hadamard", "logit"]
FUNCTIONS = [ppma.polyline_attention, ppma.criss_cross_attention]
# Channels that fill no vector, that differ between q and v, and that fill vectors of every width.
CHANNELS = [(1, 1), (7, 19), (19, 7), (16, 32)]
# Blocks of several query rows and of parts of a row, several tiles of keys, lines longer than a vector.
LARGE_GRIDS = [(17, 23), (2, 203), (120, 2)]


@pytest.fixture
def threads():
    """Sets the number of threads and puts it back."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def make_inputs(grid, d=8, dv=8, batch=1, heads=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, heads, *grid)
    values = [torch.randn(*shape, channels, generator=generator) for channels in (d, d, dv)]
    return [*values, *(random_log_decay(*shape, generator=generator) for _ in range(2))]


def roundings(grid, d):
    """Dot product of d, softmax over all tokens, two lines of decays, the products with v: one rounding each."""
    return d + grid[0] * grid[1] + 2 * sum(grid) + 16


@functools.cache
def expected(function, combine, paths, grid, channels, exact):
    """Inputs, exact results and budget, computed once for all instruction sets."""
    inputs = make_inputs(grid, *channels)
    run = functools.partial(function, combine=combine, paths=paths, backend=exact)
    budget = error_budget(run, inputs, torch.float32, roundings(grid, channels[0]))
    return inputs, outputs_and_gradients(run, [tensor.double() for tensor in inputs]), budget


def check(function, combine, paths, grid, channels, exact):
    inputs, wanted, budget = expected(function, combine, paths, grid, channels, exact)
    run = functools.partial(function, combine=combine, paths=paths, backend="native")
    assert_within(outputs_and_gradients(run, inputs), wanted, budget)
    with torch.no_grad():  # another kernel on small grids: it keeps nothing for a backward pass
        assert_within([run(*inputs)], wanted[:1], budget[:1])


def assert_within(results, wanted, budget):
    names = ["output", *(f"gradient of {name}" for name in ("q", "k", "v", "log_alpha", "log_beta"))]
    for name, result, exact, bound in zip(names[: len(results)], results, wanted, budget, strict=True):
        assert result.shape == exact.shape, name
        error = (result.double() - exact).abs().max().item()
        assert error <= bound, f"{name}: off by {error:.3e}, budget {bound:.3e}"


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("paths", PATHS)
@pytest.mark.parametrize("combine", COMBINES)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_accuracy(isa, function, combine, paths, grid):
    check(function, combine, paths, grid, (3, 5), exact="reference")


@pytest.mark.parametrize("channels", CHANNELS, ids=str)
@pytest.mark.parametrize("combine", COMBINES)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_accuracy_any_channels(isa, function, combine, channels):
    check(function, combine, "2d", (4, 5), channels, exact="reference")


@pytest.mark.parametrize("grid", LARGE_GRIDS, ids=str)
@pytest.mark.parametrize("paths", PATHS)
@pytest.mark.parametrize("combine", COMBINES)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_accuracy_large_grid(isa, function, combine, paths, grid):
    """The torch backend in float64 stands for the reference, which it equals and which would take minutes here."""
    check(function, combine, paths, grid, (5, 6), exact="torch")


@pytest.mark.parametrize("combine", COMBINES)
def test_accuracy_long_lines(combine):
    """Row maps of more than a million numbers are not kept between the two halves of the chain."""
    check(ppma.criss_cross_attention, combine, "2d", (3, 700), (4, 4), exact="torch")


def with_large_scores(magnitude, strongest=60.0):
    """Scores up to `magnitude` and decays down to exp(-strongest)."""
    grid = (3, 9)
    q, k, v, _, _ = make_inputs(grid, 4, 4)
    q = q / q.norm(dim=-1, keepdim=True) * magnitude
    k = k / k.norm(dim=-1, keepdim=True)
    generator = torch.Generator().manual_seed(1)
    return [q, k, v, *(-strongest * torch.rand(1, 2, *grid, generator=generator) for _ in range(2))]


def with_scale_1(function, combine):
    """The native kernel and the reference."""
    return (functools.partial(function, combine=combine, scale=1.0, backend=name) for name in ("native", "reference"))


# 35: up to there full attention multiplies masks in linear form, with several weights above 0 where decays are mild.
@pytest.mark.parametrize(("magnitude", "strongest"), [(34.9, 2.0), (34.9, 60.0), (35.1, 2.0), (140.0, 60.0)])
@pytest.mark.parametrize("combine", COMBINES)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_large_scores_strong_decays(isa, function, combine, magnitude, strongest):
    """A softmax with the log mask inside sees keys whose unmasked weight underflows."""
    inputs = with_large_scores(magnitude, strongest)
    run, exact = with_scale_1(function, combine)
    budget = error_budget(exact, inputs, torch.float32, roundings((3, 9), 4))
    wanted = outputs_and_gradients(exact, [tensor.double() for tensor in inputs])
    assert_within(outputs_and_gradients(run, inputs), wanted, budget)


@pytest.mark.parametrize("combine", COMBINES)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_large_scores_no_overflow(isa, function, combine):
    """Every softmax picks one key; what is left of the gradients is below the rounding of such scores."""
    inputs = with_large_scores(1e6)
    run, exact = with_scale_1(function, combine)
    results = outputs_and_gradients(run, inputs)
    assert all(torch.isfinite(result).all() for result in results)
    error = (results[0] - exact(*(tensor.double() for tensor in inputs))).abs().max()
    assert error <= error_budget(exact, inputs, torch.float32, roundings((3, 9), 4))[0]


@pytest.mark.parametrize("combine", COMBINES)
@pytest.mark.parametrize("score", [-88.9, -89.0, -266.3])
def test_large_scores_below_padding(isa, combine, score):
    """Keys that pad a row score 0, above all others here: no exponential of theirs may count."""
    tokens = (1, 1, 7, 7)
    q, k = torch.full((*tokens, 4), score), torch.full((*tokens, 4), 0.25)
    v = torch.randn(*tokens, 8, generator=torch.Generator().manual_seed(0))
    run = functools.partial(ppma.polyline_attention, combine=combine, scale=1.0)
    with torch.no_grad():
        out = run(q, k, v, torch.zeros(tokens), torch.zeros(tokens), backend="native")
    paths = 2 if combine == "hadamard" else 1
    torch.testing.assert_close(out, paths * v.mean((2, 3), keepdim=True).expand_as(v), rtol=1e-5, atol=1e-6)


def test_large_scores_log_mask(isa):
    """The key with the largest score lies behind a decay that costs it more than its lead."""
    q = torch.tensor([[[12.0], [12.0]]]).view(1, 2, 1)
    k = torch.tensor([[[0.0], [12.0]]]).view(1, 2, 1)
    v = torch.tensor([[[1.0], [2.0]]]).view(1, 2, 1)
    log_alpha = torch.tensor([[0.0, -300.0]])
    for function in FUNCTIONS:
        out = function(q, k, v, log_alpha, torch.zeros(1, 2), combine="logit", scale=1.0, backend="native")
        assert out.flatten().tolist() == [1.0, 2.0]


@pytest.mark.parametrize("combine", COMBINES)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_edges_outside_grid(isa, function, combine):
    inputs = make_inputs((5, 18))
    poisoned = [tensor.clone() for tensor in inputs]
    poisoned[3][..., :, 0] = torch.nan
    poisoned[4][..., 0, :] = torch.inf
    run = functools.partial(function, combine=combine, backend="native")
    clean, dirty = outputs_and_gradients(run, inputs), outputs_and_gradients(run, poisoned)
    assert all(torch.equal(a, b) for a, b in zip(clean, dirty, strict=True))
    assert (clean[4][..., :, 0] == 0).all()
    assert (clean[5][..., 0, :] == 0).all()


@pytest.mark.parametrize("combine", COMBINES)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_gradient_decay_0(isa, function, combine):
    inputs = make_inputs((6, 9))
    *_, grad_alpha, grad_beta = outputs_and_gradients(
        functools.partial(function, combine=combine, backend="native"), inputs
    )
    assert (grad_alpha[inputs[3] == -torch.inf] == 0).all()
    assert (grad_beta[inputs[4] == -torch.inf] == 0).all()


@pytest.mark.parametrize("combine", COMBINES)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_bits_any_strides(isa, function, combine):
    """Parts of one projection, channels that do not lie side by side, transposed grids, expanded decays."""
    grid, heads, d = (5, 7), 2, 8
    generator = torch.Generator().manual_seed(3)
    q, v = torch.randn(2, *grid, 2, heads, d, generator=generator).movedim(3, 0).movedim(-2, 2).unbind(0)
    k = torch.randn(2, heads, d, *reversed(grid), generator=generator).movedim(2, -1).transpose(2, 3)
    log_alpha = random_log_decay(1, 1, *reversed(grid), generator=generator).mT.expand(2, heads, *grid)
    log_beta = random_log_decay(1, heads, 1, 1, generator=generator).expand(2, heads, *grid)
    views = (q, k, v, log_alpha, log_beta)

    def run(tensors):
        leaves = [tensor.detach().requires_grad_() for tensor in tensors]
        out = function(*leaves, combine=combine, backend="native")
        cotangent = torch.randn(1, heads, 1, 1, 1, generator=torch.Generator().manual_seed(4)).expand(out.shape)
        return [out.detach(), *torch.autograd.grad(out, leaves, cotangent)]

    for a, b in zip(run(views), run([tensor.contiguous() for tensor in views]), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_gradient_float64_decays(function):
    q, k, v, log_alpha, log_beta = make_inputs((3, 4))
    results = outputs_and_gradients(
        functools.partial(function, backend="native"), (q, k, v, log_alpha.double(), log_beta.double())
    )
    assert [result.dtype for result in results] == [torch.float32] * 4 + [torch.float64] * 2


# Fewer heads than threads (all threads on one head), some more, and many.
@pytest.mark.parametrize("heads", [1, 3, 16])
@pytest.mark.parametrize("paths", ["v2h", "2d"])
@pytest.mark.parametrize("combine", COMBINES)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_bits_any_threads(function, combine, paths, heads, threads):
    inputs = make_inputs((16, 20), 8, 12, heads=heads)
    run = functools.partial(function, combine=combine, paths=paths, backend="native")
    threads(1)
    alone = outputs_and_gradients(run, inputs)
    for number in (2, 3, 4):
        threads(number)
        assert all(torch.equal(a, b) for a, b in zip(alone, outputs_and_gradients(run, inputs), strict=True))


def both(inputs):
    """Output and gradients of both attentions in both forms."""
    return [
        result
        for function in FUNCTIONS
        for combine in COMBINES
        for result in outputs_and_gradients(functools.partial(function, combine=combine, backend="native"), inputs)
    ]


def test_bits_python_threads(threads):
    """Different shapes at the same time, so that scratch memory of one would not do for another."""
    threads(2)
    problems = [make_inputs((4 + 3 * n, 15 - 2 * n), 8 + n, 12 - n, seed=n) for n in range(4)]
    alone = [both(inputs) for inputs in problems]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            for wanted, results in zip(alone, pool.map(both, problems), strict=True):
                assert all(torch.equal(a, b) for a, b in zip(wanted, results, strict=True))


def kernels(inputs):
    """As `both`, without autograd: its threads do not survive a fork."""
    results = []
    for combine in COMBINES:
        options = AttentionOptions(combine, "2d", 0.5)
        out, *saved = native.polyline_attention(*inputs, options)
        results += [out, *native.polyline_attention_backward(inputs[2], *inputs, out, *saved, options)]
        results.append(native.criss_cross_attention(*inputs, options))
        results += native.criss_cross_attention_backward(inputs[2], *inputs, options)
    return results


def _in_child(inputs, connection):
    connection.send((library.threads(), [result.tolist() for result in kernels(inputs)]))


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="no fork here")
def test_after_fork(threads):
    """The parent's OpenMP threads do not exist in the child, which must not wait for them."""
    threads(2)
    inputs = make_inputs((9, 8))
    wanted = kernels(inputs)
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_in_child, args=(inputs, sender))
    child.start()
    try:
        assert receiver.poll(60), "the child hangs"
        number, results = receiver.recv()
    finally:
        child.kill()
        child.join()
    assert number == 1
    assert results == [result.tolist() for result in wanted]


@pytest.mark.parametrize("paths", ["h2v", "2d"])
@pytest.mark.parametrize("combine", COMBINES)
def test_opcheck(combine, paths):
    options = (combine, paths, 0.5, "native")
    tensors = make_inputs((3, 4), 4, 3)
    # A view whose heads are not the second axis in memory, as a fused projection gives it.
    tensors[0] = torch.randn(1, 3, 4, 2, 4).movedim(3, 1)
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    torch.library.opcheck(torch.ops.ppma.polyline_attention.default, (*leaves, *options))
    torch.library.opcheck(torch.ops.ppma.criss_cross_attention.default, (*leaves, *options))
    saved = torch.ops.ppma.polyline_attention(*tensors, *options)
    grad = torch.randn_like(saved[0])
    torch.library.opcheck(torch.ops.ppma.polyline_attention_backward.default, (grad, *tensors, *saved, *options))
    torch.library.opcheck(torch.ops.ppma.criss_cross_attention_backward.default, (grad, *tensors, *options))


MEMORY = """
import resource, sys, torch, ppma
torch.manual_seed(0)
function, width = getattr(ppma, sys.argv[1]), int(sys.argv[2])
def peak(width):
    tensors = [torch.randn(1, 1, width, width, 8, requires_grad=True) for _ in range(3)]
    tensors += [(-torch.rand(1, 1, width, width)).requires_grad_() for _ in range(2)]
    function(*tensors, backend="native").sum().backward()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
small = peak(8)
print(peak(width) - small)
"""


@pytest.mark.parametrize(("grid", "saved"), [((14, 14), False), ((15, 14), True), ((1, 201), True)], ids=str)
def test_first_output_saved_where_needed(grid, saved):
    """With all keys in one tile the backward pass needs no output of the first softmax, and none takes memory."""
    inputs = make_inputs(grid)
    *_, first = native.polyline_attention(*inputs, AttentionOptions("logit", "2d", 1.0))
    assert first.shape == (1, *inputs[2].shape)
    assert first.untyped_storage().nbytes() == 4 * (first.numel() if saved else 1)
    assert torch.ops.ppma.polyline_attention(*inputs, "logit", "2d", 1.0, "native")[2].is_contiguous()


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss counts in kilobytes on Linux")
@pytest.mark.parametrize(("function", "width"), [("polyline_attention", 96), ("criss_cross_attention", 192)])
def test_memory_linear_in_tokens(function, width):
    """The maps would take width^4 or 2 width^3 numbers; a token of inputs, outputs and gradients takes some 100."""
    result = subprocess.run([sys.executable, "-c", MEMORY, function, str(width)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    tokens = width**2
    assert int(result.stdout) * 1024 < 1000 * 4 * tokens


@pytest.mark.parametrize("combine", COMBINES)
@pytest.mark.parametrize("paths", ["v2h", "2d"])
@pytest.mark.parametrize("grid", [(13, 14), (9, 5)], ids=str)
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(("largest_logit", "strongest"), [(29.9, 300.0), (30.0, 20.0), (140.0, 20.0), (140.0, 300.0)])
def test_forward_strong_decays_large_logits(isa, function, combine, paths, grid, largest_logit, strongest):
    """Where masks underflow in linear form, a logit may still lift their keys above all others."""
    inputs = make_inputs(grid, d=16, dv=8)
    inputs[0] *= largest_logit / (inputs[0].norm(dim=-1).max() * inputs[1].norm(dim=-1).max() / 4)
    for index in (3, 4):
        inputs[index] = -strongest * torch.rand(inputs[index].shape, generator=torch.Generator().manual_seed(index))
    run = functools.partial(function, combine=combine, paths=paths)
    with torch.no_grad():
        result = run(*inputs, backend="native")
        exact = run(*(tensor.double() for tensor in inputs), backend="reference")
        plain = run(*inputs, backend="torch")
    # A logit of size L carries roundings of its d products, L / 2^24 each; a weight is off by as much, relatively.
    rounding = 2.0**-24 * (largest_logit * (16 + 2) + strongest * 4 + roundings(grid, 16))
    assert (result.double() - exact).abs().max() <= 2 * rounding * inputs[2].abs().max()
    assert (plain.double() - exact).abs().max() <= 2 * rounding * inputs[2].abs().max()


@pytest.mark.parametrize("combine", COMBINES)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_forward_decays_0_and_1(isa, function, combine):
    """With decays of 1 the weights add up to 1, and nothing crosses a decay of 0."""
    q, k, v, log_alpha, log_beta = make_inputs((6, 19), d=16, dv=16)
    run = functools.partial(function, combine=combine, paths="v2h", backend="native")
    with torch.no_grad():
        constant = run(q, k, torch.ones_like(v), torch.zeros_like(log_alpha), torch.zeros_like(log_beta))
        assert (constant - 1).abs().max() <= 2.0**-24 * roundings((6, 19), 16)
        log_alpha[..., 10] = -torch.inf
        other = v.clone()
        other[..., 10:, :] = 1e30
        before, after = (run(q, k, values, log_alpha, log_beta)[..., :10, :] for values in (v, other))
    assert torch.equal(before, after)


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_forward_nan(isa, function, index):
    """NaN in a query or key reaches the output of every token that uses it."""
    inputs = make_inputs((5, 9), d=16, dv=16)
    inputs[index][0, 0, 2, 3, 1] = torch.nan
    with torch.no_grad():
        out = function(*inputs, backend="native")
    assert out[0, 0, 2, 3].isnan().all()
    assert out[0, 1].isfinite().all()


@pytest.mark.parametrize("combine", COMBINES)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_forward_any_number_of_threads(isa, function, combine, batch, threads):
    inputs, results = make_inputs((14, 14), d=16, dv=16, batch=batch), []
    for count in (1, 2, 3):
        threads(count)
        with torch.no_grad():
            results.append(function(*inputs, combine=combine, backend="native"))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("combine", ["hadamard", "logit"])
def test_heads_of_small_and_large_scores(combine):
    """Different kernels compute them; none may depend on what lies beside it, nor on the number of threads."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 3, 7, 6, 8, generator=generator) for _ in range(3))
    q[:, 1] *= 1e4
    decays = [-torch.rand(1, 3, 7, 6, generator=generator) for _ in range(2)]
    run = functools.partial(ppma.polyline_attention, combine=combine, backend="native")
    together = outputs_and_gradients(run, (q, k, v, *decays))
    before = torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        assert all(map(torch.equal, together, outputs_and_gradients(run, (q, k, v, *decays))))
    torch.set_num_threads(before)
    for head in range(3):
        one = [tensor[:, head : head + 1] for tensor in (q, k, v, *decays)]
        alone = outputs_and_gradients(run, one)
        assert torch.equal(alone[0], together[0][:, head : head + 1])


@pytest.mark.parametrize("paths", ["2d", "v2h", "h2v"])
def test_certain_weights_have_no_gradient(paths):
    """Behind decays of 0 a token attends to itself alone: its score has no gradient, however long the key is."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 2, 5, 9, 8, generator=generator) for _ in range(3))
    walls = torch.full((2, 2, 5, 9), -torch.inf)
    run = functools.partial(ppma.polyline_attention, combine="logit", paths=paths, backend="native")
    out, grad_q, grad_k, *_ = outputs_and_gradients(run, (1e-4 * q, 1e4 * k, v, walls, walls))
    torch.testing.assert_close(out, v, rtol=4 * 2.0**-24, atol=0)  # an exponential, its inverse, their product
    assert (grad_q == 0).all()
    assert (grad_k == 0).all()
