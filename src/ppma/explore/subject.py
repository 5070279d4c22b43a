"""The model to inspect, with its preprocessing."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from ppma.data.imagenet import readable
from ppma.data.preprocessing import Preprocessing
from ppma.models import CONFIGS, BackboneConfig, PolylineBackbone
from ppma.models.loading import load_classifier
from ppma.models.published import PUBLISHED
from ppma.ops import checks


@dataclass(frozen=True)
class Subject:
    """A model to inspect.

    Attributes:
        model: the backbone, in evaluation mode.
        name: for titles.
        preprocessing: transform of its input images.
        trained: whether the weights come from a checkpoint; otherwise they are random.
        classes: class names in the order of the logits; empty if unknown.
    """

    model: PolylineBackbone
    name: str
    preprocessing: Preprocessing
    trained: bool
    classes: tuple[str, ...] = field(default=(), repr=False)

    def prepare(self, image: Image.Image) -> Tensor:
        """Preprocess an image for the model: (3, size, size), normalised."""
        return self.preprocessing.transform()(image)

    def shown(self, prepared: Tensor) -> Tensor:
        """Undo the normalisation of a prepared image for display, (3, size, size) in [0, 1]."""
        mean, std = (
            torch.tensor(values)[:, None, None] for values in (self.preprocessing.mean, self.preprocessing.std)
        )
        return (prepared * std + mean).clamp(0, 1)


def open_subject(checkpoint: str | Path | None, name: str) -> Subject:
    """Open a checkpoint or, if there is none, published weights or an architecture with random weights by name."""
    if checkpoint is None and name not in PUBLISHED:
        return from_name(name)
    return from_checkpoint(name if checkpoint is None else checkpoint)


def from_name(name: str, *, seed: int = 0, **changes: Any) -> Subject:
    """Build an architecture with random weights.

    Args:
        name: a name of `ppma.models.CONFIGS`.
        seed: seed of the weights.
        changes: configuration changes, such as `mask`.
    """
    checks.one_of("model", name, CONFIGS)
    model = _random(CONFIGS[name].replace(**changes), seed)
    preprocessing = Preprocessing.from_timm(model.pretrained_cfg)
    return Subject(model, f"{name} (random weights)", preprocessing, trained=False)


def untrained(subject: Subject, *, seed: int = 0) -> Subject:
    """The same architecture and preprocessing with random weights."""
    return replace(subject, model=_random(subject.model.config, seed), name="random weights", trained=False)


def _random(config: BackboneConfig, seed: int) -> PolylineBackbone:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return PolylineBackbone(config).eval()


def from_checkpoint(path: str | Path) -> Subject:
    """Open a weight file or published weights; classifiers of `ppma train` include their classes and preprocessing."""
    model, preprocessing, classes = load_classifier(path, headless=True)
    if not isinstance(model, PolylineBackbone):
        raise ValueError(f"{path}: expected one of our backbones, got timm's {type(model).__name__}")
    name = str(path) if str(path) in PUBLISHED else Path(path).stem
    return Subject(model, name, preprocessing, trained=True, classes=readable(classes))
