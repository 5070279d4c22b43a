"""The models against the written-out release, sharing weights through a checkpoint of the authors' layout."""

import dataclasses

import pytest
import torch
from transcription import BASE, SMALL, TINY, ReleasedModel, random_weights

import ppma

ARCHITECTURES = {
    f"{family}_{name}": dataclasses.replace(arch, mask=mask)
    for family, mask in (("ppma", "2d"), ("rmt", "rmt"), ("none", "none"))
    for name, arch in (("tiny", TINY), ("small", SMALL), ("base", BASE))
    if mask != "none" or name == "tiny"
}


def double(state):
    return {name: t.double() if t.is_floating_point() else t for name, t in state.items()}


@pytest.fixture(scope="module", params=ARCHITECTURES)
def released(request, tmp_path_factory):
    """An architecture, its weights and the model that the library makes of a file with them."""
    arch = ARCHITECTURES[request.param]
    state = random_weights(arch, classes=50)
    path = tmp_path_factory.mktemp("weights") / "best.pth"
    torch.save({"model": state}, path)
    return arch, state, ppma.load_checkpoint(path)


# odd, rectangular both ways, smaller than the stride of the last stage
@pytest.mark.parametrize("size", [(45, 70), (33, 20)])
@torch.no_grad()
def test_logits_release(released, size):
    arch, state, model = released
    image = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1))
    expected = ReleasedModel(state, arch).logits(image)
    assert 0.1 < expected.std() < 10  # so that 1e-5 means something
    assert (model(image) - expected).abs().max() < 1e-5


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name.endswith("tiny")])
@torch.no_grad()
def test_logits_release_float64(name, tmp_path):
    arch = ARCHITECTURES[name]
    state = random_weights(arch, classes=50)
    torch.save({"model": state}, tmp_path / "best.pth")
    image = torch.randn(1, 3, 45, 70, dtype=torch.float64)
    expected = ReleasedModel(double(state), arch).logits(image)
    logits = ppma.load_checkpoint(tmp_path / "best.pth").double()(image)
    torch.testing.assert_close(logits, expected, rtol=1e-11, atol=1e-11)


@torch.no_grad()
def test_features_release(tmp_path):
    state = random_weights(TINY, task="detection")
    torch.save({"state_dict": {f"backbone.{name}": t for name, t in state.items()}}, tmp_path / "det.pth")
    model = ppma.load_checkpoint(tmp_path / "det.pth").double()
    image = torch.randn(1, 3, 50, 37, dtype=torch.float64)
    expected = ReleasedModel(double(state), TINY).normed_features(image)
    for feature, theirs in zip(model.forward_intermediates(image, intermediates_only=True), expected, strict=True):
        torch.testing.assert_close(feature, theirs, rtol=1e-10, atol=1e-10)
