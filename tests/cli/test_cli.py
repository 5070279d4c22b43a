"""The command line: help and usage errors come without torch, mistakes are one line and exit code 2."""

import subprocess
import sys

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
]


def test_help_and_usage_errors_leave_torch_alone():
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


def test_python_m_ppma_is_the_same_command():
    run = subprocess.run([sys.executable, "-m", "ppma", "--version"], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == f"ppma {ppma.__version__}"


@pytest.mark.parametrize("line", USAGE_ERRORS, ids=" ".join)
def test_usage_errors_name_the_command(line, capsys):
    with pytest.raises(SystemExit) as stop:
        main(line)
    assert stop.value.code == 2
    command = line[0] if line and line[0] in COMMANDS else ""
    assert f"ppma {command}".strip() in capsys.readouterr().err.splitlines()[-1]


def test_a_users_mistake_is_a_message(capsys):
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
def test_settings_stand_together_or_alone_before_or_behind_the_file(argv, monkeypatch):
    seen = []
    monkeypatch.setattr(ppma_cli.train, "run", lambda arguments: seen.append(arguments) or 0)
    assert main(["train", *argv]) == 0
    assert (seen[0].recipe, seen[0].out) == ("c.yaml", "runs")
    assert seen[0].assignments == ["lr=1", "data.root=a=b"]


def test_last_setting_of_a_key_counts(monkeypatch):
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


def test_settings_without_a_value_are_named(capsys):
    for argv in (["--set", "lr"], ["lr"], ["--out", "runs", "lr"]):
        with pytest.raises(SystemExit):
            main(["train", "digits_nano", *argv])
        assert "expected key=value, got 'lr'" in capsys.readouterr().err


def test_settings_of_a_path_with_an_equals_sign(monkeypatch):
    seen = []
    monkeypatch.setattr(ppma_cli.eval, "run", lambda arguments: seen.append(arguments) or 0)
    assert main(["eval", "runs/lr=1/best.safetensors", "--data", "digits_nano", "seed=1"]) == 0
    assert (seen[0].checkpoint, seen[0].assignments) == ("runs/lr=1/best.safetensors", ["seed=1"])


def test_a_missing_package_is_named(monkeypatch, capsys):
    def run(_):
        import package_that_is_not_there  # noqa: F401

    monkeypatch.setattr(ppma_cli.example, "run", run)
    assert main(["example"]) == 2
    assert "needs the package 'package_that_is_not_there'" in capsys.readouterr().err


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
def test_errors_become_one_line_and_an_exit_code(monkeypatch, capsys, error, code, line):
    def fail(_):
        raise error

    monkeypatch.setattr(ppma_cli.example, "run", fail)
    assert main(["example"]) == code
    assert capsys.readouterr().err == line + "\n"


def test_bugs_keep_their_traceback(monkeypatch):
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


def test_example_prints_the_mask(capsys):
    assert main(["example"]) == 0
    assert "a12 a13 a14 b24 b34 b44" in capsys.readouterr().out


def test_figure_is_written(tmp_path):
    out = tmp_path / "masks.png"
    assert main(["figure", "masks", "--out", str(out)]) == 0
    assert out.read_bytes().startswith(b"\x89PNG")
