"""Capturing changes nothing, and what is captured is what the model computes with."""

import dataclasses

import pytest
import torch

from ppma import testing
from ppma.explore import capture, capture_image, find_record, query_attention, query_mask, query_panels, query_weights
from ppma.explore.query import WhatIf, decays, map_decays, unmasked
from ppma.layers import PolylineAttention
from ppma.masks import KINDS, PolylineMask
from ppma.ops import reference


def test_capture_outputs_identical(nano, image):
    model = nano.model
    with torch.no_grad():
        before = model(image[None])
        with capture(model) as records:
            inside = model(image[None])
        after = model(image[None])
    assert torch.equal(before, inside)
    assert torch.equal(before, after)
    assert len(records) == sum(model.config.depths)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_capture_gradients_identical(nano, image):
    def gradient():
        pixels = image[None].clone().requires_grad_()
        return torch.autograd.grad(nano.model(pixels).sum(), pixels)[0]

    plain = gradient()
    with capture(nano.model):
        captured = gradient()
    assert torch.equal(plain, captured)


def test_capture_hooks_removed_after_error(nano):
    with pytest.raises(RuntimeError, match="stop"), capture(nano.model):
        raise RuntimeError("stop")
    assert not any(module._forward_pre_hooks for module in nano.model.modules())


def test_find_record_every_block(nano, image):
    records = capture_image(nano.model, image)
    grids = [(16, 16)] + [(8, 8)] * 2 + [(4, 4)] * 4 + [(2, 2)]
    assert [record.grid for record in records] == grids
    assert find_record(records, 2, 3) is records[6]
    with pytest.raises(ValueError, match="expected an attention of the model"):
        find_record(records, 0, 1)
    with pytest.raises(ValueError, match="found none"):
        capture_image(torch.nn.Identity(), image)


