"""UPerNet: published size and cost, initialisation, scores."""

import pytest
import torch
from torch import nn

from ppma.tasks.segmentation import DecoderConfig, upernet
from ppma.tasks.segmentation.model import cost

# parameters in M with 150 classes; the paper's GFLOPs at 512 x 2048
PUBLISHED = {"ppma_tiny": (43.09, 983), "ppma_small": (55.73, 984), "ppma_base": (83.12, 1137)}
SMALL = DecoderConfig(channels=16, auxiliary_channels=8)


@pytest.mark.parametrize("name", PUBLISHED)
def test_cost_published(name):
    with torch.device("meta"):
        model = upernet(name)
    parameters, gflops = PUBLISHED[name]
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(parameters, rel=5e-3)
    counted = cost(model)
    assert counted.macs / 1e9 == pytest.approx(gflops, rel=0.02)
    assert counted.macs_without_attention < counted.macs


def test_forward_shapes():
    model = upernet("ppma_nano", num_classes=5, decoder=SMALL)
    images = torch.randn(2, 3, 40, 56)
    scores = model(images)
    assert scores.main.shape == scores.auxiliary.shape == (2, 5, 40, 56)
    (scores.main.mean() + scores.auxiliary.mean()).backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []
    assert model.eval()(images).auxiliary is None
    assert model.no_weight_decay() <= {name for name, _ in model.named_parameters()}


def test_initialisation_mmsegmentation():
    torch.manual_seed(0)
    model = upernet("ppma_nano", num_classes=150)
    convolution = model.decode_head.fpn_bottleneck.conv.weight  # 9 x 512 outputs: std sqrt(2 / fan_out)
    assert convolution.std().item() == pytest.approx((2 / (9 * 512)) ** 0.5, rel=0.02)
    for head in (model.decode_head, model.auxiliary_head):
        dropout, classifier = head.classifier
        assert isinstance(dropout, nn.Dropout2d)
        assert dropout.p == 0.1
        assert classifier.weight.std().item() == pytest.approx(0.01, rel=0.05)
        assert not classifier.bias.any()


def test_initialisation_classifier_std():
    torch.manual_seed(0)
    model = upernet("ppma_nano", num_classes=150, decoder=DecoderConfig(classifier_std=0.1))
    for head in (model.decode_head, model.auxiliary_head):
        assert head.classifier[1].weight.std().item() == pytest.approx(0.1, rel=0.05)


def test_upernet_errors():
    with pytest.raises(ValueError, match=r"backbone_name: expected one of .*did you mean 'ppma_tiny'\?"):
        upernet("ppma_tinny")
    with pytest.raises(ValueError, match="num_classes: expected at least 2"):
        upernet("ppma_nano", num_classes=1)
