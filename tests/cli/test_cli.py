"""The command line: help and usage errors come without torch, mistakes are one line and exit code 2."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import ppma
import ppma_cli
from ppma.engine.errors import IncompleteRunError, LoaderDiedError, StoppedError
from ppma_cli import COMMANDS, main

USAGE_ERRORS = [
    [],
    ["tarin"],
    ["train"],
    ["train", "digits_nano", "--oout", "x"],
    ["train", "digits_nano", "lr"],
    ["train", "digits_nano", "--set", "lr"],
    ["predict", "x.safetensors"],
    ["figure", "paths"],
    ["info", "--mask", "polyline"],
    ["info", "--size", "3"],
    ["convert", "a", "b", "c"],
    ["data"],
    ["data", "check"],
    ["data", "check", "digits_nano", "lr"],
    ["data", "convert", "coco", "a", "b"],
]


def test_help_without_torch():
    lines = [["--version"], ["--help"], *([name, "--help"] for name in COMMANDS), *USAGE_ERRORS, ["bench"]]
    code = (
        "import sys, ppma_cli\n"
        f"for line in {lines!r}:\n"
        "    try:\n"
        "        code = ppma_cli.main(line)\n"
        "    except SystemExit as stop:\n"
        "        code = stop.code\n"
        "    heavy = {'torch', 'ppma', 'timm', 'numpy', 'yaml'} & sys.modules.keys()\n"
        "    assert not heavy, (line, heavy)\n"
        "    assert code == (0 if line[-1:] in (['--help'], ['--version']) else 2), (line, code)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith(f"ppma {ppma.__version__}\n")
    assert all(f"usage: ppma {name}" in run.stdout and f"\n    {name} " in run.stdout for name in COMMANDS)


def test_python_m_ppma():
    run = subprocess.run([sys.executable, "-m", "ppma", "--version"], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == f"ppma {ppma.__version__}"


@pytest.mark.parametrize("line", USAGE_ERRORS, ids=" ".join)
def test_usage_error_names_command(line, capsys):
    with pytest.raises(SystemExit) as stop:
        main(line)
    assert stop.value.code == 2
    command = line[0] if line and line[0] in COMMANDS else ""
    assert f"ppma {command}".strip() in capsys.readouterr().err.splitlines()[-1]


def test_help_without_command(capsys):
    for line in ([], ["help"]):
        with pytest.raises(SystemExit):
            main(line)
        said = capsys.readouterr()
        assert all(f"\n    {name} " in said.out + said.err for name in COMMANDS)


def test_command_misspelt(capsys):
    with pytest.raises(SystemExit):
        main(["inf", "ppma_tiny"])
    assert capsys.readouterr().err.endswith("ppma: error: expected a command, got 'inf'; did you mean 'info'?\n")


def test_user_error_message(capsys):
    assert main(["bench", "against"]) == 2
    assert "ppma bench: against: expected FILE.py:callable" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv",
    [
        ["c.yaml", "lr=1", "data.root=a=b", "--out", "runs"],
        ["c.yaml", "--out", "runs", "lr=1", "data.root=a=b"],
        ["c.yaml", "lr=1", "--out", "runs", "data.root=a=b"],
        ["lr=1", "c.yaml", "--set", "data.root=a=b", "--out", "runs"],
        ["c.yaml", "--set", "lr=1", "data.root=a=b", "--out", "runs"],
        ["--set", "lr=1", "data.root=a=b", "c.yaml", "--out", "runs"],
        ["--out", "runs", "--set", "lr=1", "c.yaml", "--set", "data.root=a=b"],
        ["--set=lr=1", "--out", "runs", "--set=data.root=a=b", "c.yaml"],
    ],
    ids=" ".join,
)
def test_settings_any_order(argv, monkeypatch):
    seen = []
    monkeypatch.setattr(ppma_cli.train, "run", lambda arguments: seen.append(arguments) or 0)
    assert main(["train", *argv]) == 0
    assert (seen[0].recipe, seen[0].out) == ("c.yaml", "runs")
    assert seen[0].assignments == ["lr=1", "data.root=a=b"]


def test_settings_last_wins(monkeypatch):
    seen = []
    monkeypatch.setattr(ppma_cli.train, "run", lambda arguments: seen.append(arguments) or 0)
    for argv in (
        ["c.yaml", "--set", "lr=0", "lr=1", "--out", "runs", "--set", "lr=2"],
        ["c.yaml", "lr=2", "--out", "runs", "lr=1", "--set=lr=2"],
        ["--set", "lr=0", "lr=1", "c.yaml", "--out", "runs", "lr=2"],
        ["c.yaml", "--set", "lr=1", "--out", "runs", "lr=2"],
    ):
        assert main(["train", *argv]) == 0
        assert seen[-1].recipe == "c.yaml"
        assert seen[-1].assignments[-1] == "lr=2"


def test_settings_without_value(capsys):
    for argv in (["--set", "lr"], ["lr"], ["--out", "runs", "lr"]):
        with pytest.raises(SystemExit):
            main(["train", "digits_nano", *argv])
        assert "expected key=value, got 'lr'" in capsys.readouterr().err


def test_settings_path_with_equals_sign(monkeypatch):
    seen = []
    monkeypatch.setattr(ppma_cli.eval, "run", lambda arguments: seen.append(arguments) or 0)
    assert main(["eval", "runs/lr=1/best.safetensors", "--data", "digits_nano", "seed=1"]) == 0
    assert (seen[0].checkpoint, seen[0].assignments) == ("runs/lr=1/best.safetensors", ["seed=1"])


def test_missing_package(monkeypatch, capsys):
    def run(_):
        import package_that_is_not_there  # noqa: F401

    monkeypatch.setattr(ppma_cli.example, "run", run)
    assert main(["example"]) == 2
    said = capsys.readouterr().err
    assert said == (
        "ppma example: needs the package 'package_that_is_not_there': pip install package_that_is_not_there\n"
    )


def test_missing_package_of_an_extra(monkeypatch, capsys):
    """The line installs the rest of the smallest extra too."""

    def run(_):
        raise ModuleNotFoundError("no onnx", name="onnx.helper")

    monkeypatch.setattr(ppma_cli.example, "run", run)
    wanted = {
        "train": ["torchvision", "rich>=13"],
        "export": ["onnx>=1.17", "onnxscript>=0.5"],
        "big": ["onnx", "a", "b"],
    }
    monkeypatch.setattr("ppma.bench.doctor.extras", lambda: wanted)
    assert main(["example"]) == 2
    assert capsys.readouterr().err.endswith(": pip install 'onnx>=1.17' 'onnxscript>=0.5'\n")


def test_figures_without_the_train_extra():
    """The extra `explore` is enough for figures."""
    code = "import sys; sys.modules['rich'] = sys.modules['transformers'] = sys.modules['pycocotools'] = None; "
    code += "import ppma.explore.figures, ppma.explore.server, ppma_cli.explore"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ValueError("a:\n  b"), 2, "ppma example: a: b"),
        (PermissionError(13, "Permission denied", "/x"), 2, "ppma example: /x: Permission denied"),
        (OSError(28, "No space left on device"), 2, "ppma example: No space left on device"),
        (IncompleteRunError("weights missing"), 1, "ppma example: weights missing"),
        (LoaderDiedError("killed"), 2, "ppma example: killed"),
        (StoppedError("stopped at step 3", 15), 143, "ppma example: stopped at step 3"),
        (ppma.BackendUnavailableError("no kernel"), 2, "ppma example: no kernel"),
        (KeyboardInterrupt(), 130, "ppma example: interrupted"),
        (KeyboardInterrupt("interrupted; go on"), 130, "ppma example: interrupted; go on"),
    ],
)
def test_error_line_and_exit_code(monkeypatch, capsys, error, code, line):
    def fail(_):
        raise error

    monkeypatch.setattr(ppma_cli.example, "run", fail)
    assert main(["example"]) == code
    assert capsys.readouterr().err == line + "\n"


# A command that prints a line, in a process of its own.
PRINT = "import sys, ppma_cli as cli; cli.example.run = lambda _: print('a line') or 0; sys.exit(cli.main(['example']))"


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_closed_pipe_is_quiet(unbuffered):
    """As in `ppma example | true`: the reader is gone before anything is written."""
    reader, writer = os.pipe()
    os.close(reader)
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    run = subprocess.run(
        [sys.executable, "-c", PRINT], stdout=writer, stderr=subprocess.PIPE, text=True, env=environment
    )
    os.close(writer)
    assert (run.returncode, run.stderr) == (141, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_full_disk_is_one_line(unbuffered):
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "w") as full:
        run = subprocess.run(
            [sys.executable, "-c", PRINT], stdout=full, stderr=subprocess.PIPE, text=True, env=environment
        )
    assert (run.returncode, run.stderr) == (2, "ppma example: No space left on device\n")


def test_bug_keeps_traceback(monkeypatch):
    def fail(_):
        raise RuntimeError("a bug")

    monkeypatch.setattr(ppma_cli.example, "run", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        main(["example"])


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_print_completion(shell, capsys):
    pytest.importorskip("shtab", reason="completion needs shtab: pip install 'ppma[completion]'")
    with pytest.raises(SystemExit) as stop:
        main(["--print-completion", shell])
    script = capsys.readouterr().out
    assert stop.value.code == 0
    assert all(name in script for name in (*COMMANDS, "receptive-field", "hilbert", "--resume"))


def test_print_completion_without_shtab(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "shtab", None)
    with pytest.raises(SystemExit) as stop:
        main(["--print-completion", "bash"])
    assert stop.value.code == 2
    assert "needs the package 'shtab'" in capsys.readouterr().err


def test_example_command(capsys):
    assert main(["example"]) == 0
    assert "a12 a13 a14 b24 b34 b44" in capsys.readouterr().out


def test_figure_command(tmp_path):
    out = tmp_path / "masks.png"
    assert main(["figure", "masks", "--out", str(out)]) == 0
    assert out.read_bytes().startswith(b"\x89PNG")
