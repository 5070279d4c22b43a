"""Fine-tune a backbone on a folder of images, from a checkpoint and from random weights.

    python examples/finetune_folder.py FOLDER --checkpoint FILE

FOLDER holds train/CLASS/IMAGE and val/CLASS/IMAGE; FILE is any weight file that `ppma.load_checkpoint` reads. Without
FOLDER, the bundled handwritten digits 5 to 9 are used, with ten training images of each. Without FILE, a small backbone
is first trained on the digits 0 to 4: it has seen handwriting, but none of the classes to learn. It takes about a
minute on two CPU cores.
"""

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import ppma
from ppma.data.arrays import digits
from ppma.tasks.classification.inference import ClassifyOptions, predict
from ppma.tasks.run import train


def write_digits(folder: Path, wanted: Iterable[int], train_images: int) -> Path:
    """Write images of the given digits to folder/train/DIGIT (`train_images` of each) and folder/val/DIGIT."""
    for split, source, limit in (("train", digits("train"), train_images), ("val", digits("test"), None)):
        labels = source.labels()
        for digit in wanted:
            place = folder / split / str(digit)
            place.mkdir(parents=True)
            for index in [index for index, label in enumerate(labels) if label == digit][:limit]:
                source[index][0].save(place / f"{index}.png")
    return folder


def tune(data: Path, out: Path, steps: int, size: int, init: Path | None) -> float:
    """Train on a folder of images from a checkpoint or random weights; returns the top-1 accuracy in percent."""
    changes = {
        "model": "ppma_nano",  # used without init only: a checkpoint determines the model
        "init": init or "null",
        "data.root": data,
        "data.image_size": size,
        "data.crop_pct": 1.0,
        "augment.hflip": 0.0,  # mirrored digits are not digits
        "epochs": "null",
        "steps": steps,
        "eval_steps": steps,  # once, at the end
        "batch_size": 25,
        "lr": 1e-3,
        "ema": "null",  # too few steps for a moving average
        "workers": 0,
    }
    assignments = [f"{key}={value}" for key, value in changes.items()]
    return train("folder_finetune", out, assignments=assignments)["val_top1"]


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Fine-tune both ways; returns the accuracies in percent."""
    parser = argparse.ArgumentParser(description="fine-tune a backbone on a folder of images")
    parser.add_argument("folder", type=Path, nargs="?", help="folder with train/CLASS/IMAGE and val/CLASS/IMAGE")
    parser.add_argument("--checkpoint", type=Path, help="weights to start from")
    parser.add_argument("--steps", type=int, default=30, help="fine-tuning steps (default: %(default)s)")
    parser.add_argument("--first-steps", type=int, default=60, help="pretraining steps (default: %(default)s)")
    parser.add_argument("--size", type=int, default=32, help="image size (default: %(default)s)")
    options = parser.parse_args(arguments)

    with TemporaryDirectory() as temporary:
        work = Path(temporary)
        folder = options.folder or write_digits(work / "tuning", range(5, 10), train_images=10)
        checkpoint = options.checkpoint
        if checkpoint is None:
            others = write_digits(work / "others", range(5), train_images=200)
            tune(others, work / "first", options.first_steps, options.size, init=None)
            checkpoint = work / "first" / "best.safetensors"
        accuracies = {
            "from the checkpoint": tune(folder, work / "tuned", options.steps, options.size, init=checkpoint),
            "from random weights": tune(folder, work / "scratch", options.steps, options.size, init=None),
        }
        for start, accuracy in accuracies.items():
            print(f"{start}: {accuracy:.1f} % of the validation images right after {options.steps} steps")
        image = next(path for path in sorted(folder.glob("val/*/*")) if path.is_file())
        tuned = ppma.open_checkpoint(work / "tuned" / "best.safetensors")
        (prediction,) = predict(tuned, [image], ClassifyOptions(top=2))
        for name, probability in zip(*map(prediction.values.get, ("classes", "probabilities")), strict=True):
            print(f"{image.relative_to(folder)} shows {name!r} with probability {probability:.2f}")
    return accuracies


if __name__ == "__main__":
    main()
