"""Weight files that are damaged, absurd or hostile: one clear line, soon, before memory is spent on them."""

import copy
import io
import json
import pickle
import re
import resource
import sys
import time
import zipfile
from pathlib import Path

import pytest
import safetensors.torch
import timm
import torch
from PIL import Image
from transcription import TINY, Architecture, random_weights

import ppma
from ppma.models import BackboneConfig, Checkpoint, CheckpointError, PolylineBackbone, open_checkpoint
from ppma_cli import main

KINDS = ("criss_cross", "criss_cross", "full", "full")
SMALL = BackboneConfig(
    depths=(1, 1),
    dims=(8, 16),
    heads=(2, 2),
    kinds=("criss_cross", "full"),
    ffn_ratios=(2.0, 2.0),
    layer_scale=(None, None),
    fixed_decay_spans=(4.0, 4.0),
    head_width=8,
    num_classes=3,
)
NAME = "stages.1.blocks.0.attn.qkv.weight"


@pytest.fixture
def state():
    torch.manual_seed(0)
    return PolylineBackbone(SMALL).state_dict()


def write(path, state, config=None, **metadata):
    text = json.dumps(SMALL.to_dict()) if config is None else config if isinstance(config, str) else json.dumps(config)
    safetensors.torch.save_file(state, path, {"ppma_config": text, **metadata})
    return path


def refused(path, match, within=2.0, **options):
    """The error of loading a file: one line, soon, and without much memory."""
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with pytest.raises(CheckpointError, match=match) as caught:
        ppma.load_checkpoint(path, **options)
    assert time.process_time() - start < within
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 512 << 10  # KB
    assert len(str(caught.value).splitlines()) == 1
    assert len(str(caught.value)) < 2000
    return str(caught.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_values_not_finite(value, state, tmp_path):
    state[NAME][3, 1] = value
    refused(write(tmp_path / "m.safetensors", state), f"{NAME}: expected finite weights, got NaN or infinity")
    torch.save(state, tmp_path / "m.pth")
    refused(tmp_path / "m.pth", f"{NAME}: expected finite weights")


def test_values_float64_overflow(state, tmp_path):
    state[NAME] = state[NAME].double() * 1e300
    refused(write(tmp_path / "m.safetensors", state), "expected finite weights")


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.uint8, torch.bool, torch.complex64])
def test_values_dtype(dtype, state, tmp_path):
    state[NAME] = state[NAME].to(dtype)
    torch.save(state, tmp_path / "m.pth")
    refused(tmp_path / "m.pth", f"{NAME}: expected floating-point weights, got {dtype}")


