"""What is drawn is what is computed: the arrays are read back from the axes."""

import copy
import itertools
import re

import numpy as np
import pytest
import torch
from PIL import Image

import ppma
from ppma import masks, outputs
from ppma.explore import attention, capture_image, cost, gallery, paths, query_panels, receptive, style, subject
from ppma.measure.costs import METHODS, count, exponent
from ppma.ops import reference
from ppma_cli import main


def drawn(axis):
    return torch.as_tensor(np.ma.filled(axis.images[0].get_array().astype(float), np.nan))


def panel_axes(figure):
    return [axis for axis in figure.axes if axis.images]


def same(actual, expected):
    torch.testing.assert_close(actual, expected.double(), rtol=0, atol=0, equal_nan=True)


def test_mask_gallery():
    decays = gallery.edge_decays(gallery.disc(12))
    expected = gallery.masks_of_query(*decays, (4, 5))
    axes = panel_axes(gallery.mask_gallery(*decays, (4, 5)))
    assert [axis.get_title() for axis in axes] == list(expected)
    for axis, values in zip(axes, expected.values(), strict=True):
        same(drawn(axis), values)
        assert axis.images[0].get_clim() == (0, 1)
    dense = masks.polyline_2d(*decays).dense().exp().mean(0)
    torch.testing.assert_close(expected["2D polyline"].flatten(), dense[4 * 12 + 5])


def test_edge_decays_disc():
    log_alpha, log_beta = gallery.edge_decays(gallery.disc(16))
    inside = gallery.disc(16)[0]
    crossed = (inside[:, 1:] != inside[:, :-1]).double()
    expected = gallery.SMOOTH + (gallery.EDGE - gallery.SMOOTH) * crossed
    torch.testing.assert_close(log_alpha[:, 1:].double(), expected)
    torch.testing.assert_close(log_beta, log_alpha.mT)
    flat = gallery.edge_decays(torch.ones(3, 4, 4))
    assert all((decay == gallery.SMOOTH).all() for decay in flat)


def test_query_figure(nano, image):
    record = capture_image(nano.model, image)[0]
    panels = query_panels(record, (5, 9))
    figure = attention.query_figure(nano.shown(image), panels, (5, 9))
    axes = panel_axes(figure)
    same(torch.as_tensor(axes[0].images[0].get_array()).double(), nano.shown(image).permute(1, 2, 0))
    values = (panels.alpha, panels.beta, panels.mask, panels.attention, panels.masked_attention)
    for axis, panel in zip(axes[1:], values, strict=True):
        same(drawn(axis), panel)
    assert axes[1].images[0].get_clim() == axes[2].images[0].get_clim()
    assert axes[4].images[0].get_clim() == axes[5].images[0].get_clim()
    (frame,) = axes[0].patches  # tokens are 2 x 2 pixels
    assert (*frame.get_xy(), frame.get_width(), frame.get_height()) == (17.5, 9.5, 2, 2)
    assert style.render(figure).size[0] == 100 * style.PAGE


def test_heads_figure(nano, image):
    record = capture_image(nano.model, image)[1]
    axes = panel_axes(attention.heads_figure(nano.shown(image), record, (3, 4)))
    assert len(axes) == 1 + 5 * record.heads
    by_head = [query_panels(record, (3, 4), head=head) for head in range(record.heads)]
    for row, name in enumerate(("alpha", "beta", "mask", "attention", "masked_attention")):
        in_row = axes[1 + row * record.heads : 1 + (row + 1) * record.heads]
        assert len({axis.images[0].get_clim() for axis in in_row}) == 1
        for axis, panels in zip(in_row, by_head, strict=True):
            same(drawn(axis), getattr(panels, name))


