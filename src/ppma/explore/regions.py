"""Figures of the regions task: what a trained model does with walls, and how studies of it went."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ppma.data.label_maps import IGNORED
from ppma.data.regions import Regions, RegionsDataConfig, draw_regions
from ppma.engine.folder import BEST, METRICS
from ppma.engine.logging import read_rows
from ppma.explore import style
from ppma.explore.capture import capture_image
from ppma.explore.query import query_panels
from ppma.models import Checkpoint, open_checkpoint
from ppma.models.grid import GridModel, load_grid
from ppma.progress import track

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIZES = (10, 15, 20, 30, 40, 50)
_COLOURS = (style.BLUE, style.VERMILION, style.GREEN, style.PURPLE, style.ORANGE, style.SKY, "0.3", "0.6")
_IMAGES = 8  # of each size


@dataclass(frozen=True)
class _Trained:
    """The part of a run's configuration that describes its images."""

    data: RegionsDataConfig


def training_data(checkpoint: Checkpoint) -> RegionsDataConfig:
    """The images that a model of the regions task was trained on."""
    return checkpoint.run_config(_Trained).data


def decays_figure(model: GridModel, data: Regions, index: int = 0, query: tuple[int, int] | None = None) -> "Figure":
    """The decays of every block on one image, and the mask of a query.

    Args:
        model: a trained model.
        data: images.
        index: of the image.
        query: (i, j); None for the first dot.
    """
    image, labels = data[index]
    with torch.no_grad():
        predicted = model(image[None])[0].argmax(0)
    if query is None:
        first = int(image[1:].sum(0).flatten().argmax())
        query = first // data.size, first % data.size
    records = capture_image(model, image)
    predicted = torch.where(labels == IGNORED, labels, predicted)
    right = 100 * (predicted == labels)[labels != IGNORED].double().mean()
    rows = max(2, len(records))
    figure = style.new_figure(style.PAGE, 1.7 * rows)
    axes = figure.subplots(rows, 4, squeeze=False)
    for axis in axes.flat:
        axis.set_axis_off()
    for axis, colours, title in (
        (axes[0, 0], labels, "image, right colours"),
        (axes[1, 0], predicted, f"prediction, {right:.1f} % right"),
    ):
        axis.set_axis_on()
        style.show_image(axis, draw_regions(image, colours).permute(2, 0, 1) / 255, title)
    for number, record in enumerate(records):
        panels = query_panels(record, query)
        shown = ((panels.alpha, "α"), (panels.beta, "β"), (panels.mask, "mask of the query"))
        for axis, (values, title) in zip(axes[number, 1:], shown, strict=True):
            axis.set_axis_on()
            marked = query if values is panels.mask else None
            style.heatmap(axis, values, f"block {number + 1}: {title}", colours=style.DECAY_COLOURS, query=marked)
        style.colour_bar(figure, axes[number, -1].images[0], axes[number, -1])
    return figure


def study_runs(folder: Path) -> dict[str, list[Path]]:
    """The folders of the finished runs of a study (`ppma ablate`, `ppma compare`) by variant."""
    results = folder / "ablation.json" if (folder / "ablation.json").is_file() else folder / "comparison.json"
    if not results.is_file():
        raise ValueError(f"runs: expected the folder of a study, with ablation.json or comparison.json, got {folder}")
    document = json.loads(results.read_text(encoding="utf-8"))
    names = [result.get("mask", result.get("model")) for result in document["results"]]
    return {name: sorted((folder / name).glob("seed*")) for name in names}


def learning_figure(folder: Path) -> "Figure":
    """The monitored metric over the steps of each variant of a study: mean, and range over the seeds."""
    curves: dict[str, tuple[Tensor, Tensor]] = {}
    metric = ""
    for name, runs in study_runs(folder).items():
        histories = []
        for run in runs:
            rows = [row for row in read_rows(run / METRICS) if any(key.startswith("val_") for key in row)]
            metric = metric or next(key for row in rows for key in row if key.startswith("val_"))
            histories.append({row["step"]: row[metric] for row in rows if metric in row})
        steps = sorted(set.intersection(*map(set, histories)))
        values = [[history[step] for step in steps] for history in histories]
        curves[name] = torch.tensor(steps), torch.tensor(values)
    return _curves_figure(curves, "step", metric.removeprefix("val_"))


def sizes_figure(folder: Path, sizes: tuple[int, ...] = SIZES) -> "Figure":
    """The accuracy of the trained models of a study on grids of several sizes, with cells as large as in training."""
    curves = {}
    for name, runs in study_runs(folder).items():
        values = []
        for run in track(runs, name):
            checkpoint = open_checkpoint(run / BEST)
            model, data = load_grid(checkpoint), training_data(checkpoint)
            values.append([_accuracy(model, data, size) for size in sizes])
        curves[name] = torch.tensor(sizes), torch.tensor(values)
    return _curves_figure(curves, "side of the grid in pixels", "accuracy")


@torch.no_grad()
def _accuracy(model: GridModel, trained: RegionsDataConfig, size: int) -> float:
    """Pixels right, in percent."""
    area = (size / trained.size) ** 2
    cells = max(2, round(trained.cells * area))
    regions = min(cells, max(2, round(trained.regions * area)))
    resized = dataclasses.replace(trained, size=size, cells=cells, regions=regions, eval_images=_IMAGES)
    data = Regions(resized, "test")
    images, labels = (torch.stack(parts) for parts in zip(*(data[index] for index in range(len(data))), strict=True))
    return 100 * (model(images).argmax(1) == labels)[labels != IGNORED].double().mean().item()


def _curves_figure(curves: dict[str, tuple[Tensor, Tensor]], across: str, upwards: str) -> "Figure":
    """A curve for each variant, (points,) against (seeds, points): the mean, in the range of the seeds."""
    figure = style.new_figure(7, 4.2)
    axis = figure.subplots()
    for number, (name, (where, values)) in enumerate(curves.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        lines = "-" if number < len(_COLOURS) else "--"
        axis.plot(where, values.mean(0), lines, color=colour, label=name, marker="o", markersize=3)
        axis.fill_between(where, values.amin(0), values.amax(0), color=colour, alpha=0.15, linewidth=0)
    axis.set_xlabel(across)
    axis.set_ylabel(upwards)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    return figure
