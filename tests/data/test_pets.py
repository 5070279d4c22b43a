"""Oxford-IIIT Pet's layout."""

import numpy as np
import pytest
from PIL import Image

from ppma.data.segmentation import SegmentationDataConfig, SegmentationImages


@pytest.fixture
def root(tmp_path):
    folder = tmp_path / "oxford-iiit-pet"
    for name in ("images", "annotations/trimaps"):
        (folder / name).mkdir(parents=True)
    names = [f"pug_{index}" for index in range(22)]
    for name in names:
        Image.new("RGB", (6, 4)).save(folder / "images" / f"{name}.jpg")
        trimap = np.full((4, 6), 2, np.uint8)
        trimap[1:3, 1:3], trimap[0] = 1, 3
        Image.fromarray(trimap).save(folder / "annotations" / "trimaps" / f"{name}.png")
    for split, chosen in {"trainval": names[:20], "test": names[20:]}.items():
        lines = [f"{name} 1 2 3" for name in chosen]
        (folder / "annotations" / f"{split}.txt").write_text("\n".join(lines) + "\n")
    return tmp_path


@pytest.mark.parametrize("inside", ["", "oxford-iiit-pet"])
def test_splits(inside, root):
    data = SegmentationDataConfig(root=str(root / inside), name="pets")
    opened = {split: SegmentationImages(data, split) for split in ("train", "val", "trainval", "test")}
    assert {split: len(images) for split, images in opened.items()} == {
        "train": 18, "val": 2, "trainval": 20, "test": 2,
    }  # fmt: skip
    assert [image.stem for image, _ in opened["val"].pairs] == ["pug_0", "pug_10"]
    assert opened["train"].classes == ("pet", "background", "border")
    _, labels = opened["test"][0]
    assert labels.tolist() == [[2] * 6, [1, 0, 0, 1, 1, 1], [1, 0, 0, 1, 1, 1], [1] * 6]


def test_mistakes(root):
    data = SegmentationDataConfig(root=str(root), name="pets")
    with pytest.raises(ValueError, match="Oxford-IIIT Pet has train, val, trainval, test, got 'validation'"):
        SegmentationImages(data, "validation")
    (root / "oxford-iiit-pet" / "annotations" / "test.txt").unlink()
    with pytest.raises(ValueError, match=r"test\.txt: expected text in UTF-8"):
        SegmentationImages(data, "test")
