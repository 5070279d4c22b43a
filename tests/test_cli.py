"""The command line: every command has help, and mistakes get a message and exit code 2."""

import subprocess
import sys

import pytest

import ppma
from ppma import cli
from ppma.engine.errors import IncompleteRunError, LoaderDiedError, StoppedError


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_help(name, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main([name, "--help"])
    assert stop.value.code == 0
    assert f"ppma {name}" in capsys.readouterr().out


def test_version_and_overview():
    run = subprocess.run([sys.executable, "-m", "ppma", "--version"], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == f"ppma {ppma.__version__}"
    run = subprocess.run([sys.executable, "-m", "ppma", "--help"], capture_output=True, text=True, check=True)
    assert all(name in run.stdout for name in cli.COMMANDS)


def test_a_missing_or_unknown_command_is_an_error(capsys):
    for argv in ([], ["tarin"]):
        with pytest.raises(SystemExit) as stop:
            cli.main(argv)
        assert stop.value.code == 2
    assert "invalid choice: 'tarin'" in capsys.readouterr().err


def test_a_users_mistake_is_a_message(capsys):
    assert cli.main(["bench", "against"]) == 2
    assert "ppma bench: against: expected FILE.py:callable" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv",
    [
        ["c.yaml", "--set", "lr=1", "data.root=a=b", "--out", "runs"],
        ["--set", "lr=1", "data.root=a=b", "c.yaml", "--out", "runs"],
        ["--out", "runs", "--set", "lr=1", "c.yaml", "--set", "data.root=a=b"],
        ["--set=lr=1", "--out", "runs", "--set=data.root=a=b", "c.yaml"],
    ],
    ids=" ".join,
)
def test_settings_stand_together_or_alone_before_or_behind_the_file(argv, monkeypatch):
    seen = []
    monkeypatch.setattr("ppma.tasks.commands.train", lambda arguments: seen.append(arguments) or 0)
    assert cli.main(["train", *argv]) == 0
    assert (seen[0].config, seen[0].out) == ("c.yaml", "runs")
    assert seen[0].assignments == ["lr=1", "data.root=a=b"]


def test_a_missing_package_is_named(monkeypatch, capsys):
    monkeypatch.setitem(cli.COMMANDS, "bench", cli.Command("", "package_that_is_not_there", "", ""))
    assert cli.main(["bench"]) == 2
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
        (KeyboardInterrupt(), 130, "ppma example: interrupted"),
        (KeyboardInterrupt("interrupted; go on"), 130, "ppma example: interrupted; go on"),
    ],
)
def test_errors_become_one_line_and_an_exit_code(monkeypatch, capsys, error, code, line):
    def fail(_):
        raise error

    monkeypatch.setattr("ppma.explore.command.example", fail)
    assert cli.main(["example"]) == code
    assert capsys.readouterr().err == line + "\n"


def test_example_prints_the_mask(capsys):
    assert cli.main(["example"]) == 0
    assert "a12 a13 a14 b24 b34 b44" in capsys.readouterr().out


def test_figure_is_written(tmp_path):
    out = tmp_path / "masks.png"
    assert cli.main(["figure", "masks", "--out", str(out)]) == 0
    assert out.read_bytes().startswith(b"\x89PNG")
