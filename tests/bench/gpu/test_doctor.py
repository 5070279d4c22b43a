"""`ppma doctor --gpu`: what it reports, and its dry run."""

import os
import subprocess
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from ppma.bench.gpu import cases, doctor, doctor_device, doctor_results
from ppma.bench.gpu.targets import compile_for, device_target
from ppma.ops.backends.triton.launch import recording
from ppma_cli import main


def check_good(_):
    return "fine"


def check_bad(_):
    raise AssertionError("off by | 3")


def check_other(_):
    raise doctor.SkippedError("needs two GPUs")


@pytest.mark.parametrize(("checks", "well"), [((check_good, check_other), True), ((check_bad, check_good), False)])
def test_examine_result(checks, well, monkeypatch):
    monkeypatch.setattr(doctor, "INTERPRETED", True)
    monkeypatch.setattr(doctor, "CHECKS", checks)
    lines = []
    text, passed = doctor.examine("cuda", True, lines.append)
    assert passed == well
    assert len(lines) == 2  # a failing check does not hide the next
    if well:
        assert "skipped" in text
        assert "needs two GPUs" in text
    else:
        assert "AssertionError: off by / 3" in text
        assert "Traceback" in text


def test_examine_fallback_fails(monkeypatch):
    """A kernel that silently runs in PyTorch would pass every comparison."""

    def check_falling_back(_):
        warnings.warn("polyline_scan runs in plain PyTorch: it does not compile", RuntimeWarning, stacklevel=1)
        return "fine"

    monkeypatch.setattr(doctor, "INTERPRETED", True)
    monkeypatch.setattr(doctor, "CHECKS", (check_falling_back,))
    text, passed = doctor.examine("cuda", True)
    assert not passed
    assert "fell back" in text


@pytest.mark.parametrize(("falls_back", "well"), [(16, False), (160, True)])
def test_channels_fallback_of_wide_heads_alone(falls_back, well, monkeypatch):
    def compare(_, operator, tensors, options):
        if tensors[0].shape[-1] == falls_back:
            warnings.warn(f"{operator} runs in plain PyTorch: too wide", RuntimeWarning, stacklevel=1)

    monkeypatch.setattr(doctor, "INTERPRETED", True)
    monkeypatch.setattr(doctor, "CHECKS", (doctor_results.check_channels,))
    monkeypatch.setattr(doctor_results, "CHANNELS", (falls_back, 32))
    monkeypatch.setattr(doctor_results, "_assert_accurate", compare)
    assert doctor.examine("cuda", True)[1] == well


def test_poisoned_memory_only_warns():
    """On a GPU the float64 reference multiplies with cuBLAS, which deterministic mode would refuse."""
    with doctor_results._poisoned_memory():
        assert torch.empty(3).isnan().all()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    assert not torch.are_deterministic_algorithms_enabled()


def test_device_target_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(major=9, minor=0))
    assert device_target(torch.device("cuda")) == "sm_90"
    monkeypatch.setattr(torch.version, "hip", "6.4")
    amd = SimpleNamespace(major=9, minor=4, gcnArchName="gfx942:sramecc+:xnack-")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: amd)
    assert device_target(torch.device("cuda")) == "gfx942"


def test_compiled_kernels_counted():
    tensors = cases.attention_inputs(1, 1, 7, 7, 16, torch.float16)
    with recording() as launches:
        cases.record_rotary(tensors, "hadamard", backward=False)
    compile_for(launches[0], "sm_89")
    before = doctor_device.compiled_kernels()
    compile_for(launches[0], "sm_89")
    assert doctor_device.compiled_kernels() == before > 0
    compile_for(launches[0], "sm_90")
    assert doctor_device.compiled_kernels() == before + 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_doctor_command_without_gpu(tmp_path, capsys):
    assert main(["doctor", "--gpu", "--output", str(tmp_path / "report.md")]) == 2
    assert "expected a GPU for cuda, got a machine where PyTorch finds none" in capsys.readouterr().err
    assert not (tmp_path / "report.md").exists()


@pytest.mark.slow
def test_doctor_command_dry_run(tmp_path):
    report = tmp_path / "report.md"
    command = [sys.executable, "-m", "ppma", "doctor", "--gpu", "--dry-run", "--output", str(report)]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("passed") >= 10
    assert "ppma doctor on the CPU (dry run)" in report.read_text()
