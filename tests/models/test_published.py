"""Published weights by name, with files of the authors' layouts in a cache and behind a local server."""

import dataclasses
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import authors_files
import huggingface_hub
import pytest
import timm
import torch
from authors_files import classification, detection_heads, in_cache, openmmlab, segmentation_heads
from PIL import Image
from timm.data import ImageNetInfo
from timm.models import PretrainedCfg
from transcription import TINY, ReleasedModel

import ppma
from ppma.data.preprocessing import Preprocessing
from ppma.explore.subject import open_subject
from ppma.models import CONFIGS, CheckpointError, PolylineBackbone, pretrained, published
from ppma.models.published import PUBLISHED, PublishedWeights
from ppma.tasks.segmentation import upernet
from ppma.tasks.verify import Verification, synthetic_image
from ppma_cli import main

TINY_NAME = "ppma_tiny.authors_in1k"


ADE20K, COCO = "upernet_ppma_tiny.ade20k", "mask_rcnn_ppma_tiny.coco_1x"
CLASSES, PALETTE = ("wall", "building", "sky"), [[120, 120, 120], [180, 120, 120], [6, 230, 230]]


@pytest.fixture(scope="module")
def files():
    upernet, mask_rcnn = segmentation_heads(TINY.dims, len(CLASSES)), detection_heads(TINY.dims, channels=8)
    return {
        TINY_NAME: classification(TINY, key="models"),
        ADE20K: openmmlab(upernet, TINY, CLASSES, PALETTE),
        COCO: openmmlab(mask_rcnn, TINY, tuple(f"thing {index}" for index in range(80))),
    }


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


class Payload:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder):
        self.folder = str(folder)

    def __reduce__(self):
        return os.mkdir, (self.folder,)


def test_create_model_pretrained_pickled_code(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    in_cache(tmp_path, TINY_NAME, {"model": {}, "args": Payload(tmp_path / "executed")})
    for load in (lambda: timm.create_model("ppma_tiny", pretrained=True), lambda: ppma.open_checkpoint(TINY_NAME)):
        with pytest.raises(CheckpointError, match=r"refused, because it holds more than tensors .*mkdir"):
            load()
    assert not (tmp_path / "executed").exists()


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
    message = f"^ppma_small.authors_in1k: expected {PUBLISHED['ppma_small.authors_in1k'].file} .*HF_HUB_OFFLINE"
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
    """An entry without a repository is a file of the package, with its own classes and preprocessing."""
    path = tmp_path / "nano.safetensors"
    preprocessing = Preprocessing(32, "bilinear", mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6), crop_pct=1.0)
    saved = timm.create_model("ppma_nano", num_classes=3, mask="v2h")
    ppma.save_checkpoint(saved, path, preprocessing=preprocessing, classes=("a", "b", "c"))
    entry = PublishedWeights("ppma_nano.toy", "classification", "toy", "ppma_nano", 1, "", "", None, str(path), None)
    monkeypatch.setitem(published.PUBLISHED, entry.name, entry)
    assert ppma.load_checkpoint("ppma_nano.toy").num_classes == 3
    monkeypatch.setattr(pretrained, "get_pretrained_cfg", lambda name: PretrainedCfg(tag="toy"))  # not cifar10
    model = timm.create_model("ppma_nano", pretrained=True)
    assert model.config == saved.config
    assert torch.equal(model.head.fc.weight, saved.head.fc.weight)
    assert Preprocessing.from_timm(model.pretrained_cfg) == preprocessing


PACKAGED = [name for name, entry in PUBLISHED.items() if entry.repository is None]


@pytest.mark.parametrize("name", PACKAGED)
def test_packaged_files(name, offline, capsys):
    """In float16, a few megabytes, with a card, and with the recorded output."""
    path = published.local_file(name)
    assert path.stat().st_size < 5e6
    card = path.with_suffix(".md").read_text()
    assert card.startswith(f"# {name}\n")
    assert PUBLISHED[name].figure.split()[-1] in card
    checkpoint = ppma.open_checkpoint(name)
    assert {t.dtype for t in checkpoint.contents.values() if t.is_floating_point()} == {torch.float16}
    assert PUBLISHED[name].checksum is not None
    assert main(["weights", "--verify", name]) == 0
    assert "agrees" in capsys.readouterr().out


def test_create_model_pretrained_nano(offline):
    model = timm.create_model("ppma_nano", pretrained=True)
    assert (model.num_classes, model.pretrained_cfg["tag"]) == (10, "cifar10")
    stored = ppma.open_checkpoint("ppma_nano.cifar10").contents
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, stored[name].float())
    assert timm.create_model("ppma_nano").num_classes == 1000


