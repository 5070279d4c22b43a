"""The server: it contacts no one, its page loads nothing, it answers its own host only, bad requests get a message."""

import http.client
import io
import json
import re
import threading
import urllib.error
import urllib.request

import pytest
from PIL import Image

from ppma.explore import images, server


@pytest.fixture(scope="module")
def running(nano):
    with server.Server(nano, images.find_image("shapes"), "shapes") as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def ask(running, path="", body=None, **headers):
    asked = urllib.request.Request(running.url + path, body, headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(asked, timeout=60) as answer:
            return answer.status, answer.headers, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.headers, error.read().decode()


def png(size=(40, 50)):
    buffer = io.BytesIO()
    Image.effect_noise(size, 60).convert("RGB").save(buffer, "PNG")
    return buffer.getvalue()


def test_page_loads_nothing(running):
    assert running.url.startswith("http://127.0.0.1:")
    status, headers, html = ask(running)
    assert status == 200
    assert headers["Content-Security-Policy"].startswith("default-src 'none'")
    assert re.findall(r"""(?:src|href)=["'](?!data:)[^"'$]+""", html) == []
    assert "@SCRIPTS@" not in html
    assert '"live":true' in html


def test_record_of_sample_and_upload(running):
    status, _, text = ask(running, "record?sample=cat")
    record = json.loads(text)
    assert (status, record["name"]) == (200, "cat")
    assert [layer["label"] for layer in record["layers"]][:2] == ["stage 1, block 1", "stage 2, block 1"]
    status, _, text = ask(running, "record", png())
    assert (status, json.loads(text)["name"]) == (200, "upload")


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("record?sample=../../etc/passwd", None, 400, "sample: expected one of 'cat', "),
        ("record?sample=" + "a" * 5000, None, 400, "sample: expected one of 'cat', "),
        ("record", b"not a picture", 400, "image: expected a picture"),
        ("record", png((2000, 20)), 400, "image: expected sides in a ratio of at most 10 to 1"),
        ("record", png()[:1000], 400, "image: damaged or cut short"),
        ("config", None, 404, "path: not used by the page"),
        ("config", b"", 404, "path: not used by the page"),
    ],
)
def test_bad_request_message(path, body, status, message, running):
    given, headers, text = ask(running, path, body)
    assert given == status
    assert json.loads(text)["error"].startswith(message)
    assert headers["Content-Security-Policy"] == server.POLICY


def test_upload_too_large_not_read(running):
    connection = http.client.HTTPConnection(*running.server_address, timeout=60)
    connection.putrequest("POST", "/record")
    connection.putheader("Content-Length", str(images.MAX_BYTES + 1))
    connection.endheaders()
    answer = connection.getresponse()
    assert (answer.status, json.loads(answer.read())["error"]) == (413, "image: expected at most 10 MB")
    connection.close()


def test_other_hosts_refused(running):
    port = running.server_address[1]
    for host in (f"localhost:{port}", f"127.0.0.1:{port}"):
        assert ask(running, Host=host)[0] == 200
    for host in ("evil.example", f"evil.example:{port}", "localhost:1"):
        status, _, text = ask(running, Host=host)
        assert status == 403
        assert "host: expected localhost" in text
    assert ask(running, "record", png(), Origin="http://evil.example")[0] == 403
    assert ask(running, "record", png(), Origin=running.url.rstrip("/"))[0] == 200


def test_requests_bounded(running):
    for _ in range(server.WAITING):
        running.places.acquire()
    try:
        assert ask(running, "record", png())[0] == 503
    finally:
        for _ in range(server.WAITING):
            running.places.release()


@pytest.mark.parametrize(
    ("header", "host", "expected"),
    [
        ("localhost:7860", "127.0.0.1", True),
        ("127.0.0.1:7860", "127.0.0.1", True),
        ("[::1]:7860", "::1", True),
        ("127.0.0.1:7861", "127.0.0.1", False),
        ("evil.example:7860", "127.0.0.1", False),
        ("evil.example:7860", "0.0.0.0", False),
        ("192.168.0.7:7860", "0.0.0.0", True),
        ("192.168.0.7:7860", "127.0.0.1", False),
        ("my-machine:7860", "my-machine", True),
        ("user@localhost:7860", "127.0.0.1", False),
        ("localhost:7860/path", "127.0.0.1", False),
        ("localhost:port", "127.0.0.1", False),
    ],
)
def test_is_served_host(header, host, expected):
    assert server.is_served_host(header, host, 7860) is expected


def test_serve_opens_browser(nano, monkeypatch, capsys):
    opened = threading.Event()
    monkeypatch.setattr(server.webbrowser, "open", lambda url: opened.set())
    monkeypatch.setattr(server.Server, "serve_forever", lambda self: None)
    server.serve(nano, images.find_image("shapes"), "shapes", host="127.0.0.1", port=0, browser=False)
    assert not opened.wait(0.1)
    server.serve(nano, images.find_image("shapes"), "shapes", host="127.0.0.1", port=0)
    assert opened.wait(10)
    assert "Exploring ppma_nano (random weights) at http://127.0.0.1:" in capsys.readouterr().out
