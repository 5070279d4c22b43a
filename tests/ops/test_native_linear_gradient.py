"""Gradients of linear layers against their sums in float64, on every instruction set that this CPU has."""

import pytest
import torch

from ppma.ops.backends.native.linear_gradient import input_gradient, weight_gradients
from ppma.ops.backends.native.trained_linear import FEWEST_ROWS
from ppma.ops.trained_linear import trained_linear

pytestmark = pytest.mark.native

# Tokens, inputs, outputs, and what each image counts: single numbers, no whole vector or tile, several blocks of rows,
# groups of inputs and outputs, chunks of rows that begin inside an image.
CASES = [
    (1, 1, 1, [1.0]),
    (5, 13, 7, [0.5, 0.0, 0.5]),
    (97, 64, 64, [1.0, 1.0]),
    (257, 33, 131, [0.0, 1.25, 0.0, 1.25, 1.25]),
    (40, 600, 21, [1.0]),
    (7, 1100, 300, [2.0, 0.0]),
    (1500, 17, 20, [1.0, 0.0, 1.0, 1.0, 1.0]),
    (3000, 70, 9, [1.0] * 6),
]


def make(tokens, inputs, outputs, counts):
    generator = torch.Generator().manual_seed(inputs + outputs)
    rows = tokens * len(counts)
    return (torch.randn(*shape, generator=generator) for shape in ((rows, outputs), (rows, inputs), (outputs, inputs)))


def factors(tokens, counts):
    return torch.tensor(counts, dtype=torch.float64).repeat_interleave(tokens)[:, None]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_weight_gradients(isa, case):
    tokens, *_, counts = case
    grad, x, _ = make(*case)
    counted = factors(tokens, counts) * grad.double()
    expected = counted.mT @ x.double(), counted.sum(0)
    magnitudes = counted.abs().mT @ x.abs().double(), counted.abs().sum(0)
    results = weight_gradients(grad, x, counts, max(counts))
    # Every row is a rounding at most; then the scale, and as many additions as there are chunks.
    roundings = tokens * len(counts) + 16
    for result, reference, magnitude in zip(results, expected, magnitudes, strict=True):
        assert result.shape == reference.shape
        assert ((result.double() - reference).abs() <= 2.0**-24 * roundings * magnitude).all()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_input_gradient(isa, case):
    tokens, inputs, outputs, counts = case
    grad, _, weight = make(*case)
    counted = factors(tokens, counts) * grad.double()
    result = input_gradient(grad, weight, counts, max(counts))
    limit = 2.0**-24 * (outputs + 2) * (counted.abs() @ weight.abs().double())
    assert result.shape == (tokens * len(counts), inputs)
    assert ((result.double() - counted @ weight.double()).abs() <= limit).all()


def test_images_that_count_0_are_not_read(isa):
    counts = [0.0, 2.0, 0.0, 2.0]
    grad, x, weight = make(50, 20, 30, counts)
    left_out = factors(50, counts)[:, 0] == 0
    grad[left_out], x[left_out] = float("nan"), float("inf")
    assert all(part.isfinite().all() for part in weight_gradients(grad, x, counts, 2.0))
    of_x = input_gradient(grad, weight, counts, 2.0)
    assert (of_x[left_out] == 0).all()
    assert of_x.isfinite().all()


@pytest.mark.parametrize("counts", [[], [0.0, 0.0]], ids=["no image", "none counts"])
def test_nothing_to_add(isa, counts):
    grad, x, _ = make(4, 5, 6, counts)
    of_weight, of_bias = weight_gradients(grad, x, counts, 0.0)
    assert of_weight.shape == (6, 5)
    assert (of_weight == 0).all()
    assert (of_bias == 0).all()


def test_any_number_of_threads(isa):
    before, results = torch.get_num_threads(), []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        found = []
        for case in CASES:
            grad, x, weight = make(*case)
            found += [*weight_gradients(grad, x, case[-1], max(case[-1])), input_gradient(grad, weight, case[-1], 1.0)]
        results.append(torch.cat([part.flatten() for part in found]))
    torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_strided_tensors(isa):
    grad, x, weight = make(9, 12, 10, [1.0])
    expected = *weight_gradients(grad, x, [1.0], 1.0), input_gradient(grad, weight, [1.0], 1.0)
    others = [tensor.mT.contiguous().mT for tensor in (grad, x, weight)]
    results = *weight_gradients(*others[:2], [1.0], 1.0), input_gradient(others[0], others[2], [1.0], 1.0)
    assert all(torch.equal(result, reference) for result, reference in zip(results, expected, strict=True))


@pytest.mark.parametrize("wanted", [("weight",), ("bias",), ("weight", "bias")], ids="+".join)
def test_frozen_parameters(wanted):
    """Frozen ones take no gradient, and the others leave out the same images."""
    images, tokens = 4, FEWEST_ROWS // 4
    counts = torch.tensor([2.0, 0.0, 2.0, 2.0])
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(images, tokens, 6, generator=generator)
    parameters = {"weight": torch.randn(5, 6, generator=generator), "bias": torch.zeros(5)}
    for name in wanted:
        parameters[name].requires_grad_()
    trained_linear(x, **parameters, factors=counts, backend="native").sum().backward()
    # The gradient of a sum is 1 everywhere.
    terms = {
        "weight": (counts[:, None, None] * x).flatten(0, 1).expand(5, -1, -1),
        "bias": torch.full((5, 3 * tokens), 2.0),
    }
    for name, parameter in parameters.items():
        if name not in wanted:
            assert parameter.grad is None
            continue
        limit = 2.0**-24 * (FEWEST_ROWS + 16) * terms[name].abs().sum(1)
        assert ((parameter.grad - terms[name].double().sum(1)).abs() <= limit).all()
