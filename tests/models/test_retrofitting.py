"""A retrofitted ViT computes what it computed before, then learns decays; files rebuild it."""

import copy
import json

import pytest
import safetensors
import safetensors.torch
import timm
import torch

import ppma
from ppma.layers import RetrofitAttention
from ppma.models.export import DYNAMIC_TORCH
from ppma.models.retrofitting import MASKS
from ppma.testing import assert_no_worse

SMALL = {"embed_dim": 48, "depth": 2, "num_heads": 3, "num_classes": 7}
# name -> timm's name, arguments, sizes of the images
MODELS = {
    "vit": ("vit_tiny_patch16_224", {"img_size": (48, 64)}, [(48, 64)]),
    "vit_dynamic": ("vit_tiny_patch16_224", {"img_size": 48, "dynamic_img_size": True}, [(48, 48), (32, 80), (80, 32)]),
    "qk_norm_no_bias": ("vit_tiny_patch16_224", {"img_size": 48, "qk_norm": True, "qkv_bias": False}, [(48, 48)]),
    "no_prefix": ("vit_tiny_patch16_224", {"img_size": 48, "class_token": False, "global_pool": "avg"}, [(48, 48)]),
    "deit": ("deit_tiny_patch16_224", {"img_size": 48}, [(48, 48)]),
    "deit_distilled": ("deit_tiny_distilled_patch16_224", {"img_size": 48}, [(48, 48)]),
    "deit3": ("deit3_small_patch16_224", {"img_size": 48}, [(48, 48)]),
    "siglip": ("vit_base_patch16_siglip_224", {"img_size": 48}, [(48, 48)]),  # no class token, attention pooling
    "dinov2_class_token": ("vit_small_patch14_dinov2", {"img_size": 42}, [(42, 42)]),
    "dinov2": ("vit_small_patch14_reg4_dinov2", {"img_size": 42, "dynamic_img_size": True}, [(42, 42), (28, 70)]),
    "eva02": ("eva02_tiny_patch14_224", {"img_size": 42, "dynamic_img_size": True}, [(42, 42), (28, 70)]),
    "eva_fused": ("eva02_base_patch14_224", {"img_size": 42, "qkv_fused": True}, [(42, 42)]),
    "dinov3": ("vit_small_patch16_dinov3", {"img_size": 48}, [(48, 48), (32, 80)]),
}


def create(name, *, dtype=torch.float64, **changes):
    """A small model with random weights everywhere, also where timm starts at 0 or 1."""
    architecture, arguments, sizes = MODELS[name]
    if not timm.is_model(architecture):
        pytest.skip(f"timm {timm.__version__} has no {architecture}")
    torch.manual_seed(0)
    vit = timm.create_model(architecture, **{**SMALL, **arguments, **changes}).to(dtype).eval()
    with torch.no_grad():
        for parameter in vit.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return vit, [torch.randn(2, 3, *size, dtype=dtype) for size in sizes]


def assert_same(after, before):
    # a float64 sum of 1e4 terms, each rounded, in another order
    assert (after - before).abs().max() <= 1e4 * torch.finfo(before.dtype).eps * before.abs().max()


def move_decays(vit):
    """Log-decays away from 0, different in every head."""
    with torch.no_grad():
        for name, parameter in vit.named_parameters():
            if name.endswith("decay.rate"):
                parameter.uniform_(0.05, 0.5)


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_retrofit_identity(name):
    vit, images = create(name)
    before = [(vit(image), vit.forward_features(image)) for image in images]
    assert ppma.retrofit(vit) is vit
    for image, (logits, features) in zip(images, before, strict=True):
        assert_same(vit(image), logits)
        assert_same(vit.forward_features(image), features)
    move_decays(vit)
    after, features = vit.forward_features(images[-1]), before[-1][1]
    assert (after - features).abs().max() > 1e-4 * features.abs().max()  # the mask is there