def test_query_animation_gif(nano, image, tmp_path):
    record = capture_image(nano.model, image)[1]
    queries = attention.walk(record.grid, 5)
    assert all(a != b for a, b in itertools.pairwise(queries))
    frames = attention.query_animation(nano.shown(image), record, queries, dpi=40)
    out = tmp_path / "moving.gif"
    attention.save_gif(frames, out)
    with Image.open(out) as gif:
        assert gif.n_frames == len(queries)
        assert gif.size == frames[0].size
        assert gif.info["loop"] == 0
        red = [(np.asarray(_frame(gif, index)) == (255, 0, 0)).all(-1).any() for index in range(gif.n_frames)]
    assert all(red), "the query's box keeps its colour"


def _frame(gif, index):
    gif.seek(index)
    return gif.convert("RGB")


@pytest.mark.parametrize("path", ["v2h", "h2v"])
def test_path_tokens_match_reference(path):
    """Edges between the drawn tokens are those whose decays the reference multiplies."""
    H, W = 3, 4
    names = torch.arange(H * W).view(H, W)
    reference_path = {"v2h": reference.path_v2h, "h2v": reference.path_h2v}[path]
    for query in reference.tokens(H, W):
        for key in reference.tokens(H, W):
            walked = paths.path_tokens(query, key, path)
            assert (walked[0], walked[-1]) == (key, query)
            row, column = reference_path(names, names, query, key)
            steps = list(itertools.pairwise(walked))
            assert all(abs(a[0] - b[0]) + abs(a[1] - b[1]) == 1 for a, b in steps)
            assert sorted(names[a[0], max(a[1], b[1])].item() for a, b in steps if a[0] == b[0]) == row.tolist()
            assert sorted(names[max(a[0], b[0]), a[1]].item() for a, b in steps if a[0] != b[0]) == column.tolist()


def test_path_figures_lines():
    figure = paths.path_figure((1, 1), (4, 6))
    lines = {
        line.get_label(): list(zip(line.get_ydata(), line.get_xdata(), strict=True)) for line in figure.axes[0].lines
    }
    assert lines == {path.upper(): paths.path_tokens((1, 1), (4, 6), path) for path in ("v2h", "h2v")}
    all_paths = paths.path_gallery(3)
    assert len(all_paths.axes) == 81
    tokens = reference.tokens(3, 3)
    for axis, (query, key) in zip(all_paths.axes, ((q, k) for q in tokens for k in tokens), strict=True):
        (line,) = axis.lines
        assert list(zip(line.get_ydata(), line.get_xdata(), strict=True)) == paths.path_tokens(query, key, "v2h")
    with pytest.raises(ValueError, match="query: expected a token of the 6 x 8 grid"):
        paths.path_figure((6, 0), (0, 0))
    with pytest.raises(ValueError, match="side: expected 1 to 4"):
        paths.path_gallery(5)


