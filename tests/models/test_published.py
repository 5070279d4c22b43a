"""Published weights by name, with files of the authors' layouts in a cache and behind a local server."""

import io

import authors_files
import huggingface_hub
import pytest
import timm
import torch
from authors_files import classification, in_cache
from transcription import TINY, ReleasedModel

import ppma
from ppma.models import CONFIGS, CheckpointError, published
from ppma.models.published import PUBLISHED, PublishedWeights

TINY_NAME = "ppma_tiny.authors_in1k"


@pytest.fixture(scope="module")
def files():
    return {TINY_NAME: classification(TINY, key="models")}


@pytest.fixture(scope="module")
def cache(files, tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub")
    for name, contents in files.items():
        in_cache(folder, name, contents)
    return folder


@pytest.fixture
def offline(cache, monkeypatch):
    """No network, and a cache with the file of PPMA-T."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def released(contents, arch=TINY):
    state = {name: tensor.double() for name, tensor in contents["model_ema"].items()}
    return ReleasedModel(state, arch)


IMAGE = torch.randn(1, 3, 64, 48, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


@torch.no_grad()
def assert_logits(model, contents):
    torch.testing.assert_close(model.double().eval()(IMAGE), released(contents).logits(IMAGE), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["ppma_tiny", TINY_NAME])
def test_create_model_pretrained(name, files, offline):
    model = timm.create_model(name, pretrained=True)
    assert model.config == CONFIGS["ppma_tiny"].replace(formulation="release")
    assert_logits(model, files[TINY_NAME])
    assert model.pretrained_cfg["hf_hub_id"] == "ZhongchenZhao/PPMA"
    assert model.pretrained_cfg["tag"] == "authors_in1k"
    assert "state_dict" not in model.pretrained_cfg


@torch.no_grad()
def test_create_model_pretrained_adapted(files, offline):
    ema = files[TINY_NAME]["model_ema"]
    model = timm.create_model("ppma_tiny", pretrained=True, num_classes=7, in_chans=1)
    assert model.config.formulation == "release"
    assert model.head.fc.weight.shape == (7, 1024)
    torch.testing.assert_close(model.stem.layers[0].weight, ema["patch_embed.proj.0.weight"].sum(1, keepdim=True))
    features = timm.create_model("ppma_tiny", pretrained=True, features_only=True, out_indices=(1, 3)).double().eval()
    assert "state_dict" not in features.pretrained_cfg
    normed = released(files[TINY_NAME]).stages(IMAGE)
    for index, feature in zip((1, 3), features(IMAGE), strict=True):
        expected = torch.nn.functional.layer_norm(normed[index], normed[index].shape[-1:])
        torch.testing.assert_close(feature.permute(0, 2, 3, 1), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("options", [{"formulation": "paper"}, {"mask": "v2h"}, {"mask": "none"}])
def test_create_model_pretrained_other_model(options, offline):
    ((field, value),) = options.items()
    with pytest.raises(CheckpointError, match=f"{TINY_NAME}: the weights are of .*; this one has {field}='{value}'"):
        timm.create_model("ppma_tiny", pretrained=True, **options)


def test_create_model_without_weights(offline):
    assert timm.create_model("ppma_tiny").config.formulation == "paper"
    with pytest.raises(RuntimeError, match="No pretrained weights exist for rmt_tiny"):
        timm.create_model("rmt_tiny", pretrained=True)
    with pytest.raises(RuntimeError, match="Invalid pretrained tag"):
        timm.create_model("ppma_tiny.nonesuch", pretrained=True)
    authors = [f"ppma_{size}.authors_in1k" for size in ("base", "small", "tiny")]
    assert [name for name in timm.list_pretrained("ppma*") if "authors" in name] == authors


def test_load_checkpoint_name(files, offline):
    assert_logits(ppma.load_checkpoint(TINY_NAME), files[TINY_NAME])
    raw = ppma.load_checkpoint(TINY_NAME, ema=False)
    assert torch.equal(raw.head.fc.bias, files[TINY_NAME]["models"]["head.bias"])


def test_open_checkpoint_offline(offline):
    message = f"^ppma_small.authors_in1k: cannot download .*{PUBLISHED['ppma_small.authors_in1k'].file}.*cache"
    with pytest.raises(ConnectionError, match=message) as error:
        ppma.open_checkpoint("ppma_small.authors_in1k")
    assert "\n" not in str(error.value)


def test_open_checkpoint_unknown_name():
    with pytest.raises(FileNotFoundError, match=r"ppma_tinny.authors_in1k; did you mean 'ppma_tiny.authors_in1k'\?"):
        ppma.open_checkpoint("ppma_tinny.authors_in1k")


def test_open_checkpoint_file_before_name(tmp_path, monkeypatch, offline):
    ppma.save_checkpoint(timm.create_model("ppma_nano", num_classes=3), tmp_path / TINY_NAME)
    monkeypatch.chdir(tmp_path)
    assert ppma.load_checkpoint(TINY_NAME).num_classes == 3


def test_open_checkpoint_packaged(tmp_path, monkeypatch):
    """An entry without a repository is a file of the package."""
    path = tmp_path / "nano.safetensors"
    ppma.save_checkpoint(timm.create_model("ppma_nano", num_classes=3), path)
    entry = PublishedWeights("ppma_nano.toy", "classification", "toy", "ppma_nano", 1, "", "", None, str(path), None)
    monkeypatch.setitem(published.PUBLISHED, entry.name, entry)
    assert ppma.load_checkpoint("ppma_nano.toy").num_classes == 3


def test_download(files, tmp_path, monkeypatch):
    buffer = io.BytesIO()
    torch.save(files[TINY_NAME], buffer)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with authors_files.endpoint(TINY_NAME, buffer.getvalue()) as (address, requests):
        point_to(monkeypatch, address)
        assert_logits(ppma.load_checkpoint(TINY_NAME), files[TINY_NAME])
        assert "GET" in [method for method, _ in requests]
        requests.clear()
        ppma.open_checkpoint(TINY_NAME)
        assert "GET" not in [method for method, _ in requests]
        with pytest.raises(ConnectionError, match="cannot download"):
            ppma.open_checkpoint("ppma_base.authors_in1k")
    ppma.open_checkpoint(TINY_NAME)  # the server is gone, the cache is not


def point_to(monkeypatch, address):
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
    template = address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(huggingface_hub.file_download, "HUGGINGFACE_CO_URL_TEMPLATE", template, raising=False)


def test_published_entries():
    assert len(PUBLISHED) == len({entry.file for entry in PUBLISHED.values()})
    for entry in PUBLISHED.values():
        assert entry.backbone in CONFIGS
        assert entry.backbone in entry.name
        assert entry.task in ("classification", "detection", "segmentation")