def test_values_counters(state, tmp_path):
    name = "stem.layers.1.num_batches_tracked"
    state[name] = torch.tensor(0.5)
    refused(write(tmp_path / "m.safetensors", state), f"{name}: expected torch.int64, got torch.float32")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_values_floating_dtypes(dtype, state, tmp_path):
    cast = {name: t.to(dtype) if t.is_floating_point() else t for name, t in state.items()}
    model = ppma.load_checkpoint(write(tmp_path / "m.safetensors", cast))
    assert model.stem.layers[0].weight.dtype == torch.float32
    assert torch.equal(model.state_dict()[NAME], cast[NAME].float())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"depths": [10**7, 1]}, "depths: expected a whole number from 1 to 4096, got 10000000"),
        ({"depths": [4000, 1]}, "expected weights of 4001 blocks, got"),
        ({"depths": [-1, 1]}, "depths: expected a whole number from 1 to 4096, got -1"),
        ({"depths": [1] * 100000}, "depths: expected one entry for each of 1 to 16 stages"),
        ({"depths": "11"}, "depths: expected one entry"),
        ({"depths": [True, 1]}, "depths: expected a whole number"),
        ({"dims": [-8, 16]}, "dims: expected a whole number from 1"),
        ({"dims": [8, 1 << 19]}, "the weights do not fit the model"),
        ({"dims": [8, "16"]}, "dims: expected a whole number from 1 to 1048576, got '16'"),
        ({"dims": [8, 1e30]}, "dims: expected a whole number"),
        ({"heads": [0, 2]}, "heads: expected a whole number from 1"),
        ({"heads": [3, 2]}, "heads: expected a divisor of dim=8"),
        ({"kinds": [["full"], "full"]}, "kinds: expected one of"),
        ({"ffn_ratios": [float("nan"), 2.0]}, "ffn_ratios: expected a number"),
        ({"ffn_ratios": [1e300, 2.0]}, "ffn_ratios: expected a number"),
        ({"head_width": 1 << 20, "num_classes": 1 << 24}, "the weights do not fit the model"),
        ({"num_classes": 10**100}, "num_classes: expected a whole number"),
        ({"in_chans": 0}, "in_chans: expected a whole number"),
        ({"mask": None}, "mask: expected one of"),
        ({"mask": "x" * 10**6}, "mask: expected one of"),
        ({"feature_norms": [9]}, "feature_norms: expected stages 0 to 1"),
        ({"feature_norms": 7}, "feature_norms: expected stages 0 to 1"),
        ({"stem_stride": 3}, "stem_stride: expected 2 or 4, got 3"),
        ({"drop_path_rate": "much"}, "drop_path_rate: expected a number"),
        ({"nonsense": 1}, "config field: expected one of"),
    ],
)
@pytest.mark.parametrize("strict", [True, False])
def test_config_absurd(change, message, strict, state, tmp_path):
    path = write(tmp_path / "m.safetensors", state, {**SMALL.to_dict(), **change})
    refused(path, re.escape(message).replace(r"\ ", " "), strict=strict)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100000 + "]" * 100000, "expected JSON"),
        ('{"a":' * 100000 + "1" + "}" * 100000, "expected JSON"),
        ("not json", "expected JSON, got 'not json'"),
        ("[1, 2]", "expected a mapping, got list"),
        ('"' + "x" * (20 << 20) + '"', "expected at most 16,777,216 characters"),
        ("{}", "expected the fields depths"),
        ('{"depths": ' + "9" * 10000 + "}", "expected JSON"),
    ],
    ids=["deep list", "deep mapping", "no JSON", "no mapping", "huge", "empty", "long number"],
)
def test_config_malformed(text, message, state, tmp_path):
    refused(write(tmp_path / "m.safetensors", state, text), message)


def test_config_absurd_in_state_dict(state, tmp_path):
    absurd = json.dumps({**SMALL.to_dict(), "depths": [10**7, 1]}).encode()
    torch.save({**state, "_extra_state": torch.tensor(list(absurd), dtype=torch.uint8)}, tmp_path / "m.pth")
    refused(tmp_path / "m.pth", "depths: expected a whole number")
    torch.save({**state, "_extra_state": torch.zeros(3, 3)}, tmp_path / "m.pth")
    refused(tmp_path / "m.pth", "expected the bytes of a configuration")


def test_shapes_wrong(state, tmp_path):
    state[NAME] = torch.zeros(3, 5)
    refused(write(tmp_path / "m.safetensors", state), re.escape(f"mis-shaped: {NAME} (3, 5) instead of (48, 16)"))
    del state[NAME]
    refused(write(tmp_path / "m.safetensors", state), f"missing: {NAME}")
    state["a\nb"] = torch.zeros(1)
    assert "unexpected: a b" in refused(write(tmp_path / "m.safetensors", state), "unexpected")


def test_foreign_file_not_strict(state, tmp_path):
    path = write(tmp_path / "m.safetensors", {"conv1.weight": torch.zeros(3), "a": torch.ones(2), "b": torch.ones(2)})
    refused(path, "do not fit the model", strict=False)


