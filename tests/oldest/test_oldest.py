"""What must work with the oldest torch and timm that pyproject.toml claims; `make test-oldest` installs those.

The ordinary suite runs this file too, with the newest.
"""

import functools
import os
import re
from pathlib import Path

import pytest
import timm
import torch
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks

import ppma
from ppma.testing import assert_accurate, random_log_decay

ROOT = Path(__file__).parents[2]
GRID, HEADS, D = (5, 4), 2, 6
ROUNDINGS = D + GRID[0] * GRID[1] + 2 * sum(GRID) + 16  # one for each sum and product on the way to a result
BACKENDS = ["torch", "native"]
OPERATORS = [
    pytest.param(ppma.polyline_attention, {"combine": "hadamard"}, id="full-hadamard"),
    pytest.param(ppma.polyline_attention, {"combine": "logit"}, id="full-logit"),
    pytest.param(ppma.criss_cross_attention, {"combine": "hadamard"}, id="criss-cross-hadamard"),
    pytest.param(ppma.criss_cross_attention, {"combine": "logit"}, id="criss-cross-logit"),
    pytest.param(ppma.linear_attention, {}, id="linear"),
]


def oldest():
    """Lower bounds in pyproject.toml, by package."""
    (dependencies,) = re.findall(r"^dependencies = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    return dict(re.findall(r'"([\w-]+)>=([\d.]+)"', dependencies))


def inputs():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, HEADS, *GRID, D, generator=generator) for _ in range(3))
    decays = (random_log_decay(2, HEADS, *GRID, generator=generator) for _ in range(2))
    return q, k, v, *decays


def model(**options):
    torch.manual_seed(0)
    return timm.create_model("ppma_nano", num_classes=4, drop_path_rate=0.0, **options)


def batch():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(4, 3, 32, 32, generator=generator), torch.arange(4)


def test_constraints_match_pyproject():
    pinned = dict(re.findall(r"^([\w-]+)==([\d.]+)$", (ROOT / "constraints-oldest.txt").read_text(), re.MULTILINE))
    claimed = oldest()
    assert set(claimed) == {"torch", "timm"}
    for name, version in claimed.items():
        assert pinned[name] in (version, f"{version}.0"), name


@pytest.mark.skipif("PPMA_OLDEST" not in os.environ, reason="for `make test-oldest`")
def test_oldest_installed():
    claimed = oldest()
    assert torch.__version__.split("+")[0] in (claimed["torch"], f"{claimed['torch']}.0")
    assert timm.__version__ == claimed["timm"]
    assert not Path(ppma.__file__).is_relative_to(ROOT / "src"), "the installed package, not the checkout"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("paths", ["v2h", "h2v", "2d"])
@pytest.mark.parametrize(("function", "options"), OPERATORS)
def test_attention_and_gradients(function, options, paths, backend):
    fast = functools.partial(function, paths=paths, backend=backend, **options)
    exact = functools.partial(function, paths=paths, backend="reference", **options)
    assert_accurate(fast, exact, inputs(), ROUNDINGS)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("paths", ["v2h", "h2v", "2d"])
def test_scan_and_gradients(paths, backend):
    _, _, x, *decays = inputs()
    fast = functools.partial(ppma.polyline_scan, paths=paths, backend=backend)
    exact = functools.partial(ppma.polyline_scan, paths=paths, backend="reference")
    assert_accurate(fast, exact, (x, *decays), ROUNDINGS)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nd_scan_and_gradients(backend):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 2, 3, 4, 3, generator=generator)
    decays = [random_log_decay(2, 2, 3, 4, generator=generator) for _ in range(3)]

    def run(backend):
        return lambda x, *decays: ppma.polyline_scan_nd(x, decays, backend=backend)

    assert_accurate(run(backend), run("reference"), (x, *decays), ROUNDINGS)


def test_vmap_matches_loop():
    tensors = [torch.stack([tensor, tensor.flip(0)]) for tensor in inputs()]
    mapped = torch.vmap(ppma.polyline_attention)(*tensors)
    looped = torch.stack([ppma.polyline_attention(*one) for one in zip(*tensors, strict=True)])
    torch.testing.assert_close(mapped, looped)


@pytest.mark.parametrize("formulation", ["paper", "release"])
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_training_lowers_the_loss(backend, formulation):
    network, (images, labels) = model(formulation=formulation).train(), batch()
    network.set_backend(backend)
    optimizer = torch.optim.AdamW(network.parameters(), 1e-3)
    losses = []
    for _ in range(6):
        loss = F.cross_entropy(network(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


def gradients(network, images):
    network.zero_grad()
    network(images).square().sum().backward()
    return [parameter.grad.clone() for parameter in network.parameters()]


def test_recompute_gradients_identical():
    network, (images, _) = model().train(), batch()
    recomputed = gradients(network, images)
    with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):  # which switch it off
        kept = gradients(network, images)
    network.set_grad_checkpointing()
    checkpointed = gradients(network, images)
    for a, b, c in zip(recomputed, kept, checkpointed, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)


def test_autocast_in_bfloat16():
    network, (images, _) = model().eval(), batch()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        out = network(images)
    assert torch.isfinite(out).all()


def test_checkpoint_round_trip(tmp_path):
    network, (images, _) = model().eval(), batch()
    ppma.save_checkpoint(network, tmp_path / "nano.safetensors")
    with torch.no_grad():
        assert torch.equal(ppma.load_checkpoint(tmp_path / "nano.safetensors").eval()(images), network(images))


def test_pretrained_file(tmp_path):
    saved = model(formulation="release")
    torch.save({"state_dict": saved.state_dict(), "epoch": 1}, tmp_path / "last.pth")
    options = {"pretrained": True, "pretrained_cfg_overlay": {"file": str(tmp_path / "last.pth")}}
    loaded = timm.create_model("ppma_nano", **options)
    assert loaded.config == saved.config
    assert torch.equal(loaded.head.fc.weight, saved.head.fc.weight)
    features = timm.create_model("ppma_nano", features_only=True, **options)
    assert torch.equal(features.model.stem.layers[0].weight, saved.stem.layers[0].weight)
    assert timm.list_pretrained("ppma_tiny") == ["ppma_tiny.authors_in1k"]


def test_features_by_stage():
    features = timm.create_model("ppma_nano", features_only=True)(batch()[0])
    assert [tuple(feature.shape[2:]) for feature in features] == [(16, 16), (8, 8), (4, 4), (2, 2)]


@pytest.mark.parametrize(("function", "options"), OPERATORS)
def test_compile_fullgraph(function, options):
    torch.compiler.reset()
    compiled = torch.compile(functools.partial(function, **options), fullgraph=True, backend="aot_eager")
    assert_accurate(compiled, functools.partial(function, backend="reference", **options), inputs(), ROUNDINGS)
