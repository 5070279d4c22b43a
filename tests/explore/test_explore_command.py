"""`ppma explore` with addresses and files that do not work."""

import socket

import pytest

pytest.importorskip("gradio", reason="the explorer needs gradio: pip install 'ppma[explore]'")
from ppma.explore import app, images, subject
from ppma_cli import main


@pytest.fixture
def taken():
    """A port that another program listens on."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        yield other.getsockname()[1]


def told(capsys, *words):
    assert main(["explore", *words]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    return said.removeprefix("ppma explore: ").strip()


@pytest.mark.parametrize("port", [99999, 65536, 0, -1])
def test_port_out_of_range(port, capsys):
    assert told(capsys, "--port", str(port)) == f"port: expected 1 to 65535, got {port}"


def test_port_in_use_before_loading(taken, capsys, monkeypatch):
    monkeypatch.setattr(subject, "open_subject", lambda *args: pytest.fail("loaded first"))
    assert told(capsys, "--port", str(taken)) == f"port: expected a free one, got {taken}, which is in use on 127.0.0.1"


def test_port_privileged(capsys, monkeypatch):
    def refuse(self, address):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(app.socket.socket, "bind", refuse, raising=False)
    assert told(capsys, "--port", "80") == "port: expected one that this user may open (from 1024 on), got 80"


@pytest.mark.parametrize("host", ["192.0.2.1", "no host", "a" * 300, "..", "\0"])
def test_host_not_local(host, capsys, monkeypatch):
    assert told(capsys, "--host", host).startswith("host: expected an address of this machine, got ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--image", "nothing.png"], "image: expected a file or a sample (cat, "),
        (["--model", "ppma_huge"], "model: expected one of 'ppma_nano', "),
        (["--checkpoint", "nothing.safetensors"], "path: expected a weight file, found none at nothing.safetensors"),
    ],
)
def test_explore_missing_inputs(words, message, capsys, monkeypatch):
    monkeypatch.setattr(app, "check_address", lambda host, port: None)
    monkeypatch.setattr(app, "serve", lambda *args, **options: pytest.fail("served"))
    assert told(capsys, *words).startswith(message)


def test_port_taken_meanwhile(nano, taken):
    with pytest.raises(ValueError, match=f"expected a free port of this machine, got 127.0.0.1:{taken}"):
        app.serve(nano, images.find_image("shapes"), host="127.0.0.1", port=taken)
