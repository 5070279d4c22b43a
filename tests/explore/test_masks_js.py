"""The page's JavaScript computes what the Python reference computes."""

import dataclasses
import json
import shutil
import subprocess
from importlib import resources

import pytest
import timm
import torch
from PIL import Image
from torch import Tensor

import ppma
from ppma import testing
from ppma.explore import WhatIf, capture_image, query_panels, subject
from ppma.explore.gallery import edge_decays
from ppma.explore.paths import path_tokens
from ppma.explore.query import map_decays
from ppma.explore.record import image_record
from ppma.masks import KINDS
from ppma.ops import reference

NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="needs node")
ROUNDINGS = 4096 * torch.finfo(torch.float64).eps  # four sums of at most 1,024 terms
SCRIPT = resources.files("ppma.explore").joinpath("page", "masks.js").read_text("utf-8")

# Values travel as JSON, in which NaN is null.
PANELS = """
const { layers, edges, orders, asked } = JSON.parse(require("fs").readFileSync(0));
for (const layer of layers) for (const name of ["q", "k", "alpha", "beta"]) layer[name] = decodeHalf(layer[name]);
for (const grid of Object.values(edges)) for (const name of ["alpha", "beta"]) grid[name] = decodeHalf(grid[name]);
console.log(JSON.stringify(asked.map(({ layer, ...choice }) => {
  const key = layers[layer].grid.join("x");
  const panels = queryPanels(layers[layer], choice, edges[key], orders[key]);
  return Object.fromEntries(Object.entries(panels).map(([name, values]) => [name, [...values]]));
})));
"""
SCANS = """
const { x, alpha, beta, grid } = JSON.parse(require("fs").readFileSync(0));
console.log(JSON.stringify(["v2h", "h2v"].map((order) => scanSteps(x, alpha, beta, grid, order).map((step) =>
  ({ ...step, values: [...step.values] })))));
"""
PATHS = """
const { pairs } = JSON.parse(require("fs").readFileSync(0));
console.log(JSON.stringify(pairs.map(([query, key, order]) => pathTokens(query, key, order))));
"""


def run(code, data):
    out = subprocess.run(
        [NODE, "-e", SCRIPT + code], input=json.dumps(data), capture_output=True, text=True, check=True
    )
    return json.loads(out.stdout)


def tensor(values):
    return torch.tensor([float("nan") if value is None else value for value in values], dtype=torch.float64)


def rounded(record):
    """The record with the page's values: float16, q times the scale of the attention."""
    scale = record.q.shape[-1] ** -0.5
    q, k = (record.q * scale).half().double() / scale, record.k.half().double()
    return dataclasses.replace(record, q=q, k=k, mask=map_decays(record.mask, lambda decay: decay.half().double()))


def check_panels(opened, choices, rtol=ROUNDINGS):
    """Compare the page's panels with those of Python, whose inputs are rounded to float16 as the page's are."""
    image = Image.effect_noise((40, 50), 60).convert("RGB")
    page = image_record(opened, image, "noise")
    prepared = opened.prepare(image)
    records = capture_image(opened.model, prepared)
    shown = opened.shown(prepared)
    drawn = run(PANELS, {**page, "asked": choices})
    names = {"alpha": "alpha", "beta": "beta", "mask": "mask", "attention": "attention", "masked": "masked_attention"}
    for choice, panels in zip(choices, drawn, strict=True):
        record = rounded(records[choice["layer"]])
        edges = edge_decays(torch.nn.functional.adaptive_avg_pool2d(shown, record.grid))
        decays = tuple(decay.half().double() for decay in edges) if choice["edges"] else None
        change = WhatIf(choice["mask"] or None, choice["formulation"] or None, decays)
        head = None if choice["head"] < 0 else choice["head"]
        record = change(record)
        record = dataclasses.replace(record, mask=map_decays(record.mask, Tensor.double))  # RMT's are float32
        record = WhatIf(strength=choice["strength"])(record)
        expected = query_panels(record, tuple(choice["query"]), head=head)
        for ours, theirs in names.items():
            actual, wanted = tensor(panels[ours]), getattr(expected, theirs).flatten().double()
            torch.testing.assert_close(actual, wanted, rtol=rtol, atol=1e-15, equal_nan=True, msg=f"{ours} {choice}")


