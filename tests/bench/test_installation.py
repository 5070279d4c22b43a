"""`ppma doctor`: what it says of an installation, and that its self-test finds a wrong operator."""

import sys

import pytest
import torch

import ppma
from ppma.bench import doctor
from ppma.ops.backends.native import library
from ppma_cli import main


@pytest.fixture
def no_libraries(tmp_path, monkeypatch):
    monkeypatch.setattr(library, "folder", str(tmp_path))


def test_doctor_command(capsys):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert f"ppma {ppma.__version__}" in out
    assert f"torch {torch.__version__.partition('+')[0]}" in out
    assert f"{len(list(doctor.cases()))} of {len(list(doctor.cases()))} operator calls" in out


def test_doctor_gpu_option_alone(capsys):
    assert main(["doctor", "--dry-run"]) == 2
    assert capsys.readouterr().err == "ppma doctor: expected --gpu with --dry-run, got no --gpu\n"


@pytest.mark.native
def test_kernels_in_use():
    text = doctor.cpu_kernels()
    assert text.startswith(f"{library.isa()} in use (")
    assert f"{library.threads()} thread" in text


@pytest.mark.native
def test_kernels_forced_instruction_set(monkeypatch):
    monkeypatch.setattr(library, "forced_isa", "portable")
    assert doctor.cpu_kernels().startswith("portable in use")


def test_kernels_not_built(no_libraries, capsys):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "CPU kernels   not built, plain PyTorch is used instead, which is slower; install a C++ compiler" in out
    assert f"{len(list(doctor.cases()))} torch" in out


@pytest.mark.native
def test_kernels_not_loading(tmp_path, monkeypatch):
    (tmp_path / "libppma_portable.so").write_bytes(b"no library")
    monkeypatch.setattr(library, "folder", str(tmp_path))
    assert "built (portable) but not usable: the native library does not load" in doctor.cpu_kernels()


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("no-such-compiler -O2", "none ('no-such-compiler -O2' is not on the path)"),
        ("", "none ('' is not on the path)"),
        ("false", "does not work (exit 1)"),
        (f"{sys.executable} -I", "Python 3"),
    ],
)
def test_compiler(command, expected, monkeypatch):
    monkeypatch.setenv("CXX", command)
    assert expected in doctor.compiler()


def test_extras_missing(monkeypatch, capsys):
    installed = doctor._version
    found = {"shtab": "1.0", "onnx": None}
    monkeypatch.setattr(doctor, "_version", lambda name: found[name] if name in found else installed(name))
    missing = doctor.extras()
    assert missing["completion"] == ["shtab>=1.7"]
    assert missing["export"] == ["onnx>=1.17"]
    assert missing["train"] == []
    assert "all" not in missing
    doctor.examine()
    assert "[export]      missing: pip install 'onnx>=1.17'\n" in capsys.readouterr().out


def test_cases_cover_public_operators():
    operators = {name for name in ppma.__all__ if name.startswith(("polyline", "causal")) or name.endswith("attention")}
    assert {case.label.split()[0] for case in doctor.cases()} == operators


def test_self_test_wrong_gradient(monkeypatch, capsys):
    """A gradient that is off by a few units in the last place of float16 is found, and named."""
    scan = ppma.polyline_scan

    def wrong(x, *decays, **options):
        out = scan(x, *decays, **options)
        return out if options.get("backend") == "reference" else out + 1e-3 * (x - x.detach())

    monkeypatch.setattr(ppma, "polyline_scan", wrong)
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert out.count("FAILED polyline_scan") == 3
    assert "gradient of input 0: off by" in out
