"""Valid weight files, mutated: each gives a model or a CheckpointError of one line, soon, whatever was changed.

Cases follow from a seed, which a failure prints; `PPMA_FUZZ_SEED` chooses another.
"""

import importlib.util
import io
import json
import os
import random
import resource
import signal
import time
import warnings
import zipfile
from pathlib import Path

import pytest
import safetensors.torch
import timm
import torch

import ppma
from ppma.data.coco import CocoDataConfig
from ppma.data.preprocessing import Preprocessing
from ppma.data.segmentation import SegmentationDataConfig
from ppma.models import BackboneConfig, CheckpointError, PolylineBackbone
from ppma.models.loading import load_classifier, save_checkpoint
from ppma.tasks.dense.weights import save_model
from ppma.tasks.detection.config import DetectionConfig, DetectorConfig
from ppma.tasks.detection.model import PolylineMaskRCNN
from ppma.tasks.detection.weights import load_detector
from ppma.tasks.segmentation.config import SegmentationConfig
from ppma.tasks.segmentation.model import DecoderConfig, UPerNet
from ppma.tasks.segmentation.weights import load_segmenter

SEED = int(os.environ.get("PPMA_FUZZ_SEED", "13"))
SECONDS = 10  # for one file; most take some milliseconds
MEGABYTES = 1024  # that reading all the files may add, the models included
KINDS = ("criss_cross", "criss_cross", "full", "full")
DIMS = (8, 8, 16, 16)
CONFIG = BackboneConfig(
    depths=(1, 1, 1, 1),
    dims=DIMS,
    heads=(2, 2, 2, 2),
    kinds=KINDS,
    ffn_ratios=(1.0, 1.0, 1.0, 1.0),
    head_width=8,
    num_classes=3,
)