@pytest.mark.parametrize("name", ["vit", "deit", "siglip", "dinov2", "eva02", "dinov3"])
def test_retrofit_rounding(name):
    """In float32, output and gradient are as close to those of float64 as the original's are."""
    vit, (image, *_) = create(name, dtype=torch.float32)
    plain, exact = copy.deepcopy(vit), copy.deepcopy(vit).double()
    assert_no_worse(ppma.retrofit(vit), plain, exact, [image])


def test_retrofit_compile_and_resize():
    """The graph has no break, and timm's set_input_size still works."""
    vit, (image,) = create("vit", dtype=torch.float32)
    ppma.retrofit(vit)
    move_decays(vit)
    assert_same(torch.compile(vit, fullgraph=True, backend="eager")(image), vit(image))
    vit.set_input_size((32, 80))
    assert vit(torch.randn(1, 3, 32, 80)).shape == (1, 7)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("combine", ["logit", "hadamard"])
@torch.no_grad()
def test_retrofit_masks(mask, combine):
    vit, (image,) = create("vit")
    before = vit(image)
    ppma.retrofit(vit, mask=mask, combine=combine)
    if combine == "logit" or mask == "v2h":  # one path
        assert_same(vit(image), before)
    else:  # two paths are summed
        assert (vit(image) - before).abs().max() > 1e-3


@torch.no_grad()
def test_retrofit_rope_mixed():
    """In float32, the only dtype of timm's frequencies."""
    MODELS["rope_mixed"] = ("vit_small_patch16_rope_mixed_224", {"img_size": 48}, [(48, 48)])
    vit, (image,) = create("rope_mixed", dtype=torch.float32)
    before = vit(image)
    assert_same(ppma.retrofit(vit)(image), before)


@torch.no_grad()
def test_retrofit_intermediates():
    vit, images = create("dinov2")
    before = [vit.forward_intermediates(image, intermediates_only=True) for image in images]
    ppma.retrofit(vit)
    for image, features in zip(images, before, strict=True):
        for ours, theirs in zip(vit.forward_intermediates(image, intermediates_only=True), features, strict=True):
            assert_same(ours, theirs)


@torch.no_grad()
def test_retrofit_features_only():
    arguments = {**SMALL, "img_size": 48, "dynamic_img_size": True, "features_only": True, "out_indices": (0, 1)}
    arguments.pop("num_classes")
    features = timm.create_model("vit_tiny_patch16_224", **arguments).eval()
    image = torch.randn(1, 3, 32, 64)
    before = features(image)
    ppma.retrofit(features.model)
    for ours, theirs in zip(features(image), before, strict=True):
        assert ours.shape == (1, 48, 2, 4)
        assert_same(ours, theirs)


@torch.no_grad()
def test_retrofit_blocks():
    vit, (image,) = create("vit", depth=3)
    before = vit(image)
    ppma.retrofit(vit, blocks=[0, -1])
    assert [isinstance(block.attn, RetrofitAttention) for block in vit.blocks] == [True, False, True]
    assert_same(vit(image), before)


@pytest.mark.parametrize("decay", ["zero", "relu", "softplus"])
def test_retrofit_gradients(decay):
    vit, (image,) = create("vit")
    ppma.retrofit(vit, decay=decay)
    if decay == "zero":
        vit.forward_features(image)[..., ::3].sum().backward()
        assert all(block.attn.decay.rate.grad.abs().min() > 0 for block in vit.blocks)  # every head, from 0 on
        move_decays(vit)
    vit.forward_features(image)[..., ::3].sum().backward()
    gradients = [parameter.grad for name, parameter in vit.named_parameters() if ".decay." in name]
    assert gradients
    assert all(gradient.abs().max() > 0 for gradient in gradients)


