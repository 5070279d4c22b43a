"""Parameters and multiply-adds of Mask R-CNN and UPerNet on PPMA backbones: `python -m ppma.tasks.sizes`."""

from collections.abc import Sequence

import torch
from torch import nn

from ppma.tasks import detection, segmentation
from ppma.tasks.dense.cost import Cost
from ppma.tasks.detection.model import cost as detection_cost
from ppma.tasks.segmentation.model import cost as segmentation_cost

BACKBONES = ("ppma_tiny", "ppma_small", "ppma_base")


def table(backbones: Sequence[str] = BACKBONES) -> str:
    """The table in Markdown, at the paper's image sizes and numbers of classes.

    Examples:
        >>> from ppma.tasks.sizes import table
        >>> print(table(["ppma_tiny"]).splitlines()[-1])
        | ppma_tiny | 32.94 | 301.3 | 217.7 | 43.09 | 982.2 | 891.2 |
    """
    lines = [
        "| | Mask R-CNN, M parameters | GFLOPs at 1280 x 800 | without attention products "
        "| UPerNet, M parameters | GFLOPs at 512 x 2048 | without attention products |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name in backbones:
        with torch.device("meta"):
            detector, segmenter = detection.mask_rcnn(name), segmentation.upernet(name)
        cells = (*_cells(detector, detection_cost(detector)), *_cells(segmenter, segmentation_cost(segmenter)))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cells(model: nn.Module, cost: Cost) -> tuple[str, str, str]:
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return f"{parameters / 1e6:.2f}", f"{cost.macs / 1e9:.1f}", f"{cost.macs_without_attention / 1e9:.1f}"


if __name__ == "__main__":
    print(table())