def _from(relative):
    """A module of other tests."""
    path = Path(__file__).parents[1] / relative
    spec = importlib.util.spec_from_file_location(f"fuzz_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def mmsegmentation():
    """A UPerNet in MMSegmentation's layout."""
    layout = _from("tasks/segmentation/test_mmsegmentation.py")
    layout.DIMS = DIMS
    backbone = {f"backbone.{name}": tensor for name, tensor in authors(task="segmentation").items()}
    heads = layout.mmsegmentation_heads()
    classes = [f"class {index}" for index in range(len(heads["decode_head.conv_seg.bias"]))]
    return {"state_dict": backbone | heads, "meta": {"CLASSES": classes, "PALETTE": [[1, 2, 3] for _ in classes]}}


def authors(task="classification"):
    transcription = _from("models/transcription.py")
    arch = transcription.Architecture(
        CONFIG.depths, DIMS, CONFIG.heads, (1, 1, 1, 1), tuple(kind == "full" for kind in KINDS)
    )
    return transcription.random_weights(arch, classes=3, task=task)


def mmdetection():
    """The backbone of a detector in MMDetection's layout, between heads that we do not build."""
    state = {f"backbone.{name}": tensor for name, tensor in authors(task="detection").items()}
    return {"state_dict": {**state, "roi_head.bbox_head.fc_cls.weight": torch.zeros(4, 8)}}


def mask_rcnn():
    """A Mask R-CNN in MMDetection's layout."""
    heads = _from("tasks/detection/mmdetection_reference.py").random_heads(DIMS, 3, channels=4, box_channels=4)
    backbone = {f"backbone.{name}": tensor for name, tensor in authors(task="detection").items()}
    return {"state_dict": backbone | heads, "meta": {"CLASSES": ["a", "b", "c"]}}


def dense_backbone():
    return PolylineBackbone(CONFIG.replace(feature_norms=(0, 1, 2, 3)).without_head(4))


def write_segmenter(path):
    decoder = DecoderConfig(channels=8, auxiliary_channels=8)
    data = SegmentationDataConfig(root="", classes=("a", "b", "c"))
    config = SegmentationConfig(
        task="segmentation", model="ppma_nano", steps=1, batch_size=2, lr=1e-3, data=data, decoder=decoder
    )
    model = UPerNet(dense_backbone(), 3, decoder)
    save_model(model, path, model.backbone, "backbone.", config, ("a", "b", "c"))


def write_detector(path):
    detector = DetectorConfig(channels=8, box_channels=8, mask_convolutions=1)
    config = DetectionConfig(
        task="detection",
        model="ppma_nano",
        steps=1,
        batch_size=2,
        lr=1e-3,
        data=CocoDataConfig(root=""),
        detector=detector,
    )
    model = PolylineMaskRCNN(dense_backbone(), 4, detector)
    save_model(model, path, model.backbone.body, "backbone.body.", config, ("a", "b", "c"))


def write_classifier(path):
    model = PolylineBackbone(CONFIG)
    preprocessing = Preprocessing.from_timm(model.pretrained_cfg)
    save_checkpoint(model, path, preprocessing=preprocessing, classes=("a", "b", "c"))


def torch_file(contents, **options):
    return lambda path: torch.save(contents(), path, **options)


def load_authors(path):
    return ppma.load_checkpoint(path, kinds=KINDS)


def load_segmenter_and_palette(path):
    checkpoint = ppma.open_checkpoint(path)
    assert checkpoint.palette is None or len(checkpoint.palette) == len(checkpoint.classes)
    return load_segmenter(checkpoint, kinds=KINDS)[0]


def load_through_timm(path):
    overlay = {"file": str(path)}
    return timm.create_model("ppma_nano", pretrained=True, pretrained_cfg_overlay=overlay, kinds=KINDS).eval()


FILES = {
    "classifier.safetensors": (write_classifier, lambda path: load_classifier(path)[0]),
    "segmenter.safetensors": (write_segmenter, lambda path: load_segmenter(path)[0]),
    "detector.safetensors": (write_detector, lambda path: load_detector(path)[0]),
    "backbone_of_segmenter.safetensors": (write_segmenter, ppma.load_checkpoint),
    "state.pth": (torch_file(lambda: PolylineBackbone(CONFIG).state_dict()), ppma.load_checkpoint),
    "legacy.pth": (
        torch_file(lambda: {"model": authors()}, _use_new_zipfile_serialization=False),
        load_authors,
    ),
    "authors.pth": (torch_file(lambda: {"model": authors(), "epoch": 3}), load_authors),
    "ema.pth": (torch_file(lambda: {"model": {}, "model_ema": authors()}), load_through_timm),
    "timm.safetensors": (write_classifier, load_through_timm),
    "mmsegmentation.pth": (torch_file(mmsegmentation), load_segmenter_and_palette),
    "mmdetection.pth": (torch_file(mmdetection), load_authors),
    "mask_rcnn.pth": (torch_file(mask_rcnn), lambda path: load_detector(path, kinds=KINDS)[0]),
}


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """The bytes of each valid file."""
    torch.manual_seed(0)
    folder, contents = tmp_path_factory.mktemp("weights"), {}
    for name, (write, load) in FILES.items():
        write(folder / name)
        load(folder / name)
        contents[name] = (folder / name).read_bytes()
    return contents


def flip(content, rng):
    changed = bytearray(content)
    near = rng.choice((len(changed), min(len(changed), 4096)))  # anywhere, or where formats describe themselves
    for _ in range(rng.choice((1, 1, 2, 8))):
        at = rng.randrange(near)
        changed[at if rng.random() < 0.7 else -1 - at] ^= 1 << rng.randrange(8)
    return bytes(changed)


def truncate(content, rng):
    return content[: rng.randrange(len(content))]


def splice(content, rng):
    start, end, to = (rng.randrange(len(content)) for _ in range(3))
    piece = rng.choice((content[min(start, end) : max(start, end)][:4096], bytes(rng.randrange(64)), b"\xff" * 8))
    return content[:to] + piece + content[to + rng.choice((0, len(piece))) :]


ABSURD = (
    None, True, -1, 0, 1, 2, 3, 7, 10**7, 2**31, 2**63, 2**64, 10**40, -(10**9), 0.5, float("nan"), float("inf"), 1e308,
    "", "x", "F32", "I64", "BOOL", "F8_E4M3", "rmt", "full", [], [0], [-1], [1] * 50, [[1]], {}, {"a": {}},
    "a\nb", "\0",
)  # fmt: skip


def mutate_json(value, rng):
    """Replace, remove or add something somewhere inside."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        copied = dict(value)
        action = rng.random()
        if action < 0.1:
            del copied[key]
        elif action < 0.2:
            copied[rng.choice(("x", key + "x", ""))] = copied.pop(key)
        else:
            copied[key] = mutate_json(value[key], rng)
        return copied
    if isinstance(value, list) and value and rng.random() < 0.7:
        at = rng.randrange(len(value))
        return [*value[:at], mutate_json(value[at], rng), *value[at + 1 :]]
    if isinstance(value, str) and value[:1] == "{" and rng.random() < 0.9:  # JSON within JSON: our metadata
        return json.dumps(mutate_json(json.loads(value), rng))
    return rng.choice(ABSURD)


def change_header(content, rng):
    """Of safetensors: names, types, shapes, places, and our configuration."""
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    if rng.random() < 0.6:
        header["__metadata__"] = mutate_json(header["__metadata__"], rng)
    else:
        header = mutate_json(header, rng)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + content[8 + length :]


def change_pickle(content, rng):
    """Of a zip file, with a right checksum."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as source, zipfile.ZipFile(buffer, "w") as target:
        for name in source.namelist():
            data = source.read(name)
            target.writestr(name, rng.choice((flip, truncate, splice))(data, rng) if name.endswith(".pkl") else data)
    return buffer.getvalue()


def change_tensor(tensor, rng):
    kind = rng.randrange(8)
    if kind == 0:
        return tensor.to(
            rng.choice((torch.int64, torch.bool, torch.float16, torch.bfloat16, torch.float64, torch.uint8))
        )
    if kind == 1:
        return tensor.flatten()
    if kind == 2:
        return tensor[None]
    if kind == 3:
        return torch.full_like(tensor, rng.choice((0, 1, 7))) / rng.choice((0, 1))
    if kind == 4:
        return torch.zeros(rng.choice(((), (0,), (1,), (2, 2), (3, 0, 5))))
    if kind == 5:
        return torch.cat([tensor, tensor]) if tensor.ndim else tensor
    return tensor[:1] if tensor.ndim else -tensor


def change_state(state, rng):
    state = dict(state)
    for _ in range(rng.choice((1, 1, 3))):
        name = rng.choice(list(state))
        kind = rng.random()
        if kind < 0.2:
            del state[name]
        elif kind < 0.3:
            state[rng.choice(("x", "layers.7.blocks.3.x", name + ".x", "head.weight"))] = state.pop(name)
        elif isinstance(state[name], torch.Tensor):
            state[name] = change_tensor(state[name], rng)
    return state


def change_tensors(content, rng):
    """Types, shapes, values and names of weights, or the `meta` beside them, in a file that is otherwise valid."""
    if content[8:9] == b"{":
        length = int.from_bytes(content[:8], "little")
        metadata = json.loads(content[8 : 8 + length])["__metadata__"]
        state = {name: t.contiguous() for name, t in change_state(safetensors.torch.load(content), rng).items()}
        return safetensors.torch.save({name: tensor.clone() for name, tensor in state.items()}, metadata)
    contents = torch.load(io.BytesIO(content), weights_only=True)
    key = next((key for key in ("model_ema", "model", "state_dict") if key in contents), None)
    if "meta" in contents and rng.random() < 0.5:
        tensors = {rng.choice(("CLASSES", "PALETTE")): torch.zeros(3, 3)}
        meta = contents["meta"] | tensors if rng.random() < 0.2 else mutate_json(contents["meta"], rng)
        changed = {**contents, "meta": meta}
    else:
        changed = change_state(contents, rng) if key is None else {**contents, key: change_state(contents[key], rng)}
    buffer = io.BytesIO()
    torch.save(changed, buffer, _use_new_zipfile_serialization=content[:2] == b"PK")
    return buffer.getvalue()


def mutations(content):
    """What can be done to a file of this format."""
    if content[8:9] == b"{":
        return (flip, truncate, splice, change_header, change_header, change_tensors)
    if content[:2] == b"PK":
        return (flip, truncate, splice, change_pickle, change_pickle, change_tensors)
    return (flip, flip, truncate, splice, change_tensors)


class TooSlow(BaseException):
    """No Exception: what reads files must not swallow it."""


def _stop(*_):
    raise TooSlow


def outcome(load, path):
    """ "model" or "refused"; anything else is a failure."""
    previous = signal.signal(signal.SIGALRM, _stop)
    signal.alarm(SECONDS)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = load(path)
        if isinstance(model, PolylineBackbone):
            with torch.no_grad():
                model(torch.randn(1, model.config.in_chans, 16, 24))
        return "model"
    except CheckpointError as error:
        message = str(error)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
    assert len(message.splitlines()) == 1
    assert len(message) < 2000
    return "refused"


def fuzz(originals, folder, seeds):
    """Run the cases; returns how many gave a model."""
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    models = 0
    for seed in seeds:
        rng = random.Random(seed)
        torch.manual_seed(seed)
        name = rng.choice(list(FILES))
        mutate = rng.choice(mutations(originals[name]))
        path = folder / name
        path.write_bytes(mutate(originals[name], rng))
        try:
            models += outcome(FILES[name][1], path) == "model"
        except (Exception, TooSlow) as error:
            kept = folder / f"failed-{seed}-{name}"
            path.rename(kept)
            pytest.fail(f"PPMA_FUZZ_SEED={seed}: {mutate.__name__} of {name} ({kept}): {error!r}")
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown < MEGABYTES, f"from PPMA_FUZZ_SEED={SEED}: {grown:.0f} MB more"
    print(f"seeds {seeds}: {models} models of {len(seeds)} files in {time.monotonic() - start:.0f} s, {grown:.0f} MB")
    return models


def test_fuzz_weight_files(originals, tmp_path):
    assert 0 < fuzz(originals, tmp_path, range(SEED, SEED + 120)) < 120


@pytest.mark.slow
def test_fuzz_weight_files_long(originals, tmp_path):
    assert 0 < fuzz(originals, tmp_path, range(1000 + SEED, 3000 + SEED)) < 2000