def test_retrofit_training():
    """With everything else frozen, learned decays alone reduce a loss."""
    vit, (image,) = create("vit", dtype=torch.float32)
    ppma.retrofit(vit)
    for name, parameter in vit.named_parameters():
        parameter.requires_grad_(".decay." in name)
    move_decays(vit)
    with torch.no_grad():
        target = vit(image)
        for block in vit.blocks:
            block.attn.decay.rate.zero_()
    optimizer = torch.optim.Adam([p for p in vit.parameters() if p.requires_grad], lr=0.02)
    losses = []
    for _ in range(12):
        loss = (vit(image) - target).square().mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.5 * losses[0]


def test_retrofit_checkpointing():
    vit, (image,) = create("vit")
    ppma.retrofit(vit)
    move_decays(vit)
    gradients = []
    for enable in (False, True):
        vit.set_grad_checkpointing(enable)
        vit.zero_grad()
        vit.train()(image).square().mean().backward()
        gradients.append(vit.blocks[0].attn.decay.rate.grad.clone())
    assert_same(*gradients)


@torch.no_grad()
def test_retrofit_copies_are_independent():
    vit, (square, wide, _) = create("vit_dynamic")
    ppma.retrofit(vit)
    move_decays(vit)
    expected = vit(square), vit(wide)
    other = copy.deepcopy(vit)
    hooks = (m.patch_embed._forward_hooks.values() for m in (vit, other))
    assert not set(map(id, next(hooks))) & set(map(id, next(hooks)))
    assert_same(other(wide), expected[1])
    assert_same(vit(square), expected[0])


@torch.no_grad()
def test_retrofit_state_dict():
    """timm's weights fit except for the decay heads; those of a retrofitted model fit altogether."""
    plain, (image,) = create("vit")
    vit, _ = create("vit")
    ppma.retrofit(vit)
    loaded = vit.load_state_dict(plain.state_dict(), strict=False)
    assert not loaded.unexpected_keys
    assert all(".decay." in name for name in loaded.missing_keys)
    move_decays(vit)
    other, _ = create("vit")
    ppma.retrofit(other).load_state_dict(vit.state_dict())
    assert_same(other(image), vit(image))


@pytest.mark.parametrize("name", ["vit", "dinov2", "eva02", "dinov3"])
@torch.no_grad()
def test_retrofit_file(name, tmp_path):
    vit, images = create(name, dtype=torch.float32)
    ppma.retrofit(vit, mask="v2h", blocks=[1])
    move_decays(vit)
    sizes = {key: value for key, value in SMALL.items() if key != "num_classes"}
    ppma.save_retrofit(vit, tmp_path / "vit.safetensors", **sizes)
    again = ppma.load_retrofit(tmp_path / "vit.safetensors")
    assert not again.training
    assert again.retrofit_config == vit.retrofit_config
    for image in images:
        assert torch.equal(again(image), vit(image))