def test_convert_half(tmp_path, capsys):
    model = timm.create_model("ppma_nano", num_classes=3, mask="v2h")
    preprocessing = Preprocessing(32, "bilinear", mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6), crop_pct=1.0)
    ppma.save_checkpoint(model, tmp_path / "full.safetensors", preprocessing=preprocessing, classes=("a", "b", "c"))
    full, half = tmp_path / "full.safetensors", tmp_path / "half.safetensors"
    assert main(["convert", str(full), str(half), "--half"]) == 0
    assert half.stat().st_size < 0.6 * full.stat().st_size
    opened, loaded = ppma.open_checkpoint(half), ppma.load_checkpoint(half)
    assert (opened.classes, opened.preprocessing, loaded.config) == (("a", "b", "c"), preprocessing, model.config)
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name).half().float())
    assert main(["convert", str(full), str(half), "--half", "--mask", "2d"]) == 2
    assert "--half: expected one of our safetensors files and no other option" in capsys.readouterr().err
    with torch.no_grad():
        model.head.fc.bias[0] = 1e6
    ppma.save_checkpoint(model, full)
    assert main(["convert", str(full), str(half), "--half"]) == 2
    assert "head.fc.bias: expected weights in the range of float16" in capsys.readouterr().err


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
        with pytest.raises(ConnectionError, match="in the cache or on the Hugging Face Hub, got"):
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


@torch.no_grad()
@pytest.mark.parametrize("name", [ADE20K, COCO])
def test_load_checkpoint_name_dense(name, files, offline):
    """The backbone inside a whole model computes the features of the release."""
    state = {k.removeprefix("backbone."): t.double() for k, t in files[name]["state_dict"].items()}
    model = ppma.load_checkpoint(name).double()
    assert model.config.feature_norm_eps == 1e-5
    features = model.forward_intermediates(IMAGE, intermediates_only=True)
    for feature, theirs in zip(features, ReleasedModel(state, TINY).normed_features(IMAGE), strict=True):
        torch.testing.assert_close(feature, theirs, rtol=1e-10, atol=1e-10)


def test_open_checkpoint_name_meta(files, offline):
    segmentation, detection = ppma.open_checkpoint(ADE20K), ppma.open_checkpoint(COCO)
    assert (segmentation.task, detection.task) == ("segmentation", "detection")
    assert segmentation.classes == CLASSES
    assert segmentation.palette == tuple(map(tuple, PALETTE))
    assert detection.classes == files[COCO]["meta"]["CLASSES"]
    assert detection.palette is None


def test_page_table():
    page = (Path(__file__).parents[2] / "docs" / "weights.md").read_text()
    for entry in PUBLISHED.values():
        assert f"| `{entry.name}` | {entry.task} | {entry.data} | {entry.parameters:,} | {entry.figure} |" in page


@pytest.mark.parametrize("backbone", ["ppma_tiny", "ppma_small", "ppma_base"])
def test_published_parameters(backbone):
    """Of classifiers, UPerNets with 150 outputs and Mask R-CNNs with 80 classes."""
    with torch.device("meta"):
        classifier, segmenter = PolylineBackbone(CONFIGS[backbone]), upernet(backbone)
    heads = detection_heads(CONFIGS[backbone].dims)
    detector = [*segmenter.backbone.parameters(), *heads.values()]
    expected = {
        "classification": sum(tensor.numel() for tensor in classifier.parameters()),
        "segmentation": sum(tensor.numel() for tensor in segmenter.parameters()),
        "detection": sum(tensor.numel() for tensor in detector),
    }
    listed = [entry for entry in PUBLISHED.values() if entry.backbone == backbone]
    assert {entry.task: entry.parameters for entry in listed} == expected


def test_weights_command(capsys):
    assert main(["weights"]) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split()[:4] == ["name", "task", "data", "parameters"]
    assert [line.split()[0] for line in lines] == list(PUBLISHED)
    assert all(f"{entry.parameters:,}" in line for entry, line in zip(PUBLISHED.values(), lines, strict=True))
    assert main(["weights", "--json"]) == 0
    assert [PublishedWeights(**entry) for entry in json.loads(capsys.readouterr().out)] == list(PUBLISHED.values())


def test_weights_command_without_torch():
    code = "import sys, ppma_cli; assert ppma_cli.main(['weights']) == 0; assert 'torch' not in sys.modules"
    assert TINY_NAME in subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_weights_verify_logits(files, offline, capsys, monkeypatch):
    """The checksum is that of the released model's logits; a recorded one is compared."""
    logits = released(files[TINY_NAME]).logits(synthetic_image()).flatten()
    expected = (logits * torch.arange(1000, dtype=torch.float64).cos()).sum().item()
    entry = dataclasses.replace(PUBLISHED[TINY_NAME], checksum=expected)
    monkeypatch.setitem(published.PUBLISHED, TINY_NAME, entry)
    assert main(["weights", "--verify", TINY_NAME]) == 0
    shown = capsys.readouterr().out
    assert "output (1, 1000)" in shown
    assert f"recorded checksum {expected:.9g}: agrees" in shown