@pytest.mark.parametrize("reverse", [False, True])
def test_path_points_match_mask(reverse):
    """The product of the decays along the path is the entry of the mask, for all pairs of a 2 x 3 x 4 grid."""
    grid = (2, 3, 4)
    decays = torch.rand(3, *grid, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mask = ppma.polyline_mask_nd(list(decays.log()), paths="reverse" if reverse else "forward")
    tokens = list(itertools.product(*map(range, grid)))
    for (m, query), (n, key) in itertools.product(enumerate(tokens), repeat=2):
        product = 1.0
        points = paths.path_points(query, key, reverse=reverse)
        assert (points[0], points[-1]) == (key, query)
        for start, end in itertools.pairwise(points):
            for axis, (a, b) in enumerate(zip(start, end, strict=True)):
                for step in range(min(a, b) + 1, max(a, b) + 1):
                    product *= decays[(axis, *start[:axis], step, *start[axis + 1 :])].item()
        assert mask[m, n].item() == pytest.approx(product)


def test_path_figure_3d_lines():
    figure = paths.path_figure_3d((0, 1, 1), (3, 3, 4), (4, 5, 6))
    lines = [list(zip(*(data for data in line.get_data_3d()), strict=True)) for line in figure.axes[0].lines]
    drawn = [[(depth, row, column) for column, depth, row in line] for line in lines]
    assert drawn == [
        [(3, 3, 4), (0, 3, 4), (0, 1, 4), (0, 1, 1)],
        [(3, 3, 4), (3, 3, 1), (3, 1, 1), (0, 1, 1)],
    ]


def test_cost_figure_values():
    costs = {
        name: cost.Cost((4, 8), (0.001 * n, 0.004 * n), (1_000_000 * n, 8_000_000 * n))
        for n, name in enumerate(cost.CONTENDERS, start=1)
    }
    counted, time, memory = cost.cost_figure(costs).axes
    assert (time.get_xscale(), time.get_yscale()) == ("log", "log")
    for line, method in zip(counted.lines, METHODS, strict=True):
        assert list(line.get_ydata()) == [count(method, side) for side in (4, 8)]
        assert line.get_label() == cost.CONTENDERS[method.name].label
    for line, entry in zip(time.lines, costs.values(), strict=True):
        assert list(line.get_xdata()) == [16, 64]
        assert list(line.get_ydata()) == pytest.approx([1e3 * seconds for seconds in entry.seconds])
    for line, entry in zip(memory.lines, costs.values(), strict=True):
        assert list(line.get_ydata()) == pytest.approx([value / 1e6 for value in entry.peak_bytes])
    small = {name: cost.Cost((4, 8, 16), (1.0, 2.0, 3.0), (1, 2_000_000, 3_000_000)) for name in costs}
    assert list(cost.cost_figure(small).axes[2].lines[0].get_xdata()) == [64, 256]  # one byte was not measured


def test_cost_figure_slopes_match_legend():
    """Rounded to a half, the exponents of the counted multiplications are the legend's."""
    for name, contender in cost.CONTENDERS.items():
        points = cost._counted(name, cost.Cost(contender.sides, ()))
        sides = list(points)[-2:]
        power = float(re.search(r"N\^{([\d.]+)", contender.label)[1]) if "N^" in contender.label else 1.0
        assert round(2 * exponent(sides, [points[side] for side in sides])) == 2 * power


def test_cost_methods_agree():
    results = [cost.call(name, 6)() for name in cost.CONTENDERS]
    for result in results[1:]:
        torch.testing.assert_close(result, results[0])
    measured = cost.measure(8, rounds=1, memory=False)
    assert [entry.sides for entry in measured.values()] == [(4, 6, 8), (8,), (8,), (8,)]
    assert len(cost.cost_figure(measured).axes) == 2
    with pytest.raises(ValueError, match="largest: expected a side of at least 4"):
        cost.measure(2)


def test_receptive_field(nano):
    images = receptive.noise_images(2, 32)
    field = receptive.effective_receptive_field(nano.model, images, stage=1)
    pixels = images[:1].clone().requires_grad_()
    gradients = []
    for index in range(2):
        pixels = images[index : index + 1].clone().requires_grad_()
        feature = nano.model.stages[1](nano.model.stages[0](nano.model.stem(pixels)))[0, 4, 4]
        gradients.append(torch.autograd.grad(feature.sum(), pixels)[0][0].abs().mean(0))
    expected = sum(gradients) / sum(gradients).max()
    torch.testing.assert_close(field, expected)
    figure = receptive.receptive_field_figure({"one": field, "two": field**2})
    first, second = panel_axes(figure)
    same(drawn(first), field.clamp_min(1e-4).log10())
    assert first.images[0].get_clim() == second.images[0].get_clim()
    with pytest.raises(ValueError, match="stage: expected 0 to 3"):
        receptive.effective_receptive_field(nano.model, images, stage=4)
    assert receptive.covering_side(torch.ones(100, 100), 0.25) == 0.5


@pytest.mark.parametrize(
    ("words", "start"),
    [
        (["paths", "--out", "a.png"], b"\x89PNG"),
        (["pairs", "--side", "2", "--out", "a.svg"], b"<?xml"),
        (["scans", "--grid", "4,5", "--out", "a.png"], b"\x89PNG"),
        (["paths-3d", "--key", "3,5,6", "--out", "a.svg"], b"<?xml"),
        (["matrices", "--grid", "3,4", "--out", "a.png"], b"\x89PNG"),
        (["masks", "--side", "8", "--image", "shapes", "--query", "2,3", "--out", "a.pdf"], b"%PDF"),
        (["attention", "--image", "cat", "--decays", "edges", "--stage", "2", "--out", "a.png"], b"\x89PNG"),
        (["attention", "--image", "cat", "--frames", "3", "--stage", "3", "--head", "1", "--out", "a.gif"], b"GIF89a"),
        (["heads", "--mask", "hilbert", "--strength", "2", "--stage", "3", "--out", "a.png"], b"\x89PNG"),
        (["cost", "--largest", "8", "--rounds", "1", "--no-memory", "--out", "a.png"], b"\x89PNG"),
        (["receptive-field", "--masks", "2d", "--images", "1", "--stage", "2", "--out", "a.png"], b"\x89PNG"),
    ],
    ids=lambda value: "-".join(value[:1]) if isinstance(value, list) else "",
)
def test_figure_command_formats(words, start, tmp_path, capsys):
    out = tmp_path / words[-1]
    assert main(["figure", *words[:-1], str(out)]) == 0
    assert out.read_bytes().startswith(start)
    assert str(out) in capsys.readouterr().out


@pytest.mark.parametrize("width", [3.4, 7.0])
@pytest.mark.parametrize("name", ["scans", "paths", "paths-3d", "matrices", "pairs", "masks", "attention", "heads"])
def test_figure_width_exact_nothing_cut(name, width, tmp_path, monkeypatch):
    drawn, figures, save = [], [], style.save

    def saved(figure, *args, **options):
        figures.append(figure)
        save(figure, *args, **options)

    monkeypatch.setattr(style, "write", lambda path, content: drawn.append(content))
    monkeypatch.setattr(style, "save", saved)
    assert main(["figure", name, "--width", str(width), "--out", str(tmp_path / "a.png")]) == 0
    with Image.open(drawn[0]) as image:
        assert image.width == 200 * width
    content = figures[0].get_tightbbox()
    assert content.x0 >= 0
    assert content.x1 <= width


def test_figure_pdf_fonts_embedded(tmp_path):
    assert main(["figure", "paths", "--out", str(tmp_path / "a.pdf")]) == 0
    content = (tmp_path / "a.pdf").read_bytes()
    assert b"/Type3" not in content
    assert b"/Type0" in content  # TrueType outlines


def test_figure_svg_reproducible(tmp_path):
    for name in ("a.svg", "b.svg"):
        assert main(["figure", "matrices", "--out", str(tmp_path / name)]) == 0
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


@pytest.mark.parametrize(("count", "width", "columns"), [(6, 7, 6), (6, 3.4, 3), (5, 3.4, 3), (5, 2, 1), (1, 7, 1)])
def test_columns_of(count, width, columns):
    assert style.columns_of(count, width) == columns


def test_figure_command_checkpoint(nano, tmp_path):
    """A classifier without stored preprocessing, and a backbone without a classifier."""
    for name, classes in (("classifier", 1000), ("backbone", 0)):
        model = copy.deepcopy(nano.model)
        model.reset_classifier(classes)
        ppma.save_checkpoint(model, tmp_path / f"{name}.safetensors")
        opened = subject.from_checkpoint(tmp_path / f"{name}.safetensors")
        assert (opened.trained, opened.preprocessing.image_size, len(opened.classes)) == (True, 64, classes)
    checkpoint = ["--checkpoint", str(tmp_path / "classifier.safetensors")]
    for words in (["masks", "--stage", "2", "--head", "1"], ["receptive-field", "--images", "1", "--stage", "2"]):
        assert main(["figure", *words, *checkpoint, "--out", str(tmp_path / "a.png")]) == 0


@pytest.mark.parametrize("path", ["v2h", "h2v"])
@pytest.mark.parametrize(
    "token",
    [(0.5, 0), (0, float("nan")), (float("inf"), 0), (-1, 0), (10**12, 0), (True, 0), ("0", 0), (0,), (0, 0, 0)],
)
def test_path_tokens_invalid(token, path):
    for query, key in ((token, (1, 1)), ((1, 1), token)):
        with pytest.raises(ValueError, match="query: expected a token of the"):
            paths.path_tokens(query, key, path)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["paths", "--out", "a.gif"], "out: expected a name that ends in .png or .pdf or .svg, got 'a.gif'"),
        (["paths", "--out", "none/a.png"], "out: expected a folder at none, found none"),
        (["paths", "--out", "text/a.png"], "out: expected a folder at text, found none"),
        (["paths", "--out", "folder.png"], "out: expected a file, got the folder folder.png"),
        (["paths", "--grid", "0,3", "--out", "a.png"], "grid: expected 1,1 to 40,40, got 0,3"),
        (["paths", "--grid", "3,41", "--out", "a.png"], "grid: expected 1,1 to 40,40, got 3,41"),
        (["paths", "--query", "7,1", "--out", "a.png"], "query: expected 1,1 to 6,8, the tokens of the grid, got 7,1"),
        (["paths", "--key", "0,1", "--out", "a.png"], "key: expected 1,1 to 6,8, the tokens of the grid, got 0,1"),
        (["scans", "--grid", "3,41", "--out", "a.png"], "grid: expected 1,1 to 40,40, got 3,41"),
        (["matrices", "--grid", "9,2", "--out", "a.png"], "grid: expected 1,1 to 8,8, got 9,2"),
        (["paths-3d", "--grid", "2,3,13", "--out", "a.png"], "grid: expected 1 to 12 along each axis, got 2,3,13"),
        (
            ["paths-3d", "--query", "5,1,1", "--out", "a.png"],
            "query: expected 1,1,1 to 4,5,6, the tokens of the grid, got 5,1,1",
        ),
        (["pairs", "--side", "9", "--out", "a.png"], "side: expected 1 to 4 (there are side^4 paths), got 9"),
        (["masks", "--side", "0", "--out", "a.png"], "side: expected 1 to 64, got 0"),
        (["masks", "--side", "9999", "--out", "a.png"], "side: expected 1 to 64, got 9999"),
        (
            ["masks", "--query", "25,1", "--out", "a.png"],
            "query: expected 1,1 to 24,24, the tokens of the grid, got 25,1",
        ),
        (["masks", "--head", "1", "--out", "a.png"], "head: expected with --checkpoint only"),
        (["masks", "--checkpoint", "x", "--side", "3", "--out", "a.png"], "side: expected without --checkpoint"),
        (["masks", "--image", "text", "--out", "a.png"], "image: expected a picture (PNG, JPEG, "),
        (["masks", "--image", "a" * 5000, "--out", "a.png"], "image: expected a file or a sample (cat, "),
        (["attention", "--model", "ppma_huge", "--out", "a.png"], "model: expected one of"),
        (
            ["attention", "--image", "nothing.png", "--out", "a.png"],
            "image: expected a file or a sample (cat, coffee, ",
        ),
        (["attention", "--stage", "9", "--out", "a.png"], "stage: expected 1 to 4, got 9"),
        (["attention", "--stage", "0", "--out", "a.png"], "stage: expected 1 to 4, got 0"),
        (["attention", "--stage", "2", "--block", "3", "--out", "a.png"], "block: expected 1 to 2, got 3"),
        (["attention", "--head", "99", "--out", "a.png"], "head: expected 1 to 2, got 99"),
        (["attention", "--head", "0", "--out", "a.png"], "head: expected 1 to 2, got 0"),
        (
            ["attention", "--query", "17,1", "--out", "a.png"],
            "query: expected 1,1 to 16,16, the tokens of the grid, got 17",
        ),
        (["attention", "--strength", "nan", "--out", "a.png"], "strength: expected a number >= 0, got nan"),
        (["attention", "--frames", "0", "--out", "a.gif"], "frames: expected 1 to 360, got 0"),
        (["attention", "--frames", "3", "--out", "a.png"], "frames: expected with a .gif only"),
        (["attention", "--query", "1,1", "--out", "a.gif"], "query: expected without a .gif"),
        (["paths", "--width", "1", "--out", "a.png"], "width: expected 2 to 20 inches, got 1"),
        (["attention", "--width", "nan", "--out", "a.png"], "width: expected 2 to 20 inches, got nan"),
        (["cost", "--rounds", "0", "--out", "a.png"], "rounds: expected 1 to 1000, got 0"),
        (["cost", "--largest", "-1", "--out", "a.png"], "largest: expected a side of at least 4, got -1"),
        (["receptive-field", "--stage", "9", "--out", "a.png"], "stage: expected 1 to 4, got 9"),
        (["receptive-field", "--images", "0", "--out", "a.png"], "images: expected 1 to 512, got 0"),
        (["receptive-field", "--images", "-1", "--out", "a.png"], "images: expected 1 to 512, got -1"),
        (["receptive-field", "--masks", "", "--out", "a.png"], "mask: expected one of"),
        (["receptive-field", "--masks", "2d,2d", "--out", "a.png"], "masks: expected each mask once, got 2d,2d"),
        (
            ["receptive-field", "--checkpoint", "x", "--masks", "2d", "--out", "a.png"],
            "masks: expected without --check",
        ),
    ],
    ids=lambda value: "-".join(value[:-2])[:40] if isinstance(value, list) else "",
)
def test_figure_command_errors(words, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text("text")
    (tmp_path / "folder.png").mkdir()
    assert main(["figure", *words]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"ppma figure: {message}")
    assert said.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder.png", "text"]


@pytest.mark.parametrize(
    ("words", "count"),
    [
        (["paths", "--grid", "3"], "two"),
        (["paths", "--query", "1.5,2"], "two"),
        (["masks", "--query", "x,y"], "two"),
        (["paths-3d", "--key", "1,2"], "three"),
    ],
)
def test_figure_command_malformed_tokens(words, count, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["figure", *words, "--out", "a.png"])
    assert ended.value.code == 2
    assert f"expected {count} whole numbers such as " in capsys.readouterr().err


def test_figure_command_unwritable_out(capsys, tmp_path, monkeypatch):
    def refuse(*args, **options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(outputs.tempfile, "TemporaryFile", refuse)
    monkeypatch.setattr(cost, "measure", lambda *args, **options: pytest.fail("measured first"))
    assert main(["figure", "cost", "--out", str(tmp_path / "a.png")]) == 2
    assert f"out: cannot write to {tmp_path}: Permission denied" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["a.png", "a.gif"])
def test_figure_command_full_disk(name, capsys, tmp_path, monkeypatch):
    def full(path, content):
        raise OSError(28, "No space left on device")

    (tmp_path / name).write_text("old")
    monkeypatch.setattr(style, "write_atomically", full)
    words = ["attention", "--stage", "4", *(["--frames", "1"] if name == "a.gif" else [])]
    assert main(["figure", *words, "--out", str(tmp_path / name)]) == 2
    said = capsys.readouterr().err
    assert (
        said
        == f"ppma figure: out: expected a file that can be written, got {tmp_path / name}: No space left on device\n"
    )
    assert (tmp_path / name).read_text() == "old"
