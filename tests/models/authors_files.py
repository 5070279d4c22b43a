"""Files in the layouts of the authors' published ones with random weights, in a cache or behind a server."""

import argparse
import contextlib
import http.server
import threading
from pathlib import Path

import torch
from transcription import Architecture, random_weights

from ppma.models.published import PUBLISHED

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def classification(arch: Architecture, *, key: str = "model", seed: int = 0) -> dict:
    """What a classification file holds: raw and EMA weights, the optimizer's state and the arguments of the run."""
    raw, ema = random_weights(arch, seed=seed + 1), random_weights(arch, seed=seed)
    return {
        key: raw,
        "model_ema": ema,
        "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 1e-3, "params": [0]}]},
        "lr_scheduler": {"last_epoch": 299},
        "epoch": 299,
        "max_accuracy": 82.6,
        "args": argparse.Namespace(model="PPMA_T", lr=1e-3, output_dir="out"),
    }


def openmmlab(heads: dict, arch: Architecture, classes: tuple[str, ...], palette: list | None = None) -> dict:
    """What a file of MMDetection or MMSegmentation holds."""
    backbone = {f"backbone.{name}": tensor for name, tensor in random_weights(arch, task="dense").items()}
    meta = {"CLASSES": classes, "epoch": 12, "iter": 87960, "mmdet_version": "2.28.2", "config": "model = dict()\n"}
    return {
        "meta": meta | ({} if palette is None else {"PALETTE": palette}),
        "state_dict": backbone | heads,
        "optimizer": {"state": {}, "param_groups": []},
    }


def segmentation_heads(dims: tuple[int, ...], classes: int, channels: int = 8) -> dict:
    """Both heads of a UPerNet with MMSegmentation's names, of few channels."""
    generator = torch.Generator().manual_seed(1)
    state = {}

    def module(name: str, fan_in: int, kernel: int = 1) -> None:
        state[f"{name}.conv.weight"] = torch.randn(channels, fan_in, kernel, kernel, generator=generator) / fan_in
        for part in ("weight", "bias", "running_mean", "running_var"):
            state[f"{name}.bn.{part}"] = 1 + torch.rand(channels, generator=generator)
        state[f"{name}.bn.num_batches_tracked"] = torch.tensor(3)

    for index in range(4):
        module(f"decode_head.psp_modules.{index}.1", dims[3])
    module("decode_head.bottleneck", dims[3] + 4 * channels, 3)
    for index in range(3):
        module(f"decode_head.lateral_convs.{index}", dims[index])
        module(f"decode_head.fpn_convs.{index}", channels, 3)
    module("decode_head.fpn_bottleneck", 4 * channels, 3)
    module("auxiliary_head.convs.0", dims[2], 3)
    for head in ("decode_head", "auxiliary_head"):
        state[f"{head}.conv_seg.weight"] = torch.randn(classes, channels, 1, 1, generator=generator)
        state[f"{head}.conv_seg.bias"] = torch.randn(classes, generator=generator)
    return state


def detection_heads(dims: tuple[int, ...], classes: int = 80, channels: int = 256) -> dict:
    """Neck and heads of a Mask R-CNN with MMDetection's names; every box is of class 3."""
    shapes = {
        **{f"neck.lateral_convs.{i}.conv": (channels, dim, 1, 1) for i, dim in enumerate(dims)},
        **{f"neck.fpn_convs.{i}.conv": (channels, channels, 3, 3) for i in range(4)},
        "rpn_head.rpn_conv": (channels, channels, 3, 3),
        "rpn_head.rpn_cls": (3, channels, 1, 1),
        "rpn_head.rpn_reg": (12, channels, 1, 1),
        "roi_head.bbox_head.shared_fcs.0": (1024, channels * 49),
        "roi_head.bbox_head.shared_fcs.1": (1024, 1024),
        "roi_head.bbox_head.fc_cls": (classes + 1, 1024),
        "roi_head.bbox_head.fc_reg": (4 * classes, 1024),
        **{f"roi_head.mask_head.convs.{i}.conv": (channels, channels, 3, 3) for i in range(4)},
        "roi_head.mask_head.upsample": (channels, channels, 2, 2),
        "roi_head.mask_head.conv_logits": (classes, channels, 1, 1),
    }
    generator = torch.Generator().manual_seed(2)
    weights = {f"{name}.weight": 0.01 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    biases = {f"{name}.bias": torch.zeros(shape[0]) for name, shape in shapes.items()}
    biases["roi_head.bbox_head.fc_cls.bias"][3] = 9
    return weights | biases


def in_cache(cache: Path, name: str, contents: object) -> Path:
    """Write the file of published weights into a cache of huggingface_hub, as a download would."""
    weights = PUBLISHED[name]
    folder = cache / f"models--{weights.repository.replace('/', '--')}"
    path = folder / "snapshots" / COMMIT / weights.file
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(contents, path)
    (folder / "refs").mkdir(exist_ok=True)
    (folder / "refs" / "main").write_text(COMMIT)
    return path


@contextlib.contextmanager
def endpoint(name: str, content: bytes):
    """The address of a server that has this one file, and the requests it got."""
    weights = PUBLISHED[name]
    requests = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            requests.append((self.command, self.path))
            found = self.path == f"/{weights.repository}/resolve/main/{weights.file}"
            self.send_response(200 if found else 404)
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("ETag", '"1234"')
            self.send_header("Content-Length", str(len(content) if found else 0))
            self.end_headers()
            return found

        def do_GET(self):
            if self.do_HEAD():
                self.wfile.write(content)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", requests
    finally:
        server.shutdown()
        server.server_close()
