import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread():
    """Results must not depend on how sums are split between threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
