"""The demonstration: train a small model on handwritten digits, measure it on digits it never saw, look inside."""

import json
from collections.abc import Iterable
from pathlib import Path

import torch

from ppma.config import ConfigError
from ppma.data.images import TransformedImages, open_images
from ppma.engine.folder import CONFIG, LOCK
from ppma.engine.logging import ProgressLine
from ppma.explore.worked_example import worked_example
from ppma.models.loading import load_classifier
from ppma.tasks.classification.config import ClassificationConfig
from ppma.tasks.classification.inside import confusion_figure, look_figure
from ppma.tasks.classification.metrics import collate
from ppma.tasks.registry import load_config
from ppma.tasks.run import train

RECIPE = "digits_nano"


def run(out: Path, assignments: Iterable[str] = ()) -> str:
    """Train, measure, draw, report.

    Args:
        out: folder of the run; an earlier run in it is deleted.
        assignments: `key=value` changes of the recipe.

    Returns:
        What to tell the user at the end.
    """
    config = load_config(RECIPE, assignments)
    if not isinstance(config, ClassificationConfig):
        raise ConfigError(f"task: expected a classification, got {config.task}")
    _check_folder(out)
    tell = ProgressLine("demo", 0).say
    tell(worked_example())
    tell(f"\nTraining {config.model} on the embedded handwritten digits.")
    summary = train(config, out, overwrite=True, tensorboard=False)

    model, preprocessing, classes = load_classifier(out / "best.safetensors")
    test = TransformedImages(open_images(config.data, config.data.test_split or "test"), preprocessing.transform())
    images, labels = collate([test[index] for index in range(len(test))])
    with torch.inference_mode():
        predicted = torch.cat([model(part).argmax(1) for part in images.split(config.batch_size)])
    confusion_figure(labels, predicted, classes).savefig(out / "confusion.png", dpi=120)

    wrong = (predicted != labels).nonzero().flatten().tolist()
    shown = (wrong[:2] + (predicted == labels).nonzero().flatten().tolist())[:4]
    titles = [f"{classes[labels[i]]}, predicted {classes[predicted[i]]}" for i in shown]
    look_figure(model, [images[i] for i in shown], titles).savefig(out / "inside.png", dpi=120)

    report = _report(config, summary, wrong=len(wrong), out=out)
    (out / "report.md").write_text(report, encoding="utf-8")
    return report


def _check_folder(out: Path) -> None:
    """Refuse a folder that is neither new nor of an earlier run."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"out: expected a folder, got the file {out}")
    if out.exists() and not (out / CONFIG).is_file() and {path.name for path in out.iterdir()} - {LOCK}:
        raise ValueError(f"out: expected a new folder or an earlier run, {out} holds something else")


def _report(config: ClassificationConfig, summary: dict, *, wrong: int, out: Path) -> str:
    kept = json.dumps({key: summary[key] for key in ("test_top1", "val_top1", "seconds")})
    return f"""# Demonstration

{config.model} ({summary["parameters"]:,} parameters) learned the handwritten digits in {summary["seconds"]:.0f} s:
{summary["steps"]} steps of {config.batch_size} images, {summary["samples_per_second"]:.0f} images/s in training.

**{summary["test_top1"]:.2f} %** of {summary["test_count"]} test images right ({wrong} wrong). They took no part in
training, nor in choosing the weights: that was done on {summary["val_count"]} other images
({summary["val_top1"]:.2f} % right, step {summary["best_step"]}).

In {out}:

- curves.png: loss and accuracy over the run (the numbers: metrics.csv)
- confusion.png: which digits were taken for which
- inside.png: for four test digits, the decays that the first block learned, and the mask and attention of one token
- best.safetensors: the weights; config.yaml: everything that was set; summary.json: {kept}

Try next:

- ppma eval {out}/best.safetensors --data digits
- ppma predict {out}/best.safetensors IMAGE.png
- ppma train digits_nano --out runs/rmt model_args.mask=rmt
- ppma train folder_finetune data.root=FOLDER init={out}/best.safetensors
"""