def _with_v(record, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(record.q.shape, generator=generator)


@pytest.mark.parametrize("combine", ["hadamard", "logit"])
@pytest.mark.parametrize("kind", ["full", "criss_cross"])
def test_query_weights_match_reference(kind, combine, nano, image):
    """The query's weights times any v are the reference attention's output for that query."""
    record = dataclasses.replace(capture_image(nano.model, image)[3], kind=kind, combine=combine)
    query = (2, 1)
    v = _with_v(record)
    exact = reference.polyline_attention if kind == "full" else reference.criss_cross_attention
    scale = record.q.shape[-1] ** -0.5

    def expected(q, k, v, log_alpha, log_beta):
        return exact(q, k, v, log_alpha, log_beta, combine=combine, paths="2d", scale=scale)[:, :, query[0], query[1]]

    inputs = [record.q, record.k, v, *decays(record.mask)]
    weights = query_weights(record, query)
    actual = torch.einsum("bhij,bhijd->bhd", weights.double(), v.double())
    budget = testing.error_budget(expected, inputs, torch.float32, roundings=64)[0]
    difference = (actual - expected(*(t.double() for t in inputs))).abs().max().item()
    assert difference <= budget


@pytest.mark.parametrize("kind", ["full", "criss_cross"])
def test_query_mask_matches_reference(kind, nano, image):
    record = dataclasses.replace(capture_image(nano.model, image)[1], kind=kind)
    query = (6, 1)
    for paths, several in (("2d", 2), ("v2h", 1), ("h2v", 1)):
        masked = dataclasses.replace(record, mask=PolylineMask(*decays(record.mask), paths))
        expected = reference.polyline_mask(*decays(record.mask), paths=paths)[:, :, 6 * 8 + 1] / several
        actual = query_mask(masked, query).flatten(2)
        # Values in [0, 1] after a softmax over 64 equal scores, a product and a factor: a few roundings of 1.
        assert (actual.double() - expected).abs().max() <= 16 * torch.finfo(torch.float32).eps


def test_query_mask_scan_masks(nano, image):
    record = capture_image(nano.model, image)[3]
    assert record.kind == "full"
    for kind in ("cross", "hilbert"):
        changed = WhatIf(mask=kind)(record)
        expected = changed.mask.dense().exp().mean(0)[:, :, 5].unflatten(-1, record.grid)
        torch.testing.assert_close(query_mask(changed, (1, 1)), expected, rtol=0, atol=1e-6)


def test_query_attention_unmasked_sums_to_one(nano, image):
    for record in capture_image(nano.model, image):
        middle = (record.grid[0] // 2, record.grid[1] // 2)
        for combine in ("hadamard", "logit"):
            bare = unmasked(dataclasses.replace(record, combine=combine))
            total = query_attention(bare, middle).sum((-2, -1))
            torch.testing.assert_close(total, torch.ones_like(total), rtol=0, atol=1e-5)


def test_capture_inference_mode(nano, image):
    with torch.inference_mode(), capture(nano.model) as records:
        nano.model(image[None])
    expected = query_panels(capture_image(nano.model, image)[0], (3, 3))
    actual = query_panels(records[0], (3, 3))
    assert torch.equal(actual.masked_attention, expected.masked_attention)


def test_capture_reproduces_module_output(nano, image):
    """Projecting the captured weights times v, with the local part added, gives what the module returns."""
    module = nano.model.stages[1].blocks[0].attn
    outputs, inputs = [], []

    def look(_, args, out):
        inputs.append(args[0])
        outputs.append(out)

    handle = module.register_forward_hook(look)
    record = find_record(capture_image(nano.model, image), 1, 0)
    handle.remove()
    v = module.inputs(inputs[0]).v
    H, W = record.grid
    rows = [torch.einsum("bhij,bhijd->bhd", query_weights(record, (i, j)), v) for i in range(H) for j in range(W)]
    out = torch.stack(rows, 1).flatten(2).unflatten(1, (H, W))
    values = v.movedim(1, -2).flatten(-2)
    expected = module.proj(module.local.add(values, out))
    # Both sum the same products in float32 in another order.
    torch.testing.assert_close(outputs[0], expected.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("formulation", ["paper", "release"])
def test_capture_prefix_tokens(formulation):
    torch.manual_seed(0)
    attention = PolylineAttention(16, heads=2, formulation=formulation)
    tokens = torch.randn(1, 2 + 3 * 4, 16)
    with capture(attention) as records, torch.no_grad():
        attention(tokens, grid=(3, 4))
    (record,) = records
    assert (record.grid, record.prefix) == ((3, 4), 2)
    weights = query_attention(unmasked(record), (1, 2))
    scores = (record.q @ record.k.mT)[:, :, 0] * 8**-0.5
    expected = scores.softmax(-1)[:, :, 2 + 6, 2:].unflatten(-1, (3, 4))
    torch.testing.assert_close(weights, expected)
    torch.testing.assert_close(query_mask(record, (1, 2))[..., 1, 2], torch.ones(1, 2))


def test_what_if_strength(nano, image):
    record = capture_image(nano.model, image)[0]
    stronger = WhatIf(strength=3.0)(record)
    for before, after in zip(decays(record.mask), decays(stronger.mask), strict=True):
        assert torch.equal(after, 3 * before)
    assert (query_mask(stronger, (4, 4)) <= query_mask(record, (4, 4)) + 1e-6).all()
    gone = WhatIf(strength=0)(map_to_zero_decays(record))
    torch.testing.assert_close(query_mask(gone, (4, 4)), torch.ones(1, 2, 16, 16), rtol=0, atol=1e-5)
    assert WhatIf()(record).mask is record.mask


def map_to_zero_decays(record):
    return dataclasses.replace(record, mask=map_decays(record.mask, lambda d: torch.full_like(d, -torch.inf)))


@pytest.mark.parametrize("mask", KINDS)
@pytest.mark.parametrize("stage", [0, 2])
def test_what_if_masks(mask, stage, nano, image):
    record = WhatIf(mask=mask, formulation="release")(find_record(capture_image(nano.model, image), stage, 0))
    assert record.combine == "logit"
    panels = query_panels(record, (1, 1), head=1)
    assert panels.mask[1, 1].item() == pytest.approx(1, abs=1e-5)
    assert torch.isfinite(panels.masked_attention).all()


def test_what_if_log_decays(nano, image):
    record = capture_image(nano.model, image)[2]
    given = -torch.rand(2, 8, 8, generator=torch.Generator().manual_seed(0))
    changed = WhatIf(log_decays=(given[0], given[1]))(record)
    panels = query_panels(changed, (0, 0), head=0)
    torch.testing.assert_close(panels.alpha[:, 1:], given[0].exp()[:, 1:])
    assert panels.alpha[:, 0].isnan().all()
    assert panels.beta[0].isnan().all()


def test_query_errors(nano, image):
    record = capture_image(nano.model, image)[0]
    with pytest.raises(ValueError, match="query: expected a token of the 16 x 16 grid"):
        query_weights(record, (16, 0))
    with pytest.raises(ValueError, match="head: expected 0 to 1"):
        query_panels(record, (0, 0), head=2)
    with pytest.raises(ValueError, match="strength: expected"):
        WhatIf(strength=-1)
    with pytest.raises(ValueError, match="mask: expected one of"):
        WhatIf(mask="3d")
