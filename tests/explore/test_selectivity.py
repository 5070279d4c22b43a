"""Selectivity: exact correlations on constructed decays, undefined ones for constant decays."""

import csv
import json
import math

import pytest
import torch
import torch.nn.functional as F

from ppma.explore import capture_image, images, selectivity, subject
from ppma.explore.capture import AttentionRecord
from ppma.masks import PolylineMask, PrefixedMask
from ppma_cli import main

GRID = (5, 6)


@pytest.fixture
def picture():
    return torch.rand(3, 20, 24, generator=torch.Generator().manual_seed(0))


def record(log_alpha, log_beta):
    """A layer with one head for each pair of decays, (heads, H, W)."""
    q = torch.zeros(1, len(log_alpha), *GRID, 4)
    return AttentionRecord("layer", "full", "hadamard", q, q, PolylineMask(log_alpha[None], log_beta[None]), GRID)


def following(picture, factor, offset):
    """Decays with 1 - decay = offset + factor * gradient."""
    across, down = selectivity.edge_gradients(picture, GRID)
    return tuple(torch.log1p(-(offset + factor * F.pad(g, pad))) for g, pad in ((across, (1, 0)), (down, (0, 0, 1, 0))))


def test_edge_gradients_values():
    image = torch.zeros(2, 4, 6)
    image[0, :, 3:] = 1.0  # an edge between the first and the second token of each row
    across, down = selectivity.edge_gradients(image, (2, 2))
    assert across.tolist() == [[0.5], [0.5]]
    assert down.tolist() == [[0.0, 0.0]]


def test_selectivity_constructed_decays(picture):
    heads = [following(picture, 1.5, 0.1), following(picture, -0.5, 0.4)]
    log_alpha, log_beta = (torch.stack(parts) for parts in zip(*heads, strict=True))
    first, second = selectivity.record_selectivity(record(log_alpha, log_beta), picture)
    assert (first.layer, first.kind, first.head, second.head) == ("layer", "full", 1, 2)
    for row, expected in ((first, 1), (second, -1)):
        # Decays in float32 between 0.3 and 1: each has an error of eps, their spread is above 0.01.
        assert [row.horizontal, row.vertical, row.both] == pytest.approx([expected] * 3, abs=1e-4)
    drops = torch.cat([1 - log_alpha[0, :, 1:].exp().flatten(), 1 - log_beta[0, 1:].exp().flatten()])
    assert first.decay == pytest.approx(1 - drops.mean().item())


def test_selectivity_constant_decays(picture):
    """Alpha and beta differ, but neither depends on the image."""
    (row,) = selectivity.record_selectivity(record(torch.full((1, *GRID), -0.1), torch.full((1, *GRID), -0.9)), picture)
    assert all(math.isnan(value) for value in (row.horizontal, row.vertical, row.both))


def test_selectivity_prefix_tokens(picture):
    log_alpha, log_beta = (decay[None] for decay in following(picture, 1.5, 0.1))
    plain = record(log_alpha, log_beta)
    mask = PrefixedMask(plain.mask, 1, GRID)
    prefixed = AttentionRecord("layer", "full", "hadamard", plain.q, plain.q, mask, GRID, prefix=1)
    assert selectivity.record_selectivity(prefixed, picture) == selectivity.record_selectivity(plain, picture)


def test_selectivity_mean_over_images(nano):
    names = ("cat", "shapes")
    singles = [selectivity.selectivity(nano, [images.find_image(name)]) for name in names]
    both = selectivity.selectivity(nano, [images.find_image(name) for name in names])
    assert len(both) == sum(record.heads for record in capture_image(nano.model, torch.zeros(3, 64, 64)))
    for first, second, mean in zip(*singles, both, strict=True):
        defined = torch.tensor([first.both, second.both], dtype=torch.float64)
        assert mean.both == pytest.approx(defined.nanmean().item(), nan_ok=True)
    assert sum(not math.isnan(row.both) for row in both) > len(both) / 2


def test_selectivity_figure_values(nano):
    rows = selectivity.selectivity(nano, [images.find_image("cat")])
    axis = selectivity.selectivity_figure(rows, "title").axes[0]
    drawn = axis.images[0].get_array()
    layers = list(dict.fromkeys(row.layer for row in rows))
    defined = [row for row in rows if not math.isnan(row.both)]
    for row in defined:
        assert drawn[layers.index(row.layer), row.head - 1] == pytest.approx(row.both)
    assert [label.get_text() for label in axis.get_yticklabels()][1] == "stage 2, block 1"
    assert drawn.mask.sum() == drawn.size - len(defined)  # undefined, or a layer with fewer heads


def test_selectivity_scan_mask_is_refused():
    scan = subject.from_name("ppma_nano", mask="hilbert")
    with pytest.raises(ValueError, match=r"mask: expected a polyline mask in stages\.0\.blocks\.0\.attn, got ScanMask"):
        selectivity.selectivity(scan, [images.find_image("cat")])


def test_selectivity_command(tmp_path, capsys):
    table, document, figure = (tmp_path / name for name in ("s.csv", "s.json", "s.svg"))
    words = ["figure", "selectivity", "--image", "cat", "--out", str(table), str(document), str(figure)]
    assert main(words) == 0
    rows = list(csv.DictReader(table.open()))
    assert rows[0]["layer"] == "stages.0.blocks.0.attn"
    assert rows[0]["both"] == ""  # the decays of new models are constant
    assert json.loads(document.read_text())[0]["both"] is None
    assert figure.read_bytes().startswith(b"<?xml")
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("stage 1, block 1: correlation undefined (constant), mean decay 0.")
    assert printed[-1] == f"wrote {table}, {document}, {figure}"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--out", "a.txt"], "out: expected a name that ends in .png or .pdf or .svg or .csv or .json, got 'a.txt'"),
        (["--image", "empty", "--out", "a.csv"], "image: "),
        (["--image", "nothing.png", "--out", "a.csv"], "image: expected a file or a sample"),
    ],
)
def test_selectivity_command_errors(words, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    assert main(["figure", "selectivity", *words]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"ppma figure: {message}")
    assert said.count("\n") == 1
