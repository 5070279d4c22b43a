import logging

import pytest


@pytest.fixture(autouse=True)
def quiet_tracing():
    """PyTorch's tracing logs every step where somebody listens, as pytest does; that would double its time."""
    trace = logging.getLogger("torch.__trace")
    before, trace.propagate = trace.propagate, False
    yield
    trace.propagate = before
