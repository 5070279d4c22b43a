"""The grid playground: its scan is the operator's, its masks are the reference's, its tables are checked."""

import pytest
import torch
from PIL import Image

from ppma import testing
from ppma.explore import playground, query_panels
from ppma.explore.view import (
    Choice,
    capture_prepared,
    changed_record,
    clickable_image,
    describe,
    panels_image,
    query_at,
)
from ppma.ops import reference


@pytest.mark.parametrize("grid", testing.GRIDS)
@pytest.mark.parametrize("path", ["v2h", "h2v"])
def test_scan_steps_last_is_mask_times_x(grid, path):
    generator = torch.Generator().manual_seed(0)
    alpha, beta = (testing.random_log_decay(*grid, generator=generator, dtype=torch.float64).exp() for _ in range(2))
    x = torch.randn(grid, generator=generator, dtype=torch.float64)
    steps = playground.scan_steps(x, alpha, beta, path)
    expected = reference.polyline_scan(x[..., None], alpha.log(), beta.log(), paths=path)[..., 0]
    torch.testing.assert_close(steps[-1].values, expected)
    H, W = grid
    assert len(steps) == 1 + (2 * H + 1) + (2 * W + 1)
    for step in steps[1:]:
        assert torch.isfinite(step.values[tuple(zip(*step.written, strict=True))]).all()


def test_scan_step_one_line():
    x = torch.zeros(3, 2, dtype=torch.float64)
    x[0, 0] = 1.0
    half = torch.full((3, 2), 0.5, dtype=torch.float64)
    steps = playground.scan_steps(x, half, half, "v2h")
    assert steps[2].written == ((1, 0), (1, 1))
    assert steps[2].values[1].tolist() == [0.5, 0.0]
    assert steps[2].values[2].isnan().all()
    assert steps[4].written == ((2, 0), (2, 1))  # upwards from the last row
    assert steps[7].values[:, 0].tolist() == [1.0, 0.5, 0.25]


def test_query_masks_match_reference():
    alpha, beta = playground.preset_decays("random", (4, 3))
    drawn = playground.query_masks(alpha, beta, (2, 1))
    for path, values in drawn.items():
        expected = reference.polyline_mask(alpha.log(), beta.log(), paths=path)[2 * 3 + 1].view(4, 3)
        torch.testing.assert_close(values, expected)
    axes = playground.masks_figure(drawn, (2, 1)).axes
    torch.testing.assert_close(torch.as_tensor(axes[0].images[0].get_array().data), drawn["v2h"])
    torch.testing.assert_close(torch.as_tensor(axes[2].images[0].get_array().data), drawn["2d"] / 2)


def test_step_figure_values():
    alpha, beta = playground.preset_decays("wall", (3, 4))
    x = torch.rand(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    step = playground.scan_steps(x, alpha, beta, "h2v")[3]
    (axis,) = playground.step_figure(step, largest=2.0).axes
    values = axis.images[0].get_array()
    assert axis.images[0].get_clim() == (0, 2)
    drawn = torch.as_tensor(values.filled(float("nan")))
    torch.testing.assert_close(drawn, step.values, rtol=0, atol=0, equal_nan=True)
    assert len(axis.patches) == len(step.written) == 3
    assert len(axis.texts) == int((~step.values.isnan()).sum())


def test_parse_decays_errors():
    table = playground.parse_decays("alpha", [[0, "0.5"], [1, 0.25]])
    assert table.tolist() == [[0, 0.5], [1, 0.25]]
    for cell in (1.5, -0.1, "x", "", None, "nan"):
        with pytest.raises(ValueError, match=r"alpha: expected a number in \[0, 1\] in row 2, column 1"):
            playground.parse_decays("alpha", [[1, 1], [cell, 1]])
    with pytest.raises(ValueError, match="beta: expected a table"):
        playground.parse_decays("beta", [])
    with pytest.raises(ValueError, match="preset: expected one of"):
        playground.preset_decays("walls", (2, 2))


def test_query_at_positions():
    assert query_at((0.0, 0.999), (4, 8)) == (0, 7)
    assert query_at((1.0, -0.1), (4, 8)) == (3, 0)
    assert query_at((0.5, 0.49), (4, 4)) == (2, 1)


def test_view_every_choice(nano):
    captured = capture_prepared(nano, nano.prepare(Image.effect_noise((40, 50), 60).convert("RGB")))
    first = panels_image(captured, Choice())
    assert panels_image(captured, Choice(place=(0.1, 0.9))).tobytes() != first.tobytes()

    def masked(choice):
        record = changed_record(captured, choice)
        return query_panels(record, query_at(choice.place, record.grid), head=choice.head).masked_attention

    changes = (
        Choice(head=1),
        Choice(stage=1, block=1),
        Choice(mask="v2h"),
        Choice(formulation="release"),
        Choice(strength=4.0),
        Choice(edges=True),
    )
    for choice in changes:
        assert not torch.equal(masked(choice), masked(Choice())), choice
    record = changed_record(captured, Choice(stage=1, block=1, mask="rmt", formulation="release"))
    assert (record.name, record.combine) == ("stages.1.blocks.1.attn", "logit")


def test_view_image_and_description(nano):
    captured = capture_prepared(nano, nano.prepare(Image.effect_noise((40, 50), 60).convert("RGB")))
    picture = clickable_image(captured, Choice(place=(0.0, 0.0)))
    assert picture.size == (480, 480)
    assert picture.getpixel((16, 5)) == (255, 0, 0)  # the frame of a token 15 pixels wide
    assert "weights are random" in describe(nano, captured, Choice())
    assert "stage 2, block 2 (criss-cross attention), head 1" in describe(
        nano, captured, Choice(stage=1, block=1, head=0)
    )
    assert "edges, not learned" in describe(nano, captured, Choice(edges=True))