def zipped(path, members, compression=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def members_of(contents):
    buffer = io.BytesIO()
    torch.save(contents, buffer)
    with zipfile.ZipFile(buffer) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_zip_bomb(state, tmp_path):
    members = members_of({"model": state})
    first = next(name for name in members if name.endswith("data/0"))
    members[first] = bytes(1 << 28)
    path = zipped(tmp_path / "bomb.pth", members, zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 1 << 20
    refused(path, "expected uncompressed parts of at most [0-9,]* bytes, the size of the file, got 26.,...,...")


def test_zip_false_directory(state, tmp_path):
    """A member that claims to be larger than the whole file."""
    path = zipped(tmp_path / "claim.pth", members_of({"model": state}))
    content = bytearray(path.read_bytes())
    at = content.rindex(b"PK\x01\x02")
    content[at + 24 : at + 28] = (1 << 31).to_bytes(4, "little")
    path.write_bytes(content)
    refused(path, "expected uncompressed parts")


def test_zip_changed_bytes(state, tmp_path):
    torch.save(state, tmp_path / "m.pth")
    content = bytearray((tmp_path / "m.pth").read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "m.pth").write_bytes(content)
    refused(tmp_path / "m.pth", "wrong checksum of")


def test_storage_too_small(state, tmp_path):
    members = members_of({"a": torch.zeros(4)})
    name = next(name for name in members if name.endswith("data.pkl"))
    members[name] = members[name].replace(b"K\x04", b"J" + (1 << 30).to_bytes(4, "little"))
    refused(zipped(tmp_path / "m.pth", members), "not a weight file, or damaged")


@pytest.mark.parametrize("length", [0, 1 << 20, 1 << 40, (1 << 64) - 1])
def test_safetensors_header_length(length, state, tmp_path):
    path = write(tmp_path / "m.safetensors", state)
    path.write_bytes(length.to_bytes(8, "little") + path.read_bytes()[8:])
    refused(path, "not a weight file, or damaged")


def test_safetensors_entries_beyond_end(tmp_path):
    header = json.dumps({"a": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}).encode()
    path = tmp_path / "m.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    refused(path, "not a weight file, or damaged")


def test_safetensors_other_suffix(state, tmp_path):
    path = write(tmp_path / "m.bin", state)
    assert ppma.load_checkpoint(path).config == SMALL


@pytest.mark.parametrize("legacy", [False, True])
def test_torch_formats(legacy, state, tmp_path):
    torch.save(state, tmp_path / "m.pth", _use_new_zipfile_serialization=not legacy)
    assert ppma.load_checkpoint(tmp_path / "m.pth").config == SMALL


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (lambda: torch.eye(4).to_sparse(), "expected dense tensors, got torch"),
        (lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8), "expected dense tensors, got torch"),
        (lambda: torch.empty(4, device="meta"), "expected dense tensors, got torch|meta device"),
        (lambda: torch.zeros(1).expand(1 << 40), "expected 4,398,046,511,104 bytes for the shape"),
    ],
    ids=["sparse", "quantised", "meta", "expanded"],
)
def test_tensors_not_dense(tensor, message, legacy, state, tmp_path):
    torch.save({**state, NAME: tensor()}, tmp_path / "m.pth", _use_new_zipfile_serialization=not legacy)
    refused(tmp_path / "m.pth", message)


def test_tensors_shared_memory(state, tmp_path):
    shared = copy.copy(state)
    shared["stem.layers.1.bias"] = shared["stem.layers.1.weight"]
    torch.save(shared, tmp_path / "m.pth")
    model = ppma.load_checkpoint(tmp_path / "m.pth")
    assert torch.equal(model.stem.layers[1].bias, model.stem.layers[1].weight)
    block = torch.zeros(1 << 20)
    torch.save({**state, **{f"x{i}": block for i in range(10)}}, tmp_path / "m.pth")
    refused(tmp_path / "m.pth", "bytes of weights, got")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"# README\n", "not a weight file: expected torch.save or safetensors, got a file that starts with"),
        (b"", "it is empty"),
        (b"\x80", "not a weight file, or damaged"),
        (b"PK\x03\x04", "not a weight file, or damaged"),
        (b"\x89PNG\r\n\x1a\n" + bytes(50), "not a weight file"),
        (pickle.dumps({"model": {}}), "not a weight file, or damaged"),
    ],
)
def test_foreign_files(content, message, tmp_path):
    (tmp_path / "m.pth").write_bytes(content)
    refused(tmp_path / "m.pth", message)


def test_open_checkpoint_missing(tmp_path):
    refused(tmp_path, "expected a weight file, got a folder")
    with pytest.raises(FileNotFoundError, match="expected a weight file, found none at"):
        ppma.load_checkpoint(tmp_path / "none.safetensors")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers.9999.blocks.0.pos.conv.weight": torch.zeros(1)}, "expected layers.N.blocks.M for every stage"),
        ({f"layers.{10**30}.blocks.0.x": torch.zeros(1)}, "unexpected: layers.1000"),
        ({"layers.0.blocks.0.final_layer_norm.weight": torch.tensor(1.0)}, "expected a weight, got the shape ()"),
        ({"layers.0.blocks.0.final_layer_norm.weight": torch.zeros(0)}, "expected a weight, got the shape (0,)"),
        ({"patch_embed.proj.0.weight": torch.zeros(3)}, "patch_embed.proj.0.weight: expected a weight"),
        ({"layers.0.blocks.0.retention.path_embed.dt_bias": torch.zeros(0)}, "heads: expected"),
        ({"layers.0.blocks.0.retention.q_proj.weight": torch.tensor(1.0)}, "missing: stages.0.blocks.0.attn.qkv"),
        ({"layers.0.Relpos.angle": torch.zeros(3)}, "layers.0.Relpos.angle: expected"),
        ({5: torch.zeros(1)}, "unexpected: 5"),
        ({"head.weight": torch.zeros(0, 4)}, "head.weight: expected a weight"),
    ],
)
def test_authors_layout_absurd(change, message, tmp_path):
    arch = Architecture((1, 1, 1, 1), (16, 16, 16, 16), (2, 2, 2, 2), (1, 1, 1, 1), TINY.full)
    torch.save({"model": {**random_weights(arch, classes=3), **change}}, tmp_path / "best.pth")
    refused(tmp_path / "best.pth", re.escape(message).replace(r"\ ", " "), kinds=KINDS)


