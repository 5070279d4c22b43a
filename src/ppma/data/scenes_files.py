"""Scenes as files, in one folder with both COCO's and ADE20K's layout."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from pycocotools import mask as rle

from ppma.data.scenes import CLASSES, SEMANTIC_CLASSES, SPLITS, Scene, compose
from ppma.progress import track

COCO_SPLITS = {"train": "train2017", "val": "val2017"}
ADE20K_SPLITS = {"train": "training", "val": "validation"}
CLASSES_FILE = "classes.txt"
_JPEG_QUALITY = 92


def write_scenes(out: str | Path, *, train: int = 1000, val: int = 200, size: int = 96, seed: int = 0) -> None:
    """Write scenes into a new or empty folder.

    Args:
        out: the folder.
        train: number of training scenes.
        val: number of validation scenes.
        size: side in pixels.
        seed: seed of all scenes.
    """
    counts = {"train": train, "val": val}
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{name}: expected at least 1 scene, got {count}")
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"out: expected a new or empty folder, got {out}")
    for split in SPLITS:
        folders = (
            out / COCO_SPLITS[split],
            out / "images" / ADE20K_SPLITS[split],
            out / "annotations" / ADE20K_SPLITS[split],
        )
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
        images: list[dict[str, Any]] = []
        annotations: list[dict[str, Any]] = []
        for index in track(range(counts[split]), f"{split} scenes"):
            scene = compose(split, index, seed=seed, size=size)
            name = f"{index + 1:06d}"
            picture = Image.fromarray(scene.image)
            for folder in folders[:2]:
                picture.save(folder / f"{name}.jpg", quality=_JPEG_QUALITY)
            Image.fromarray(scene.semantic + np.uint8(1)).save(folders[2] / f"{name}.png")  # 0 means "unlabelled"
            images.append({"id": index + 1, "file_name": f"{name}.jpg", "width": size, "height": size})
            annotations += _annotations(scene, image_id=index + 1, first_id=len(annotations) + 1)
        categories = [{"id": label + 1, "name": name} for label, name in enumerate(CLASSES)]
        contents = {"images": images, "annotations": annotations, "categories": categories}
        path = out / "annotations" / f"instances_{COCO_SPLITS[split]}.json"
        path.write_text(json.dumps(contents), encoding="utf-8")
    (out / CLASSES_FILE).write_text("\n".join(SEMANTIC_CLASSES) + "\n", encoding="utf-8")


def _annotations(scene: Scene, *, image_id: int, first_id: int) -> list[dict[str, Any]]:
    """The digits of a scene as COCO instances."""
    written = []
    boxes = scene.boxes.tolist()
    for offset, (label, mask) in enumerate(zip(scene.labels.tolist(), scene.masks, strict=True)):
        left, top, right, bottom = boxes[offset]
        encoded = rle.encode(np.asfortranarray(mask.astype(np.uint8)))
        written.append(
            {
                "id": first_id + offset,
                "image_id": image_id,
                "category_id": label + 1,
                "bbox": [left, top, right - left, bottom - top],
                "area": int(mask.sum()),
                "iscrowd": 0,
                "segmentation": {"size": encoded["size"], "counts": encoded["counts"].decode()},
            }
        )
    return written
