"""Detections in COCO's results format, and the ids that they refer to."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pycocotools import mask as rle
from torch import Tensor

from ppma.data.coco_file import Id, read_coco

MASK_THRESHOLD = 0.5  # pixels with at least this probability belong to the mask


def coco_results(found: dict[str, Tensor], image_id: Id, category_ids: Sequence[Id]) -> list[dict[str, Any]]:
    """The detections of one image.

    Args:
        found: output of the detector: boxes (n, 4), labels (n,) from 1, scores (n,), and masks (n, 1, H, W) if
            it has any.
        image_id: id of the image.
        category_ids: ids of the labels 1, 2, ...

    Returns:
        For each detection image_id, category_id, score, bbox (left, top, width, height) and segmentation (run lengths,
        compressed to text), ready for JSON.
    """
    boxes = found["boxes"].float().cpu().numpy().astype(np.float64)
    boxes[:, 2:] -= boxes[:, :2]
    results = [
        {"image_id": image_id, "category_id": category_ids[label - 1], "score": score, "bbox": box}
        for label, score, box in zip(
            found["labels"].tolist(), found["scores"].float().tolist(), boxes.tolist(), strict=True
        )
    ]
    if "masks" in found:
        masks = (found["masks"][:, 0] >= MASK_THRESHOLD).to("cpu").numpy().astype(np.uint8)
        for result, mask in zip(results, masks, strict=True):
            result["segmentation"] = _run_lengths(mask)
    return results


def _run_lengths(mask: np.ndarray) -> dict[str, Any]:
    encoded = rle.encode(np.asfortranarray(mask))
    return {"size": encoded["size"], "counts": encoded["counts"].decode("ascii")}


@dataclass(frozen=True)
class CocoIds:
    """Ids of images and categories.

    Attributes:
        images: ids of images by path.
        categories: ids of the labels 1, 2, ...
    """

    images: dict[Path, Id]
    categories: tuple[Id, ...]


def number(paths: Sequence[Path], classes: Sequence[str]) -> CocoIds:
    """Number images from 1 in the given order, and classes from 1 in the order of the model's labels.

    Examples:
        >>> ids = number([Path("a.jpg"), Path("b.jpg")], ["cat"])
        >>> [*ids.images.values()], ids.categories
        ([1, 2], (1,))
    """
    return CocoIds({path: place for place, path in enumerate(paths, start=1)}, tuple(range(1, len(classes) + 1)))


def look_up(paths: Sequence[Path], classes: Sequence[str], annotations: Path) -> CocoIds:
    """Take the ids from an annotation file.

    Args:
        paths: a path belongs to the entry whose file_name it ends with; paths without an entry have no id.
        classes: names of categories in the file.
        annotations: a file in COCO's format.
    """
    contents = read_coco(annotations)
    ids = {name: category for category, name in contents.categories.items()}
    if unknown := [name for name in classes if name not in ids]:
        raise ValueError(f"annotations: expected the category {unknown[0]!r} of the model in {annotations}, found none")
    entries = {Path(entry.file_name).parts: image for image, entry in contents.images.items()}
    owners: dict[Id, Path] = {}
    for path in paths:
        ends = (path.parts[start:] for start in range(len(path.parts)))
        image = next((entries[end] for end in ends if end in entries), None)  # of the longest end
        if image in owners:
            name = contents.images[image].file_name
            raise ValueError(
                f"annotations: expected one image for {name} of {annotations}, got {owners[image]} and {path}"
            )
        if image is not None:
            owners[image] = path
    return CocoIds({path: image for image, path in owners.items()}, tuple(ids[name] for name in classes))
