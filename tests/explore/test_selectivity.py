"""Selectivity: exact correlations on constructed decays, undefined ones for constant decays."""

import csv
import json
import math

import pytest
import timm
import torch
import torch.nn.functional as F

import ppma
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


def measured(record, picture):
    pairs = selectivity.record_moments(record, picture)
    return [selectivity.summarise("model", "layer", "full", head + 1, *pair) for head, pair in enumerate(pairs)]


def test_edge_gradients_values():
    image = torch.zeros(2, 4, 6)
    image[0, :, 3:] = 1.0  # an edge between the first and the second token of each row
    across, down = selectivity.edge_gradients(image, (2, 2))
    assert across.tolist() == [[0.5], [0.5]]
    assert down.tolist() == [[0.0, 0.0]]


def test_selectivity_constructed_decays(picture):
    heads = [following(picture, 1.5, 0.1), following(picture, -0.5, 0.4)]
    log_alpha, log_beta = (torch.stack(parts) for parts in zip(*heads, strict=True))
    first, second = measured(record(log_alpha, log_beta), picture)
    for row, expected in ((first, 1), (second, -1)):
        # Decays in float32 between 0.3 and 1: each has an error of eps, their spread is above 0.01.
        assert [row.horizontal, row.vertical, row.both] == pytest.approx([expected] * 3, abs=1e-4)
    drops = torch.cat([1 - log_alpha[0, :, 1:].exp().flatten(), 1 - log_beta[0, 1:].exp().flatten()])
    assert first.decay == pytest.approx(1 - drops.mean().item())


def test_selectivity_constant_decays(picture):
    """Alpha and beta differ, but neither depends on the image."""
    (row,) = measured(record(torch.full((1, *GRID), -0.1), torch.full((1, *GRID), -0.9)), picture)
    assert all(math.isnan(value) for value in (row.horizontal, row.vertical, row.both))


def test_selectivity_prefix_tokens(picture):
    log_alpha, log_beta = (decay[None] for decay in following(picture, 1.5, 0.1))
    plain = record(log_alpha, log_beta)
    mask = PrefixedMask(plain.mask, 1, GRID)
    prefixed = AttentionRecord("layer", "full", "hadamard", plain.q, plain.q, mask, GRID, prefix=1)
    assert measured(prefixed, picture) == measured(plain, picture)


def test_selectivity_pools_images(nano):
    """Against the correlation of all edges, centred by image and direction."""
    pictures = [images.find_image(name) for name in ("cat", "shapes")]
    row = selectivity.selectivity(nano, pictures)[1]
    drops, gradients = [], []
    for picture in pictures:
        prepared = nano.prepare(picture)
        first = capture_image(nano.model, prepared)[0]
        across, down = selectivity.edge_gradients(nano.shown(prepared), first.grid)
        edges = first.mask.log_alpha[0, 1, :, 1:], first.mask.log_beta[0, 1, 1:]
        for log_decay, gradient in zip(edges, (across, down), strict=True):
            drop = 1 - log_decay.exp().flatten().double()
            drops.append(drop - drop.mean())
            gradients.append(gradient.flatten().double() - gradient.double().mean())
    expected = torch.corrcoef(torch.stack([torch.cat(drops), torch.cat(gradients)]))[0, 1].item()
    assert (row.layer, row.kind, row.head) == ("stages.0.blocks.0.attn", "criss_cross", 2)
    assert row.both == pytest.approx(expected)
    assert 0.01 < abs(expected) < 0.99
    twice = selectivity.selectivity(nano, [pictures[0]] * 2)[1]
    assert twice.both == pytest.approx(selectivity.selectivity(nano, pictures[:1])[1].both)


def test_selectivity_figure_values(nano):
    rows = selectivity.selectivity(nano, [images.find_image("cat")])
    axis = selectivity.selectivity_figure(rows).axes[0]
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


def test_selectivity_command_untrained(tmp_path):
    table, document, figure = (tmp_path / name for name in ("s.csv", "s.json", "s.svg"))
    model = timm.create_model("ppma_nano", formulation="release")
    ppma.save_checkpoint(model, tmp_path / "nano.safetensors")
    words = ["figure", "selectivity", "--checkpoint", str(tmp_path / "nano.safetensors"), "--image", "cat"]
    assert main([*words, "--untrained", "--out", str(table), str(document), str(figure)]) == 0
    rows = list(csv.DictReader(table.open()))
    assert [rows[0]["model"], rows[-1]["model"]] == ["nano", "random weights"]
    assert len(rows) == 2 * len({(row["layer"], row["head"]) for row in rows})
    assert rows[0]["both"] != rows[len(rows) // 2]["both"]  # other random weights


def test_selectivity_command_new_model(tmp_path, capsys):
    table, document, figure = (tmp_path / name for name in ("s.csv", "s.json", "s.svg"))
    words = ["--model", "ppma_nano", "--image", "cat", "--out", str(table), str(document), str(figure)]
    assert main(["figure", "selectivity", *words]) == 0
    rows = list(csv.DictReader(table.open()))
    assert rows[0]["layer"] == "stages.0.blocks.0.attn"
    assert rows[0]["both"] == ""  # the decays of new models are constant
    assert json.loads(document.read_text())[0]["both"] is None
    assert figure.read_bytes().startswith(b"<?xml")
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith(
        "ppma_nano (random weights), stage 1, block 1: correlation undefined (constant), mean decay 0."
    )
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
