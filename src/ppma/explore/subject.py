"""The model that is looked at, and how it wants its images."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from ppma.data.preprocessing import Preprocessing
from ppma.models import CONFIGS, PolylineBackbone
from ppma.models.loading import load_classifier
from ppma.ops import checks


@dataclass(frozen=True)
class Subject:
    """A model to look into.

    Attributes:
        model: in evaluation mode.
        name: for titles.
        preprocessing: how it wants its images.
        trained: whether its weights were learned; else they are random, and so is what it attends to.
        classes: names in the order of its scores, empty where unknown.
    """

    model: PolylineBackbone
    name: str
    preprocessing: Preprocessing
    trained: bool
    classes: tuple[str, ...] = field(default=(), repr=False)

    def prepare(self, image: Image.Image) -> Tensor:
        """An image as the model gets it: (3, size, size), normalised."""
        return self.preprocessing.transform()(image)

    def shown(self, prepared: Tensor) -> Tensor:
        """A prepared image to look at, (3, size, size) in [0, 1]."""
        wanted = self.preprocessing
        mean, std = (torch.tensor(values)[:, None, None] for values in (wanted.mean, wanted.std))
        return (prepared * std + mean).clamp(0, 1)


def open_subject(checkpoint: str | Path | None, name: str) -> Subject:
    """A checkpoint where there is one, else a published architecture with random weights."""
    return from_name(name) if checkpoint is None else from_checkpoint(checkpoint)


def from_name(name: str, *, seed: int = 0, **changes: Any) -> Subject:
    """A published architecture with random weights, the same for each seed.

    Args:
        name: of `ppma.models.CONFIGS`.
        seed: of the weights.
        changes: of its configuration, such as `mask`.
    """
    checks.one_of("model", name, CONFIGS)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = PolylineBackbone(CONFIGS[name].replace(**changes))
    preprocessing = Preprocessing.from_timm(model.pretrained_cfg)
    return Subject(model.eval(), f"{name} (random weights)", preprocessing, trained=False)


def from_checkpoint(path: str | Path) -> Subject:
    """Any weight file that ppma reads; a classifier of `ppma train` brings its classes and its preprocessing."""
    model, preprocessing, classes = load_classifier(path, headless=True)
    return Subject(model, Path(path).stem, preprocessing, trained=True, classes=classes)