def test_retrofit_file_checked(tmp_path):
    vit, _ = create("vit", dtype=torch.float32)
    ppma.retrofit(vit)
    with pytest.raises(ValueError, match="model_args: the weights do not fit the model"):
        ppma.save_retrofit(vit, tmp_path / "vit.safetensors")
    sizes = {key: value for key, value in SMALL.items() if key != "num_classes"}
    vit.norm.eps = 0.5  # in no argument
    with pytest.raises(ValueError, match=r"model_args: expected the arguments .* its outputs differ"):
        ppma.save_retrofit(vit, tmp_path / "vit.safetensors", **sizes)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match=r"vit: expected a model of `ppma.retrofit`, got VisionTransformer"):
        ppma.save_retrofit(create("vit")[0], tmp_path / "vit.safetensors")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "hf-hub:someone/model"}, "expected the name of a model of timm"),
        ({"model_args": {"checkpoint_path": "evil.pth"}}, "model_args: expected arguments of a ViT, got 'checkpoint_p"),
        ({"model_args": {"depth": 10**9}}, "expected weights of 1000000000 blocks, got 1 tensors"),
        ({"model_args": {"embed_dim": "two"}}, "cannot be built"),
        ({"retrofit": {"mask": "spiral"}}, "mask: expected"),
        ({"retrofit": 3}, "expected model_args and retrofit as mappings"),
    ],
)
def test_retrofit_file_hostile(change, message, tmp_path):
    facts = {"model": "test_vit", "model_args": {}, "retrofit": {}}
    metadata = {"ppma_retrofit": json.dumps({**facts, **change})}
    safetensors.torch.save_file({"x": torch.zeros(1)}, tmp_path / "vit.safetensors", metadata)
    with pytest.raises(ppma.CheckpointError, match=message):
        ppma.load_retrofit(tmp_path / "vit.safetensors")


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("test_resnet", {}, "vit: expected a VisionTransformer or Eva of timm, got ResNet"),
        ("test_vit", {"patch_drop_rate": 0.1}, "vit: expected patch_drop_rate=0"),
        ("test_vit", {"attn_drop_rate": 0.1}, r"vit: blocks\[0\]: expected attn_drop_rate=0, .* got 0.1"),
        ("beit_base_patch16_224", {"embed_dim": 48, "depth": 1, "num_heads": 3}, "vit: expected .*, got Beit"),
    ],
)
def test_retrofit_refused_model(name, arguments, message):
    vit = timm.create_model(name, **arguments)
    with pytest.raises(ValueError, match=message):
        ppma.retrofit(vit)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mask": "rmt"}, "mask: expected"),
        ({"mask": "2D"}, "mask: expected"),
        ({"combine": "sum"}, "combine: expected"),
        ({"decay": "none"}, "decay: expected"),
        ({"blocks": [0, 9]}, "blocks: expected indices from -2 to 1, got 9"),
        ({"kind": "criss_cross"}, "kind: criss_cross takes no prefix tokens, the model has 1"),
    ],
)
def test_retrofit_wrong_arguments(options, message):
    vit, _ = create("vit")
    before = str(vit)
    with pytest.raises(ValueError, match=message):
        ppma.retrofit(vit, **options)
    assert str(vit) == before


@pytest.mark.parametrize("name", ["vit", "dinov2", "eva02", "dinov3"])
@torch.no_grad()
def test_retrofit_export(name):
    """torch.export with a dynamic batch."""
    vit, (image, *_) = create(name, dtype=torch.float32)
    ppma.retrofit(vit)
    move_decays(vit)
    shapes = ({0: torch.export.Dim("batch", min=1, max=64)},)
    program = torch.export.export(vit, (image,), dynamic_shapes=shapes, strict=False).module()
    more = torch.randn(5, *image.shape[1:])
    assert_same(program(more), vit(more))


@pytest.mark.skipif(tuple(map(int, torch.__version__.split(".")[:2])) < DYNAMIC_TORCH, reason="torch is too old")
@torch.no_grad()
def test_retrofit_export_dynamic():
    """Any size, from an example that is not the model's own size."""
    vit, (*_, image) = create("vit_dynamic", dtype=torch.float32)
    ppma.retrofit(vit)
    move_decays(vit)
    rows, columns = (torch.export.Dim(name, min=2, max=64) for name in ("rows", "columns"))
    shapes = ({2: 16 * rows, 3: 16 * columns},)
    program = torch.export.export(vit, (image,), dynamic_shapes=shapes, strict=False).module()
    other = torch.randn(2, 3, 48, 112)
    assert_same(program(other), vit(other))


@torch.no_grad()
def test_retrofit_export_onnx(tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    vit, (image,) = create("vit", dtype=torch.float32, depth=1)
    ppma.retrofit(vit)
    move_decays(vit)
    ppma.export_onnx(vit, image, tmp_path / "vit.onnx", input_names=["image"])
    session = onnxruntime.InferenceSession(str(tmp_path / "vit.onnx"), providers=["CPUExecutionProvider"])
    assert_same(torch.from_numpy(session.run(None, {"image": image.numpy()})[0]), vit(image))


def test_retrofit_twice():
    vit, _ = create("vit")
    ppma.retrofit(vit)
    with pytest.raises(ValueError, match="got one that was retrofitted before"):
        ppma.retrofit(vit)
