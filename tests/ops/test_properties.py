"""Random shapes, batch axes and decays: the fast operators agree with the definition."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ppma
from ppma.testing import outputs_and_gradients

LOG_DECAYS = st.sampled_from([0.0, -torch.inf, -1e-6, -80.0, -1e30, -0.3, -1.5])


@st.composite
def decay_tensors(draw, axes=2, largest=4):
    """A batch shape, a grid and one log-decay tensor for each axis, in float64."""
    batch = tuple(draw(st.lists(st.integers(1, 2), max_size=3)))
    grid = tuple(draw(st.lists(st.integers(1, largest), min_size=axes, max_size=axes)))
    seed = draw(st.integers(0, 2**31))
    palette = torch.tensor(draw(st.lists(LOG_DECAYS, min_size=1, max_size=4)), dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    pick = torch.randint(0, len(palette), (axes, *batch, *grid), generator=generator)
    return batch, grid, list(palette[pick]), generator


def assert_same(function, inputs):
    for fast, exact in zip(
        outputs_and_gradients(lambda *t: function(*t, backend="torch"), inputs),
        outputs_and_gradients(lambda *t: function(*t, backend="reference"), inputs),
        strict=True,
    ):
        torch.testing.assert_close(fast, exact, rtol=1e-10, atol=1e-12)


@settings(max_examples=30, deadline=None)
@given(decay_tensors(), st.sampled_from(["v2h", "h2v", "2d"]), st.booleans())
def test_mask(tensors, paths, log):
    _, _, (log_alpha, log_beta), _ = tensors
    fast = ppma.polyline_mask(log_alpha, log_beta, paths=paths, log=log)
    exact = ppma.ops.reference.polyline_mask(log_alpha, log_beta, paths=paths, log=log)
    # A finite log-decay below -1e4 is a decay of 0 in every floating-point type and may be reported as -inf.
    # A log entry is a difference of potentials, each a sum of at most 8 edges down to -80: off by a few 640 * 2^-53.
    torch.testing.assert_close(fast.clamp_min(-1e4), exact.clamp_min(-1e4), rtol=1e-12, atol=1e-12 if log else 0)


@settings(max_examples=20, deadline=None)
@given(
    decay_tensors(),
    st.sampled_from(["v2h", "h2v", "2d"]),
    st.sampled_from(["hadamard", "logit"]),
    st.sampled_from([ppma.polyline_attention, ppma.criss_cross_attention]),
    st.integers(1, 4),
    st.integers(1, 4),
)
def test_softmax_attention(tensors, paths, combine, function, d, dv):
    batch, grid, decays, generator = tensors
    q, k = torch.randn(2, *batch, *grid, d, generator=generator, dtype=torch.float64)
    v = torch.randn(*batch, *grid, dv, generator=generator, dtype=torch.float64)
    assert_same(lambda *t, backend: function(*t, paths=paths, combine=combine, backend=backend), (q, k, v, *decays))


@settings(max_examples=15, deadline=None)
@given(decay_tensors(), st.sampled_from(["v2h", "h2v", "2d"]), st.integers(1, 4), st.integers(1, 4))
def test_linear_attention(tensors, paths, d, dv):
    batch, grid, decays, generator = tensors
    q, k = torch.randn(2, *batch, *grid, d, generator=generator, dtype=torch.float64)
    v = torch.randn(*batch, *grid, dv, generator=generator, dtype=torch.float64)
    assert_same(lambda *t, backend: ppma.linear_attention(*t, paths=paths, backend=backend), (q, k, v, *decays))


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 4).flatmap(lambda axes: decay_tensors(axes, 3)), st.sampled_from(["forward", "reverse", "both"]))
def test_nd_scan(tensors, paths):
    batch, grid, decays, generator = tensors
    x = torch.randn(*batch, *grid, 2, generator=generator, dtype=torch.float64)
    assert_same(lambda x, *d, backend: ppma.polyline_scan_nd(x, d, paths=paths, backend=backend), (x, *decays))
