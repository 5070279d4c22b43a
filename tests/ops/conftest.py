"""For the tests of the operators, in this process and in Triton's interpreter."""

import pytest
import torch


@pytest.fixture(autouse=True)
def poisoned_memory():
    """`torch.empty`, `empty_like` and `new_empty` return NaN, so that a place that is never written shows."""
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
