"""Mask R-CNN as a model: published size and cost, levels, losses."""

import pytest
import torch

from ppma.tasks.detection import DetectorConfig, mask_rcnn
from ppma.tasks.detection.model import cost

# parameters in M with 81 classes; GFLOPs at 1280 x 800 with and without the products of attention
COUNTED = {
    "ppma_tiny": (32.94, 301.3, 217.7),
    "ppma_small": (45.57, 299.0, 262.1),
    "ppma_base": (72.79, 441.3, 372.7),
}
PUBLISHED_GFLOPS = {"ppma_tiny": 218, "ppma_small": 263, "ppma_base": 374}  # the paper's leave attention out
SMALL = DetectorConfig(channels=16, box_channels=32, mask_convolutions=1, short_side=64, long_side=96)


@pytest.mark.parametrize("name", COUNTED)
def test_size_and_cost_published(name):
    with torch.device("meta"):
        model = mask_rcnn(name)
    parameters, everything, without_attention = COUNTED[name]
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(parameters, rel=5e-3)
    counted = cost(model)
    assert counted.macs / 1e9 == pytest.approx(everything, rel=0.02)
    assert counted.macs_without_attention / 1e9 == pytest.approx(without_attention, rel=0.02)
    assert counted.macs_without_attention / 1e9 == pytest.approx(PUBLISHED_GFLOPS[name], rel=0.02)


def test_pyramid_five_levels():
    model = mask_rcnn("ppma_nano", num_classes=3, detector=SMALL, stem_stride=4).eval()
    levels = model.backbone(torch.randn(1, 3, 64, 96))
    assert [tuple(level.shape[1:]) for level in levels.values()] == [(16, 16 // n, 24 // n) for n in (1, 2, 4, 8)] + [
        (16, 1, 2)
    ]
    assert model.backbone.body.config.feature_norms == (0, 1, 2, 3)
    assert model.backbone.body.config.num_classes == 0


def test_loss_reaches_every_parameter():
    model = mask_rcnn("ppma_nano", num_classes=3, detector=SMALL, stem_stride=4, drop_path_rate=0.0)
    masks = torch.zeros(1, 64, 64, dtype=torch.uint8)
    masks[:, 10:40, 12:50] = 1
    target = {"boxes": torch.tensor([[12.0, 10, 50, 40]]), "labels": torch.tensor([1]), "masks": masks}
    empty = {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.long), "masks": masks[:0]}
    losses = model([torch.rand(3, 64, 64), torch.rand(3, 48, 80)], [target, empty])
    assert len(losses) == 5
    torch.stack(list(losses.values())).sum().backward()
    without = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert without == []
    names = model.no_weight_decay()
    assert names
    assert names <= {name for name, _ in model.named_parameters()}


def test_eval_scales_images():
    model = mask_rcnn("ppma_nano", num_classes=3, detector=SMALL, stem_stride=4).eval()
    seen = []
    model.backbone.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape[-2:]))
    with torch.no_grad():
        (found,) = model([torch.rand(3, 200, 400)])
    assert seen == [(64, 96)]  # 48 x 96 in multiples of 32: the long side is the limit
    assert found["masks"].shape[1:] == (1, 200, 400)


def test_errors_named():
    with pytest.raises(ValueError, match=r"backbone_name: expected one of .*did you mean 'ppma_tiny'\?"):
        mask_rcnn("ppma_tinny")
    with pytest.raises(ValueError, match="did you mean 'drop_path_rate'"):
        mask_rcnn("ppma_nano", drop_path=0.1)
    with pytest.raises(ValueError, match="num_classes: expected at least 2"):
        mask_rcnn("ppma_nano", num_classes=1)
