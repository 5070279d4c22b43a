"""The demo: train a small model on handwritten digits, evaluate it, plot what it learned, and segment a photograph."""

import json
from collections.abc import Iterable
from pathlib import Path

import torch

from ppma.config import ConfigError
from ppma.data.images import TransformedImages, open_images
from ppma.engine.folder import CONFIG, LOCK
from ppma.engine.progress_line import ProgressLine
from ppma.explore import style
from ppma.explore.images import find_image
from ppma.explore.worked_example import worked_example
from ppma.models import PolylineBackbone
from ppma.models.loading import load_classifier
from ppma.tasks.classification.config import ClassificationConfig
from ppma.tasks.classification.inside import look_figure
from ppma.tasks.classification.metrics import collate
from ppma.tasks.registry import load_config
from ppma.tasks.report import confusion_figure
from ppma.tasks.run import train
from ppma.tasks.segmentation import inside as segmentation

RECIPE = "digits_nano"
INSIDE = "inside.png"
SEGMENTER, PHOTOGRAPH = "upernet_ppma_nano.pets", "dog"


def run(out: Path, assignments: Iterable[str] = ()) -> str:
    """Train, evaluate, plot and report.

    Args:
        out: the run's folder; an earlier run in it is deleted.
        assignments: `key=value` changes of the recipe.

    Returns:
        The report, in Markdown.
    """
    config = load_config(RECIPE, ["log=[csv]", *assignments])
    if not isinstance(config, ClassificationConfig):
        raise ConfigError(f"task: expected a classification, got {config.task}")
    if config.data.test_split is None:
        raise ConfigError("data.test_split: expected a split, on which the demonstration reports, got null")
    _check_folder(out)
    say = ProgressLine("demo", 0).say
    say(worked_example())
    say(f"\nTraining {config.model} on the embedded handwritten digits.")
    summary = train(config, out, overwrite=True)

    model, preprocessing, classes = load_classifier(out / "best.safetensors")
    test = TransformedImages(open_images(config.data, config.data.test_split), preprocessing.transform())
    images, labels = collate([test[index] for index in range(len(test))])
    with torch.inference_mode():
        predicted = torch.cat([model(part).argmax(1) for part in images.split(config.batch_size)])
    size = len(classes)
    confusion = torch.bincount(labels * size + predicted, minlength=size**2).view(size, size)
    confusion_figure(confusion, classes).savefig(out / "confusion.png", dpi=120)

    wrong = (predicted != labels).nonzero().flatten().tolist()
    ours = isinstance(model, PolylineBackbone)  # models of timm have no decays
    if ours:
        shown = (wrong[:2] + (predicted == labels).nonzero().flatten().tolist())[:4]
        titles = [f"{classes[labels[i]]}, predicted {classes[predicted[i]]}" for i in shown]
        look_figure(model, [images[i] for i in shown], titles).savefig(out / INSIDE, dpi=120)

    say(f"Segmenting the sample photograph {PHOTOGRAPH!r} with {SEGMENTER}, which comes with the package.")
    style.save(segmentation.look_figure(SEGMENTER, find_image(PHOTOGRAPH)), out / "photograph.png")

    report = _report(config, summary, wrong=len(wrong), out=out, inside=ours)
    (out / "report.md").write_text(report, encoding="utf-8")
    return report


def _check_folder(out: Path) -> None:
    """Raise unless the folder is new, empty or holds an earlier run."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"out: expected a folder, got the file {out}")
    if out.exists() and not (out / CONFIG).is_file() and {path.name for path in out.iterdir()} - {LOCK}:
        raise ValueError(f"out: expected a new folder or an earlier run, {out} holds something else")


def _report(config: ClassificationConfig, summary: dict, *, wrong: int, out: Path, inside: bool) -> str:
    kept = json.dumps({key: summary[key] for key in ("test_top1", "val_top1", "seconds")})
    figure = (
        f"\n- {INSIDE}: for four test digits, the decays of the first block, and the mask and attention of one token"
    )
    return f"""# Demonstration

{config.model} ({summary["parameters"]:,} parameters) learned the handwritten digits in {summary["seconds"]:.0f} s:
{summary["steps"]} steps of {config.batch_size} images, {summary["samples_per_second"]:.0f} images/s in training.

**{summary["test_top1"]:.2f} %** accuracy on {summary["test_count"]} test images ({wrong} wrong), which were not used
to train or to select the weights. Those of step {summary["best_step"]} were best on {summary["val_count"]} validation
images ({summary["val_top1"]:.2f} %).

In {out}:

- curves.png: loss and accuracy over the run (numbers in metrics.csv)
- confusion.png: confusion matrix of the test images{figure if inside else ""}
- photograph.png: a photograph segmented by {SEGMENTER}, with the decays, mask and attention of its first block
- best.safetensors: the weights; config.yaml: the resolved configuration; summary.json: {kept}

Try next:

- ppma eval {out}/best.safetensors --data digits
- ppma predict {out}/best.safetensors IMAGE.png
- ppma predict {SEGMENTER} YOUR_PET.jpg --out predictions
- ppma train digits_nano --out runs/rmt model_args.mask=rmt
- ppma train folder_finetune data.root=FOLDER init={out}/best.safetensors
"""