def choice(layer, query, **changes):
    own = {"head": -1, "mask": "", "formulation": "", "edges": False, "strength": 1}
    return {"layer": layer, "query": query, **own, **changes}


@pytest.mark.parametrize("mask", KINDS)
def test_panels_every_mask(mask, nano):
    whole = [choice(0, [3, 9], mask=mask), choice(5, [1, 2], mask=mask, formulation="release", strength=2.5)]
    check_panels(nano, [*whole, choice(1, [7, 0], mask=mask, edges=True, head=1), choice(4, [0, 3], mask=mask)])


@pytest.mark.parametrize("changes", [{}, {"strength": 0}, {"edges": True}, {"formulation": "release"}, {"head": 0}])
@pytest.mark.parametrize("layer", [0, 6])
def test_panels_changes(layer, changes, nano):
    check_panels(nano, [choice(layer, [0, 0], **changes), choice(layer, [3, 2], **changes)])


def test_panels_prefix_tokens_of_vit():
    vit = ppma.retrofit(timm.create_model("test_vit"), mask="2d", decay="softplus")
    opened = subject.vit_subject(vit, "test_vit", trained=False)
    check_panels(
        opened, [choice(0, [2, 7]), choice(5, [9, 0], formulation="paper", head=1), choice(3, [4, 4], mask="v2h")]
    )


@pytest.mark.parametrize("kind", ["linear", "decomposed"])
def test_panels_low_rank(kind):
    opened = subject.from_name("ppma_nano", kinds=(kind,) * 4)
    # The page has both factors in float16, Python computes them: products of positive terms are off by two roundings.
    asked = [choice(0, [5, 5], edges=True), choice(4, [1, 1], edges=True, formulation="release")]
    check_panels(opened, asked, rtol=2 * 2 * torch.finfo(torch.float16).eps)


@pytest.mark.parametrize("grid", testing.GRIDS)
def test_scan_steps_last_is_mask_times_x(grid):
    generator = torch.Generator().manual_seed(0)
    logs = [testing.random_log_decay(*grid, generator=generator, dtype=torch.float64) for _ in range(2)]
    x = torch.randn(grid, generator=generator, dtype=torch.float64)
    alpha, beta = (log.exp().flatten().tolist() for log in logs)
    drawn = run(SCANS, {"x": x.flatten().tolist(), "alpha": alpha, "beta": beta, "grid": grid})
    H, W = grid
    for path, steps in zip(("v2h", "h2v"), drawn, strict=True):
        expected = reference.polyline_scan(x[..., None], *logs, paths=path)
        torch.testing.assert_close(tensor(steps[-1]["values"]), expected.flatten())
        assert len(steps) == 1 + (2 * H + 1) + (2 * W + 1)
        assert all(step["values"][token] is not None for step in steps for token in step["written"])


def test_scan_step_one_line():
    half = [0.5] * 6
    steps = run(SCANS, {"x": [1, 0, 0, 0, 0, 0], "alpha": half, "beta": half, "grid": [3, 2]})[0]
    assert steps[2]["written"] == [2, 3]
    assert steps[2]["values"][2:] == [0.5, 0, None, None]
    assert steps[4]["written"] == [4, 5]  # upwards from the last row
    assert steps[7]["values"][::2] == [1, 0.5, 0.25]


def test_path_tokens_match_python():
    tokens = reference.tokens(3, 4)
    pairs = [(query, key, path) for query in tokens for key in tokens for path in ("v2h", "h2v")]
    for pair, drawn in zip(pairs, run(PATHS, {"pairs": pairs}), strict=True):
        assert [tuple(token) for token in drawn] == path_tokens(*pair)
