"""Backbones with attention of low rank, and with padded images."""

import pytest
import torch
import torch.nn.functional as F

from ppma.models import CONFIGS, PolylineBackbone
from ppma.models.profile import profile
from ppma.ops import decompositions

NANO = CONFIGS["ppma_nano"]


def backbone(kind, **changes):
    torch.manual_seed(0)
    return PolylineBackbone(NANO.replace(kinds=(kind,) * len(NANO.depths), num_classes=3, **changes))


@pytest.mark.parametrize("formulation", ["paper", "release"])
@pytest.mark.parametrize("kind", ["linear", "decomposed"])
def test_training_low_rank(kind, formulation):
    """A few steps on four images learn them, and reach every parameter."""
    model = backbone(kind, formulation=formulation)
    images, labels = torch.randn(4, 3, 32, 32), torch.tensor([0, 1, 2, 0])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(8):
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("kind", ["linear", "decomposed"])
def test_profile_low_rank(kind):
    """From 32 to 64 pixels everything grows with the tokens; criss-cross and full attention grow faster."""
    head = profile(backbone(kind), (32, 32)).parts[-1].macs

    def growth(name):
        small, large = (profile(backbone(name), (size, size)).total.macs for size in (64, 128))
        return large / small

    assert head > 0
    assert growth(kind) < 4.0 < growth("full")


@pytest.mark.parametrize("kind", ["linear", "decomposed"])
def test_export_low_rank(kind):
    model, image = backbone(kind).eval(), torch.randn(1, 3, 32, 48)
    program = torch.export.export(model, (image,))
    assert any("linear_attention" in str(node.target) for node in program.graph.nodes)
    expected = model(image)
    torch.testing.assert_close(program.module()(image), expected)
    plain = program.run_decompositions(decompositions.table())
    assert not any("ppma" in str(node.target) for node in plain.graph.nodes)
    torch.testing.assert_close(plain.module()(image), expected)


def test_forward_intermediates_valid():
    """Padding is no key in any stage: what lies deep inside it reaches no token of the image."""
    model = backbone("criss_cross").eval()
    image, valid = torch.randn(1, 3, 96, 64), torch.zeros(1, 96, 64, dtype=torch.bool)
    valid[:, :32] = True
    other = image.clone()
    other[:, :, 64:] = torch.randn(1, 3, 32, 64)
    with torch.no_grad():
        padded, changed = (model.forward_intermediates(x, valid=valid, intermediates_only=True) for x in (image, other))
        unmasked = [model.forward_intermediates(x, intermediates_only=True) for x in (image, other)]
    for index, (a, b) in enumerate(zip(padded, changed, strict=True)):
        rows = a.shape[2] // 3 - 1  # the last row of the image sees its border through the downsampling
        if rows:
            torch.testing.assert_close(a[:, :, :rows], b[:, :, :rows])
            assert not torch.allclose(*(features[index][:, :, :rows] for features in unmasked))
