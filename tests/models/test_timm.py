"""The registered names keep timm's conventions."""

import copy
import pickle

import pytest
import timm
import torch
from timm.data import resolve_data_config
from timm.models import group_parameters, save_for_hf
from timm.optim import create_optimizer_v2, param_groups_layer_decay

import ppma
from ppma.models import CONFIGS

NAMES = sorted(CONFIGS)
PARAMETERS = {
    "ppma_tiny": 14_335_272,
    "ppma_small": 26_969_472,
    "ppma_base": 54_158_524,
    "rmt_tiny": 14_334_216,
}


def nano(**options):
    torch.manual_seed(0)
    return timm.create_model("ppma_nano", num_classes=7, **options)


def count(model):
    return sum(parameter.numel() for parameter in model.parameters())


def test_registered_names():
    assert set(NAMES) <= set(timm.list_models())
    assert set(NAMES) == set(timm.list_models(module="variants"))


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_published(name):
    assert count(timm.create_model(name, formulation="release")) == PARAMETERS[name]
    paper = count(timm.create_model(name, formulation="paper"))
    assert abs(paper / PARAMETERS[name] - 1) < 1e-3


def test_parameters_nano():
    assert 0.8e6 < count(nano()) < 1.2e6
    assert 0.8e6 < count(timm.create_model("ppma_nano")) < 1.2e6


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_forward_image_sizes(name):
    model = timm.create_model(name, num_classes=5).eval()
    for size in ((32, 32), (37, 61), (1, 1)):
        image = torch.randn(1, 3, *size)
        features = model.forward_features(image)
        assert features.shape[-1] == model.num_features
        assert model.forward_head(features, pre_logits=True).shape == (1, model.head_hidden_size)
        logits = model(image)
        assert logits.shape == (1, 5)
        assert torch.isfinite(logits).all()
        torch.testing.assert_close(logits, model.forward_head(features))
    cfg = model.pretrained_cfg
    state = model.state_dict()
    assert f"{cfg['classifier']}.weight" in state
    assert state[f"{cfg['first_conv']}.weight"].shape[1] == 3
    model.reset_classifier(0)
    assert model(image).shape == (1, model.head_hidden_size)
    model.reset_classifier(0, "")
    assert model(torch.randn(1, 3, 64, 96)).shape == (1, *_last_grid(model, 64, 96), model.head_hidden_size)
    model.reset_classifier(3, "avg")
    assert model(image).shape == (1, 3)
    assert model.get_classifier().out_features == 3
    assert model.num_classes == 3


def _last_grid(model, height, width):
    reduction = model.feature_info[-1]["reduction"]
    return height // reduction, width // reduction


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_features_shapes(name):
    model = timm.create_model(name, features_only=True).eval()
    image = torch.randn(1, 3, 64, 96)
    features = model(image)
    info = model.feature_info
    strides = [2, 4, 8, 16] if name == "ppma_nano" else [4, 8, 16, 32]
    assert info.reduction() == strides
    assert [tuple(f.shape) for f in features] == [
        (1, channels, 64 // stride, 96 // stride) for channels, stride in zip(info.channels(), strides, strict=True)
    ]
    # each through a layer norm of its own, which starts as the identity: zero mean and unit variance over channels
    for feature in features:
        torch.testing.assert_close(feature.mean(1), torch.zeros_like(feature[:, 0]), atol=1e-5, rtol=0)
    assert not [name for name, _ in model.named_parameters() if ".head." in name]


def test_features_out_indices():
    model = nano(features_only=True, out_indices=(0, 2))
    features = model(torch.randn(2, 3, 32, 32))
    assert model.feature_info.channels() == [32, 96]
    sum(feature.square().sum() for feature in features).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    config = model.model.config
    assert (config.depths, config.feature_norms, config.num_classes) == ((1, 2, 4), (0, 2), 0)
    assert ppma.models.PolylineBackbone(config).state_dict().keys() == model.model.state_dict().keys()


@torch.no_grad()
def test_forward_intermediates():
    model = nano().eval()
    image = torch.randn(1, 3, 40, 56)
    last, features = model.forward_intermediates(image)
    torch.testing.assert_close(last, model.forward_features(image))
    torch.testing.assert_close(features[-1].permute(0, 2, 3, 1), last)
    assert len(features) == 4
    (channel_last,) = model.forward_intermediates(
        image, indices=[1], output_fmt="NHWC", stop_early=True, intermediates_only=True
    )
    torch.testing.assert_close(channel_last.permute(0, 3, 1, 2), features[1])
    with pytest.raises(ValueError, match="output_fmt"):
        model.forward_intermediates(image, output_fmt="NLC")


@pytest.mark.parametrize("mask", ["none", "rmt", "cross", "hilbert", "v2h", "2d", "shared"])
@pytest.mark.parametrize("formulation", ["paper", "release"])
def test_training_masks(mask, formulation):
    model = nano(mask=mask, formulation=formulation)
    model(torch.randn(2, 3, 24, 32)).square().mean().backward()
    missing = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert missing == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"formulation": "papers"}, "did you mean 'paper'"),
        ({"mask": "2d-polyline"}, "mask: expected one of"),
        ({"drop_path": 0.1}, "model argument: .* did you mean 'drop_path_rate'"),
        ({"depths": (1, 2)}, "expected one entry for each of 2 stages"),
        ({"in_chans": 0}, "in_chans"),
        ({"feature_norms": (4,)}, "feature_norms: expected stages 0 to 3"),
    ],
)
def test_create_model_wrong_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        nano(**options)