def test_preprocessing_absurd(state, tmp_path):
    from ppma.models.loading import load_classifier

    good = {"classes": list("abc"), "image_size": 8, "interpolation": "bicubic", "mean": [0.0] * 3, "std": [1.0] * 3}
    good["crop_pct"] = 1.0

    def load(text):
        return load_classifier(write(tmp_path / "m.safetensors", state, ppma_classification=text))

    assert load(json.dumps(good))[2] == ("a", "b", "c")
    for change, message in (
        ({"image_size": 10**9}, "image_size: expected 1 to 16384"),
        ({"classes": ["a"]}, "expected 3 class names, got 1"),
        ({"classes": 3}, "classes: expected a list"),
        ({"mean": [float("nan")] * 3}, r"mean.*: expected (a )?finite number"),
        ({"std": [0.0] * 3}, "std: expected finite numbers > 0"),
        ({"interpolation": "magic"}, "interpolation: expected one of"),
        ({"crop_pct": "x"}, "crop_pct: expected a number"),
    ):
        with pytest.raises(CheckpointError, match=message):
            load(json.dumps({**good, **change}))
    with pytest.raises(CheckpointError, match="expected JSON"):
        load("[" * 100000)


def test_commands_damaged_files(state, tmp_path, capsys):
    bad = write(tmp_path / "bad.safetensors", state, {**SMALL.to_dict(), "depths": [10**7, 1]})
    image = tmp_path / "image.png"
    Image.new("RGB", (8, 8)).save(image)
    for words in (
        ["info", bad],
        ["convert", bad, tmp_path / "out.safetensors"],
        ["export", bad, tmp_path / "out.onnx"],
        ["predict", bad, image],
        ["eval", bad, "--data", "digits"],
    ):
        assert main([str(word) for word in words]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "bad.safetensors: ppma_config: depths: expected a whole number" in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.safetensors", "image.png"]


def test_timm_folder_broken(state, tmp_path):
    from timm.models import save_for_hf

    model = timm.create_model("ppma_nano", depths=(1, 1, 1, 1), dims=(8, 8, 8, 8), heads=(1, 1, 1, 1))
    with torch.no_grad():
        model.stem.layers[3].weight.fill_(float("nan"))
    save_for_hf(model, tmp_path)
    with pytest.raises(CheckpointError, match=r"stem\.layers\.3\.weight: expected finite weights"):
        timm.create_model(f"local-dir:{tmp_path}", pretrained=True)


def test_source_without_unsafe_loading():
    """Every call of torch.load in the package takes weights only, and nothing else unpickles.

    CIFAR-10's own files are pickles; tests/data/test_cifar.py shows that their reader refuses every other name.
    """
    for path in Path(ppma.__file__).parent.rglob("*.py"):
        text = path.read_text()
        for call in re.findall(r"torch\.load\(.*", text):
            assert "weights_only=True" in call, path
        unsafe = r"pickle\.(load|loads)\b|weights_only=False|allow_pickle=True"
        assert not re.search(unsafe, text), path
        assert path.name == "cifar.py" or "pickle.Unpickler" not in text, path


@pytest.mark.skipif(sys.platform == "win32", reason="needs resource")
def test_open_checkpoint_header_only(state, tmp_path, monkeypatch):
    path = write(tmp_path / "m.safetensors", state, ppma_segmentation="{}")
    monkeypatch.setattr(Checkpoint, "contents", property(lambda self: pytest.fail("read")))
    assert open_checkpoint(path).task == "segmentation"
