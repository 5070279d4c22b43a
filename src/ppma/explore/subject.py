"""The model to inspect, with its preprocessing."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from ppma.data import imagenet
from ppma.data.preprocessing import Preprocessing
from ppma.models import CONFIGS, BackboneConfig, PolylineBackbone, load_retrofit, open_checkpoint, retrofit
from ppma.models.checkpoints.metadata import task_key
from ppma.models.loading import load_classifier
from ppma.models.published import PUBLISHED
from ppma.models.timm_models import TimmModel, check_model, is_timm
from ppma.ops import checks


@dataclass(frozen=True)
class Subject:
    """A model to inspect.

    Attributes:
        model: a model with our attention, or a ViT of timm after `ppma.retrofit`, in evaluation mode; its output are
            logits (1, classes), or (1, classes, height, width) of a segmentation model.
        name: for titles.
        preprocessing: transform of its input images.
        trained: whether the weights come from a checkpoint; otherwise they are random.
        classes: class names in the order of the logits; empty if unknown.
        colours: of the classes of a segmentation model, (red, green, blue); None is not painted.
    """

    model: nn.Module
    name: str
    preprocessing: Preprocessing
    trained: bool
    classes: tuple[str, ...] = field(default=(), repr=False)
    colours: tuple[tuple[int, int, int] | None, ...] = field(default=(), repr=False)

    @property
    def backbone(self) -> PolylineBackbone:
        """The model, if it is one of ours.

        Raises:
            ValueError: it is a model of timm.
        """
        if not isinstance(self.model, PolylineBackbone):
            raise ValueError(f"model: expected one of our backbones, got timm's {type(self.model).__name__}")
        return self.model

    def prepare(self, image: Image.Image) -> Tensor:
        """Preprocess an image for the model: (3, size, size), normalised."""
        return self.preprocessing.transform()(image)

    def shown(self, prepared: Tensor) -> Tensor:
        """Undo the normalisation of a prepared image for display, (3, size, size) in [0, 1]."""
        mean, std = (
            torch.tensor(values)[:, None, None] for values in (self.preprocessing.mean, self.preprocessing.std)
        )
        return (prepared * std + mean).clamp(0, 1)


def default_name(*tasks: str) -> str:
    """The weights in this package for the first of these tasks that has some; "ppma_nano" if none has.

    Args:
        tasks: in order of preference; classification alone if none is given.
    """
    packaged = {one.task: one.name for one in reversed(PUBLISHED.values()) if one.repository is None}
    return next((packaged[task] for task in tasks or ("classification",) if task in packaged), "ppma_nano")


def open_subject(checkpoint: str | Path | None, name: str) -> Subject:
    """Open a weight file or, if there is none, a model by name.

    Args:
        checkpoint: a weight file or published weights.
        name: published weights; an architecture of ours, or a ViT of timm, with random weights; or a ViT of timm with a
            tag of its pretrained weights, such as "vit_tiny_patch16_224.augreg_in21k_ft_in1k".
    """
    if checkpoint is None and name not in PUBLISHED:
        check_model(name, {})
        return from_timm(name) if is_timm(name) else from_name(name)
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


def from_timm(name: str) -> Subject:
    """Build a ViT of timm, with its pretrained weights if the name has a tag; its attention stays without a mask."""
    trained = "." in name
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = TimmModel(name).create(pretrained=trained)
    title = name if trained else f"{name} (random weights)"
    return vit_subject(model, title, trained=trained)


def vit_subject(model: nn.Module, name: str, *, trained: bool, classes: tuple[str, ...] = ()) -> Subject:
    """A ViT of timm; one without masks gets some with all decays 1, which do not change it."""
    vit: Any = model if hasattr(model, "retrofit_config") else retrofit(model)
    count = vit.num_classes if trained else 0
    if not classes and count == len(imagenet.class_ids()):
        classes = imagenet.class_ids()
    preprocessing = Preprocessing.from_timm(vit.pretrained_cfg)
    size = vit.patch_embed.img_size
    if size is not None:
        preprocessing = replace(preprocessing, image_size=size[0])
    return Subject(vit.eval(), name, preprocessing, trained=trained, classes=imagenet.readable(classes))


def untrained(subject: Subject, *, seed: int = 0) -> Subject:
    """The same architecture and preprocessing with random weights."""
    return replace(subject, model=_random(subject.backbone.config, seed), name="random weights", trained=False)


def _random(config: BackboneConfig, seed: int) -> PolylineBackbone:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return PolylineBackbone(config).eval()


def from_checkpoint(path: str | Path) -> Subject:
    """Open a weight file or published weights; classifiers of `ppma train` include their classes and preprocessing."""
    name = str(path) if str(path) in PUBLISHED else Path(path).stem
    checkpoint = open_checkpoint(path)
    if task_key("retrofit") in checkpoint.metadata:
        return vit_subject(load_retrofit(path), name, trained=True)
    model, preprocessing, classes = load_classifier(checkpoint, headless=True)
    if not isinstance(model, PolylineBackbone):
        return replace(vit_subject(model, name, trained=True, classes=classes), preprocessing=preprocessing)
    return Subject(model, name, preprocessing, trained=True, classes=imagenet.readable(classes))