def test_drop_rates():
    model = nano(drop_path_rate=0.7, drop_rate=0.5)
    rates = [getattr(block.drop_path, "drop_prob", 0.0) for stage in model.stages for block in stage.blocks]
    assert rates == pytest.approx([0.1 * i for i in range(8)])
    assert model.head.drop.p == 0.5


def test_data_config_published():
    config = resolve_data_config({}, model=timm.create_model("ppma_tiny"))
    assert config["input_size"] == (3, 224, 224)
    assert config["crop_pct"] == 224 / 256
    assert config["interpolation"] == "bicubic"
    assert config["mean"] == pytest.approx((0.485, 0.456, 0.406))


@pytest.mark.parametrize("formulation", ["paper", "release"])
def test_no_weight_decay(formulation):
    model = nano(formulation=formulation)
    spared = model.no_weight_decay()
    names = ["bias"] if formulation == "paper" else ["dt_bias", "A_log"]
    assert spared == {
        f"stages.{s}.blocks.{b}.attn.decay.{name}"
        for s, depth in enumerate(model.config.depths)
        for b in range(depth)
        for name in names
    }
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05)
    by_id = {id(parameter): name for name, parameter in model.named_parameters()}
    decayed = {by_id[id(p)] for g in optimizer.param_groups if g["weight_decay"] > 0 for p in g["params"]}
    assert not decayed & spared
    assert all(not name.endswith(".bias") for name in decayed)
    assert "stages.0.blocks.0.attn.qkv.weight" in decayed


def test_group_matcher():
    model = nano()
    groups = group_parameters(model, model.group_matcher())
    # stem; block or downsample and its stage's blocks in order; head
    layer = {name: index for index, names in groups.items() for name in names}
    blocks = [f"stages.{s}.blocks.{b}.attn.qkv.weight" for s, d in enumerate(model.config.depths) for b in range(d)]
    order = [layer["stem.layers.0.weight"], *(layer[name] for name in blocks), layer["head.fc.weight"]]
    assert order == sorted(order)
    assert len(set(order)) == len(order)
    assert layer["stages.1.downsample.conv.weight"] <= layer["stages.1.blocks.0.attn.qkv.weight"]
    assert layer["stages.1.downsample.conv.weight"] > layer["stages.0.blocks.0.attn.qkv.weight"]
    scales = {g["lr_scale"] for g in param_groups_layer_decay(model, layer_decay=0.5)}
    assert len(scales) == max(layer.values()) + 1
    assert len(group_parameters(model, model.group_matcher(coarse=True))) == 6


def test_grad_checkpointing():
    image, gradients = torch.randn(2, 3, 32, 40), []
    for enable in (False, True):
        model = nano(drop_path_rate=0.5)
        model.set_grad_checkpointing(enable)
        torch.manual_seed(1)
        model(image).square().mean().backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][name]), name


