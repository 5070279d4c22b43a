"""`ppma explore`: addresses and files that do not work, the default model, the static page."""

import dataclasses
import json
import re
import socket
import sys

import pytest
from PIL import Image

from ppma.explore import images, server, subject
from ppma.models.published import PUBLISHED
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

    monkeypatch.setattr(server.socket.socket, "bind", refuse, raising=False)
    assert told(capsys, "--port", "80") == "port: expected one that this user may open (from 1024 on), got 80"


@pytest.mark.parametrize("host", ["192.0.2.1", "no host", "a" * 300, "..", "\0"])
def test_host_not_local(host, capsys, monkeypatch):
    assert told(capsys, "--host", host).startswith("host: expected an address of this machine, got ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--image", "nothing.png"], "image: expected a file or a sample (cat, "),
        (["--model", "ppma_huge"], "model: expected one of ppma_nano, "),
        (["--model", "resnet18"], "vit: expected a VisionTransformer or Eva of timm, got ResNet"),
        (["--static", "page.txt"], "static: expected a name that ends in .html, got 'page.txt'"),
        (["--checkpoint", "nothing.safetensors"], "path: expected a weight file, found none at nothing.safetensors"),
    ],
)
def test_explore_missing_inputs(words, message, capsys, monkeypatch):
    monkeypatch.setattr(server, "check_address", lambda host, port: None)
    monkeypatch.setattr(server, "serve", lambda *args, **options: pytest.fail("served"))
    assert told(capsys, *words).startswith(message)


def test_port_taken_meanwhile(nano, taken):
    with pytest.raises(ValueError, match=f"expected a free port of this machine, got 127.0.0.1:{taken}"):
        server.serve(nano, images.find_image("shapes"), "shapes", host="127.0.0.1", port=taken)


def embedded(path):
    html = path.read_text("utf-8")
    return html, json.loads(re.search(r'type="application/json">(.*?)</script>', html, re.DOTALL)[1])


def test_static_page(tmp_path, capsys):
    out = tmp_path / "page.html"
    Image.effect_noise((40, 50), 60).save(tmp_path / "noise.png")
    assert (
        main(["explore", "--model", "ppma_nano", "--static", str(out), "--image", "cat", str(tmp_path / "noise.png")])
        == 0
    )
    assert f"wrote {out}" in capsys.readouterr().out
    html, data = embedded(out)
    assert [record["name"] for record in data["records"]] == ["cat", "noise"]
    assert (data["live"], data["trained"], data["model"]) == (False, False, "ppma_nano (random weights)")
    assert re.findall(r"""(?:src|href)=["'](?!data:)[^"'$]+""", html) == []
    assert "fetch(" in html  # the same scripts as the live page


def test_default_model_published(monkeypatch):
    entry = PUBLISHED["ppma_tiny.authors_in1k"]
    monkeypatch.setattr(subject, "PUBLISHED", {entry.name: entry})
    assert subject.default_name() == "ppma_nano"
    packaged = dataclasses.replace(entry, name="ppma_nano.cifar10", repository=None)
    later = dataclasses.replace(packaged, name="another")
    pets = dataclasses.replace(packaged, name="pets", task="segmentation")
    monkeypatch.setattr(subject, "PUBLISHED", {one.name: one for one in (entry, packaged, later)})
    assert subject.default_name() == subject.default_name("segmentation", "classification") == "ppma_nano.cifar10"
    monkeypatch.setattr(subject, "PUBLISHED", {one.name: one for one in (entry, packaged, pets)})
    assert subject.default_name("segmentation", "classification") == "pets"


def test_default_segmenter(tmp_path, capsys, monkeypatch):
    """Its prediction needs the package of the decoder; without it, the rest is shown."""
    out = tmp_path / "page.html"
    assert main(["explore", "--static", str(out), "--image", "dog"]) == 0
    _, data = embedded(out)
    assert data["model"] == "upernet_ppma_nano.pets"
    assert data["colours"]["pet"] == "rgb(255, 140, 0)"
    assert [name for name, _ in data["records"][0]["prediction"]] == ["background", "pet", "border"]
    assert data["records"][0]["overlay"].startswith("data:image/png;base64,")
    capsys.readouterr()
    monkeypatch.setitem(sys.modules, "ppma.tasks.segmentation.inside", None)
    assert main(["explore", "--static", str(out), "--image", "dog"]) == 0
    assert "its prediction is not shown" in capsys.readouterr().out
    _, data = embedded(out)
    assert (data["records"][0]["prediction"], data["records"][0]["overlay"]) == ([], "")


def test_images_with_one_stem(tmp_path):
    """Neither replaces the other."""
    paths = [tmp_path / folder / "noise.png" for folder in "ab"]
    for path in paths:
        path.parent.mkdir()
        Image.effect_noise((40, 50), 60).save(path)
    words = ["explore", "--model", "ppma_nano", "--static", str(tmp_path / "page.html"), "--image", *map(str, paths)]
    assert main(words) == 0
    _, data = embedded(tmp_path / "page.html")
    assert [record["name"] for record in data["records"]] == [str(path) for path in paths]


def test_default_model_random_announced(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(subject, "PUBLISHED", {})
    assert main(["explore", "--static", str(tmp_path / "page.html"), "--image", "shapes"]) == 0
    assert capsys.readouterr().out.startswith("no trained weights in this installation: ppma_nano with random weights")
