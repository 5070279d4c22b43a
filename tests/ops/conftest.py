"""For the tests of the operators, in this process and in Triton's interpreter."""

import functools
import multiprocessing
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from ppma.ops.backends.native import library
from ppma.testing import outputs_and_gradients


@pytest.fixture(params=library.available() or ["none"])
def isa(request, monkeypatch):
    """Each instruction set that this CPU has, in turn."""
    monkeypatch.setattr(library, "forced_isa", request.param)
    return request.param


@pytest.fixture(autouse=True)
def poisoned_memory():
    """`torch.empty`, `empty_like` and `new_empty` return NaN, so that a place that is never written shows.

    On a GPU the products of the reference have no deterministic form as cuBLAS is set up: there PyTorch only warns.
    """
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=torch.cuda.is_available())
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def assert_bits_in_python_threads():
    """Takes a function and lists of tensors: output and gradients are the same bits when four threads run at once."""

    def check(function, jobs):
        expected = [outputs_and_gradients(function, tensors) for tensors in jobs]
        with ThreadPoolExecutor(4) as pool:
            results = list(pool.map(functools.partial(outputs_and_gradients, function), jobs * 4))
        for result, exact in zip(results, expected * 4, strict=True):
            assert all(map(torch.equal, result, exact))

    return check


@pytest.fixture
def assert_bits_after_fork():
    """Takes a function and its tensors: the output is the same bits in a forked process, which does not hang.

    Not through autograd: its threads do not survive a fork.
    """

    def check(function, tensors):
        expected = function(*tensors)

        def compare():
            assert torch.equal(function(*tensors), expected)

        child = multiprocessing.get_context("fork").Process(target=compare, daemon=True)
        child.start()
        child.join(60)
        assert child.exitcode == 0

    return check


# |B^T|, |G| and |A^T| of csrc/winograd.cpp for each stride, with one row of G for each place.
_WINOGRAD = {
    1: (
        [[1, 0, 1, 0], [0, 1, 1, 0], [0, 1, 1, 0], [0, 1, 0, 1]],
        [[1, 0, 0], [0.5, 0.5, 0.5], [0.5, 0.5, 0.5], [0, 0, 1]],
        [[1, 1, 1, 0], [0, 1, 1, 1]],
    ),
    2: (
        [[1, 0, 1, 0, 0], [0, 0, 1, 0, 0], [0, 1, 0, 0, 0], [0, 0, 1, 0, 1], [0, 0, 0, 1, 0]],
        [[1, 0, 0], [1, 0, 1], [0, 1, 0], [0, 0, 1], [0, 1, 0]],
        [[1, 1, 1, 0, 0], [0, 1, 0, 1, 1]],
    ),
}


def _winograd_magnitudes(x, weight, bias, stride=1):
    """What Winograd's algorithm sums, with all signs positive: A^T [(G g G^T) * (B^T d B)] A."""
    spread, of_weight, gather = (torch.tensor(matrix, dtype=torch.float64) for matrix in _WINOGRAD[stride])
    size, step = spread.shape[1], 2 * stride
    out = [-(-length // stride) for length in x.shape[1:3]]
    # A tile begins `step` inputs behind the last one, the first of them at the border.
    below, right = (step * ((n + 1) // 2 - 1) + size - 1 - length for n, length in zip(out, x.shape[1:3], strict=True))
    padded = torch.nn.functional.pad(x.double().abs(), (0, 0, 1, right, 1, below))
    tiles = padded.unfold(1, size, step).unfold(2, size, step)  # batch, rows, columns, inputs, size, size
    inputs = torch.einsum("ay,btsiyx,cx->btsiac", spread, tiles, spread)
    weights = torch.einsum("ay,oiyx,cx->oiac", of_weight, weight.double().abs(), of_weight)
    sums = torch.einsum("btsiac,oiac->btsoac", inputs, weights)
    outputs = torch.einsum("pa,btsoac,qc->btpsqo", gather, sums, gather).flatten(1, 2).flatten(2, 3)
    return outputs[:, : out[0], : out[1]] + bias.double().abs()


@pytest.fixture
def winograd_magnitudes():
    """A function of x, weight, bias and stride: magnitudes that bound the error of Winograd's algorithm."""
    return _winograd_magnitudes