def test_determinism():
    model, image = nano(), torch.randn(2, 3, 33, 40)
    runs = []
    for _ in range(2):
        model.zero_grad()
        torch.manual_seed(3)
        logits = model(image)
        logits.square().mean().backward()
        runs.append([logits.detach(), *(parameter.grad.clone() for parameter in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@torch.no_grad()
def test_channels_last():
    model, image = nano().eval(), torch.randn(2, 3, 32, 40)
    expected = model(image)
    torch.testing.assert_close(model(image.to(memory_format=torch.channels_last)), expected)
    model.to(memory_format=torch.channels_last)
    torch.testing.assert_close(model(image), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["ppma_nano", "rmt_tiny"])
def test_mixed_precision(name, dtype):
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=7, formulation="release", drop_path_rate=0.0)
    image = torch.randn(2, 3, 32, 40)
    expected = model.eval()(image)
    seen = []
    for module in model.modules():
        if isinstance(module, ppma.layers.DecayHead):
            # behind the tokens, which pass through
            module.register_forward_hook(lambda _, __, out: seen.extend(t.dtype for t in out[-2:]))
    with torch.autocast("cpu", dtype=dtype):
        logits = model.train()(image)
        loss = logits.float().square().mean()
    loss.backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())
    assert set(seen) <= {torch.float32}
    with torch.no_grad(), torch.autocast("cpu", dtype=dtype):
        error = (model.eval()(image) - expected).abs().max()
    # the roundings of some forty layers, each relative to activations of the size of the logits or larger
    assert error < 40 * torch.finfo(dtype).eps * max(1.0, expected.abs().max())


@torch.no_grad()
def test_half_precision():
    model, image = nano().eval(), torch.randn(1, 3, 32, 32)
    expected = model(image)
    half = model.bfloat16()(image.bfloat16())
    assert half.dtype == torch.bfloat16
    assert (half - expected).abs().max() < 40 * torch.finfo(torch.bfloat16).eps


@torch.no_grad()
def test_copy_and_pickle():
    model, image = nano().eval(), torch.randn(1, 3, 32, 32)
    expected = model(image)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert again.config == model.config
        assert torch.equal(again(image), expected)


@torch.no_grad()
def test_set_backend_whole_model():
    model, image = nano().eval(), torch.randn(1, 3, 32, 40)
    expected = model(image)
    for name in ("torch", "reference"):
        model.set_backend(name)
        torch.testing.assert_close(model(image), expected)
    with pytest.raises(ValueError, match="name: expected one of"):
        model.set_backend("numpy")


@torch.no_grad()
def test_timm_folder_round_trip(tmp_path):
    model, image = timm.create_model("ppma_nano").eval(), torch.randn(1, 3, 32, 32)
    save_for_hf(model, tmp_path)
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    torch.testing.assert_close(again(image), model(image))
    features = timm.create_model(f"local-dir:{tmp_path}", pretrained=True, features_only=True).eval()
    torch.testing.assert_close(features.model.stem(image), model.stem(image))
    other = timm.create_model(f"local-dir:{tmp_path}", pretrained=True, num_classes=3, in_chans=1).eval()
    assert other(image[:, :1]).shape == (1, 3)


@torch.no_grad()
def test_save_pretrained_round_trip(tmp_path):
    model, image = nano(mask="v2h", formulation="release").eval(), torch.randn(1, 3, 32, 32)
    model.reset_classifier(4)
    model.save_pretrained(tmp_path)
    again = ppma.models.PolylineBackbone.from_pretrained(tmp_path)
    assert not again.training
    assert again.config == model.config
    torch.testing.assert_close(again(image), model(image))
    assert ppma.models.PolylineBackbone.from_pretrained(tmp_path, drop_path_rate=0.3).config.drop_path_rate == 0.3


def test_save_pretrained_card(tmp_path):
    trained = "Trained on 60,000 digits; 98 % of the test images are right."
    nano(formulation="release").save_pretrained(tmp_path, model_card_kwargs={"license": "mit", "trained": trained})
    card = (tmp_path / "README.md").read_text()
    for expected in (
        "license: mit",
        "pipeline_tag: image-classification",
        "# ppma_nano",
        "release formulation",
        "`2d`",
        f"{count(nano()):,} parameters, 7 classes.",
        trained,
        "| 4 | 128 | 1 | full |",
        "arxiv.org/abs/2506.15940",
    ):
        assert expected in card
    for hole in ("Needed", "None", "{{", "TODO"):
        assert hole not in card
