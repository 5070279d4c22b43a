"""The record of an image for the page: prediction, tensors, labels; from our backbones and from ViTs of timm."""

import base64
import io

import pytest
import timm
import torch
from PIL import Image

import ppma
from ppma.explore import capture_image, query_panels, record, subject
from ppma.explore.query import decays

NOISE = Image.effect_noise((40, 50), 60).convert("RGB")


def decoded(text, *shape):
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.float16).view(shape)


def test_image_record_tensors(nano):
    made = record.image_record(nano, NOISE, "noise")
    prepared = nano.prepare(NOISE)
    for layer, expected in zip(made["layers"], capture_image(nano.model, prepared), strict=True):
        shape = (layer["heads"], layer["prefix"] + expected.grid[0] * expected.grid[1], layer["dim"])
        torch.testing.assert_close(decoded(layer["k"], *shape), expected.k[0].flatten(1, 2).half(), rtol=0, atol=0)
        alpha, _ = decays(expected.mask)
        shape = (layer["heads"], *expected.grid)
        torch.testing.assert_close(decoded(layer["alpha"], *shape), alpha.expand(1, *shape)[0].half(), rtol=0, atol=0)
    with Image.open(io.BytesIO(base64.b64decode(made["picture"].partition(",")[2]))) as picture:
        shown = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8).view(*picture.size[::-1], 3)
    assert torch.equal(shown.permute(2, 0, 1), (nano.shown(prepared) * 255).round().byte())


def test_image_record_prediction(nano):
    assert record.image_record(nano, NOISE, "noise")["prediction"] == []
    names = tuple(f"class {n}" for n in range(1000))
    named = subject.Subject(nano.model, "nano", nano.preprocessing, True, names)
    prediction = record.image_record(named, NOISE, "noise")["prediction"]
    with torch.no_grad():
        shares = nano.model(nano.prepare(NOISE)[None])[0].softmax(0)
    assert [name for name, _ in prediction] == [names[index] for index in shares.topk(5).indices]
    assert prediction[0][1] == pytest.approx(shares.max().item(), abs=5e-5)


def test_plain_vit_unchanged():
    torch.manual_seed(0)
    plain = timm.create_model("test_vit").eval()
    opened = subject.from_timm("test_vit")
    image = torch.randn(1, 3, 160, 160, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(opened.model(image), plain(image))
    made = record.image_record(opened, NOISE, "noise")
    assert [layer["label"] for layer in made["layers"]] == [f"block {n + 1}" for n in range(6)]
    assert all(layer["open"] and layer["prefix"] == 1 and layer["combine"] == "logit" for layer in made["layers"])


def test_vit_attention_is_timms():
    """The recorded attention of a plain ViT is the softmax that timm's layer computes."""
    opened = subject.from_timm("test_vit")
    torch.manual_seed(0)
    plain = timm.create_model("test_vit").eval()
    image = opened.prepare(NOISE)
    seen = []
    plain.blocks[2].attn.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    with torch.no_grad():
        plain(image[None])
        attention = plain.blocks[2].attn
        q, k, _ = (
            attention.qkv(seen[0]).reshape(1, -1, 3, attention.num_heads, attention.head_dim).permute(2, 0, 3, 1, 4)
        )
        weights = (q @ k.mT * attention.scale).softmax(-1)[0, 1]
    captured = capture_image(opened.model, image)[2]
    W = captured.grid[1]
    panels = query_panels(captured, (3, 4), head=1)
    torch.testing.assert_close(panels.masked_attention.flatten(), weights[1 + 3 * W + 4, 1:])


def test_retrofit_file_opened(tmp_path):
    vit = ppma.retrofit(timm.create_model("test_vit", num_classes=10), mask="v2h", decay="softplus")
    ppma.save_retrofit(vit, tmp_path / "vit.safetensors")
    opened = subject.open_subject(tmp_path / "vit.safetensors", "")
    made = record.image_record(opened, NOISE, "noise")
    assert (opened.name, opened.trained, made["layers"][0]["mask"]) == ("vit", True, "v2h")
    assert not any(layer["open"] for layer in made["layers"])


def test_vit_has_no_backbone():
    with pytest.raises(ValueError, match="expected one of our backbones, got timm's VisionTransformer"):
        subject.untrained(subject.from_timm("test_vit"))
