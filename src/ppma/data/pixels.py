"""Images as tensors of their own size, for models that scale them themselves."""

import torch
from PIL import Image
from torchvision.transforms.v2 import functional as transforms


def image_tensor(image: Image.Image) -> torch.Tensor:
    """An RGB image as (3, H, W) in [0, 1]."""
    return transforms.to_dtype(transforms.pil_to_tensor(image), torch.float32, scale=True)