def test_weights_verify_segmentation(offline, capsys):
    assert main(["weights", "--verify", ADE20K]) == 0
    assert "output (1, 3, 96, 96)" in capsys.readouterr().out


def test_weights_verify_detection(offline, capsys):
    """Anchors of five levels, one region of 80 classes and the background."""
    assert main(["weights", "--verify", COCO]) == 0
    anchors = 3 * (24**2 + 12**2 + 6**2 + 3**2 + 2**2)
    assert f"output (1, {5 * anchors + 81 * (1 + 4 + 28**2)})" in capsys.readouterr().out


def test_weights_verify_other_checksum(capsys, monkeypatch):
    found = Verification(Path("best.pth"), (1, 1000), checksum=1.0, norm=10.0, expected=1.001)
    assert not found.passed
    assert dataclasses.replace(found, expected=1.0 + 1e-9).passed
    monkeypatch.setattr("ppma.tasks.verify.verify", lambda name: found)
    assert main(["weights", "--verify", TINY_NAME]) == 1
    assert "recorded checksum 1.001: DIFFERS" in capsys.readouterr().out


def test_weights_verify_mistakes(cache, offline, capsys, monkeypatch):
    entry = dataclasses.replace(PUBLISHED["ppma_base.authors_in1k"], file=PUBLISHED[TINY_NAME].file)
    monkeypatch.setitem(published.PUBLISHED, entry.name, entry)
    for name, message in (
        (entry.name, "expected classification with ppma_base, got classification with ppma_tiny"),
        ("ppma_small.authors_in1k", "in the cache or on the Hugging Face Hub"),
        ("ppma_tinny.authors_in1k", "did you mean 'ppma_tiny.authors_in1k'?"),
    ):
        assert main(["weights", "--verify", name]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line


@pytest.mark.slow
def test_predict_name_detection(offline, photo, tmp_path, capsys):
    assert main(["predict", COCO, str(photo), "--json", "--out", str(tmp_path / "out")]) == 0
    (prediction,) = json.loads(capsys.readouterr().out)
    assert {one["class"] for one in prediction["instances"]} == {"thing 3"}


@pytest.fixture
def photo(tmp_path):
    path = tmp_path / "photo.png"
    Image.effect_noise((40, 30), 64).convert("RGB").save(path)
    return path


def test_predict_name_imagenet(files, offline, photo, capsys):
    assert main(["predict", TINY_NAME, str(photo), "--json"]) == 0
    (prediction,) = json.loads(capsys.readouterr().out)
    names = ImageNetInfo().label_descriptions()
    assert len(prediction["classes"]) == 5
    assert set(prediction["classes"]) <= set(names)
    transform = Preprocessing.from_timm(timm.get_pretrained_cfg("ppma_tiny").to_dict()).transform()
    image = transform(Image.open(photo).convert("RGB"))
    best = released(files[TINY_NAME]).logits(image[None].double()).argmax()
    assert prediction["classes"][0] == names[best]


@pytest.mark.slow
def test_predict_name_segmentation(offline, photo, tmp_path, capsys):
    assert main(["predict", ADE20K, str(photo), "--json", "--out", str(tmp_path / "out")]) == 0
    (prediction,) = json.loads(capsys.readouterr().out)
    assert set(prediction["shares"]) <= set(CLASSES)


@pytest.mark.parametrize(
    "command", [["info", TINY_NAME], ["convert", TINY_NAME, "tiny.safetensors"]], ids=lambda c: c[0]
)
def test_commands_name(command, offline, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(command) == 0
    assert "release" in capsys.readouterr().out or ppma.load_checkpoint("tiny.safetensors").num_classes == 1000


def test_explore_name(offline):
    subject = open_subject(None, TINY_NAME)
    assert (subject.name, subject.trained) == (TINY_NAME, True)
    assert subject.classes[0] == "tench, Tinca tinca"


@pytest.mark.slow
def test_weights_verify_environment(files, tmp_path):
    """As a user with a network runs it: huggingface_hub's own variables say where files come from and go to."""
    buffer = io.BytesIO()
    torch.save(files[TINY_NAME], buffer)
    command = [sys.executable, "-m", "ppma", "weights", "--verify", TINY_NAME]
    with authors_files.endpoint(TINY_NAME, buffer.getvalue()) as (address, _):
        environment = os.environ | {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path), "TQDM_POSITION": "-1"}
        first = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert first.returncode == 0, first.stderr
        assert "every name and shape fits" in first.stdout
        assert "best.pth" in first.stderr  # the progress bar
    again = subprocess.run(command, env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}, text=True)
    assert again.returncode == 0
