"""Backends that cannot be imported: tried once, and "auto" says on a GPU what it does without."""

import importlib
import warnings

import pytest
import torch

import ppma
from ppma.ops import backends
from ppma.ops.backends import pytorch
from ppma.ops.backends.native import library

CUDA = torch.device("cuda")


@pytest.fixture
def imports(monkeypatch):
    """The imports that are tried; Triton's fails in a way of its own."""
    tried = []

    def import_module(name):
        tried.append(name)
        if name.endswith("triton"):
            raise AttributeError("module 'triton' has no attribute 'jit'")
        return importlib.__import__(name, fromlist=["x"])

    monkeypatch.setattr(backends.importlib, "import_module", import_module)
    backends._load.cache_clear()
    backends._warn_once.cache_clear()
    yield tried
    backends._load.cache_clear()


def test_auto_broken_import_warns_once(imports):
    """One import and one warning for all operators, dtypes and devices."""
    with pytest.warns(RuntimeWarning, match=r"without the triton backend .*\(AttributeError: module"):
        assert backends.resolve("auto", "polyline_scan", CUDA, torch.float32) is pytorch
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for operator in ("polyline_scan", "polyline_attention", "criss_cross_attention_backward"):
            for device in (CUDA, torch.device("cuda", 1)):
                for dtype in (torch.float32, torch.bfloat16):
                    assert backends.resolve("auto", operator, device, dtype) is pytorch
    assert len([name for name in imports if name.endswith("triton")]) == 1


def test_operators_broken_import_once(imports, monkeypatch):
    """Operators and their gradients, many times; with a GPU's order of backends, as there may be no GPU here."""
    monkeypatch.setattr(backends, "_PREFERENCE", {"cpu": ("triton", "torch")})
    monkeypatch.setattr(backends, "_COMPOSED", {"cpu": "triton"})
    q, k, v = torch.randn(3, 1, 1, 2, 3, 4).requires_grad_()
    decay = torch.full((1, 1, 2, 3), -0.5)
    packed, cos, sin = torch.randn(1, 6, 3 * 4), torch.ones(6, 2), torch.zeros(6, 2)
    for _ in range(20):
        ppma.polyline_attention(q, k, v, decay, decay).sum().backward()
        ppma.polyline_scan(v, decay, decay).sum().backward()
        ppma.ops.rotary.rotary_split(packed, 1, cos, sin)
    assert len([name for name in imports if name.endswith("triton")]) == 1


def test_explicit_broken_import_raises(imports):
    with pytest.raises(backends.BackendUnavailableError, match=r"cannot be imported \(AttributeError"):
        backends.resolve("triton", "polyline_scan", CUDA, torch.float32)


def test_auto_excluded_silent():
    with warnings.catch_warnings(), backends.excluding("triton"):
        warnings.simplefilter("error")
        assert backends.resolve("auto", "polyline_scan", CUDA, torch.float32) is pytorch


def test_auto_without_native_library_warns_once(tmp_path, monkeypatch):
    monkeypatch.setattr(library, "folder", str(tmp_path))
    backends._warn_once.cache_clear()
    cpu = torch.device("cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert backends.resolve("auto", "polyline_scan", cpu, torch.float64) is pytorch  # no kernel would serve it
        with backends.excluding("native"):
            assert backends.resolve("auto", "polyline_scan", cpu, torch.float32) is pytorch
    with pytest.warns(RuntimeWarning, match=r"plain PyTorch on the CPU.*was not built.*`ppma doctor`"):
        assert backends.resolve("auto", "polyline_scan", cpu, torch.float32) is pytorch
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert backends.resolve("auto", "linear_attention", cpu, torch.float32) is pytorch
