"""The server as it runs: it asks nobody outside, its page refers to nothing outside, it answers its own host only."""

import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request

import pytest

pytest.importorskip("gradio", reason="the explorer needs gradio: pip install 'ppma[explore]'")

# Everything that Python's sockets are asked to look up or connect to is seen by the audit hook, and refused.
SERVE = """
import ipaddress, json, os, sys
asked = []
def watch(event, arguments):
    if event not in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto"):
        return
    place = arguments[1] if event in ("socket.connect", "socket.sendto") else arguments
    host = place[0] if isinstance(place, tuple) else place
    if host in (None, "", "localhost", b"localhost"):
        return
    try:
        inside = ipaddress.ip_address(host if isinstance(host, str) else host.decode()).is_loopback
    except ValueError:
        inside = str(host).startswith("/")  # a socket of this machine
    if not inside or (isinstance(place, tuple) and place[1] == 9):
        asked.append(f"{event} {place}")
        raise PermissionError(f"{event} {place}")
sys.addaudithook(watch)
from ppma.explore import app, images, subject
page = app.build(subject.from_name("ppma_nano"), images.find_image("shapes"))
print(json.dumps({"address": app.launch(page), "proxy": os.environ.get("NO_PROXY")}), flush=True)
sys.stdin.read()
page.close(verbose=False)
print(json.dumps(asked), flush=True)
"""


@pytest.fixture
def server():
    """A server in a process of its own; the environment asks for analytics and has a proxy that nobody may use."""
    proxies = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    settings = {"GRADIO_ANALYTICS_ENABLED": "True", "GRADIO_SHARE": "True", **proxies}
    environment = {name: value for name, value in os.environ.items() if name.lower() != "no_proxy"} | settings
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        started = json.loads(process.stdout.readline())
        yield process, started
    finally:
        process.kill()
        process.wait()


def get(server, path="", **headers):
    asked = urllib.request.Request(server[1]["address"] + path, headers=headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(asked, timeout=60) as answer:
            return answer.status, answer.headers, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.headers, error.read().decode()


def check_page(server):
    status, headers, html = get(server)
    assert status == 200
    assert headers["Content-Security-Policy"].startswith("default-src 'self'")
    references = re.findall(r"""<(?:script|link|img|iframe|source)\b[^>]*?(?:src|href)=["']([^"']+)""", html)
    assert len(references) > 2
    assert [reference for reference in references if "//" in reference] == []
    assert "fonts.googleapis" not in get(server, "theme.css")[2]


def check_hosts(server):
    port = server[1]["address"].rsplit(":", 1)[1].strip("/")
    assert server[1]["address"].startswith("http://127.0.0.1:")
    for host in (f"localhost:{port}", f"127.0.0.1:{port}"):
        assert get(server, "config", Host=host)[0] == 200
    for host in ("evil.example", f"evil.example:{port}", "localhost:1"):
        status, _, text = get(server, "config", Host=host)
        assert (status, "components" in text) == (403, False)
        assert "host: expected localhost" in text


def check_files_elsewhere(server):
    elsewhere = {"path": "http://192.0.2.1/a.png", "meta": {"_type": "gradio.FileData"}}
    config = json.loads(get(server, "config")[2])
    upload = next(f["id"] for f in config["dependencies"] if f["api_name"] == "upload_file")
    body = json.dumps({"fn_index": upload, "session_hash": "a", "data": [elsewhere, None]}).encode()
    asked = urllib.request.Request(
        server[1]["address"] + "gradio_api/queue/join", body, {"Content-Type": "application/json"}
    )
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.build_opener(urllib.request.ProxyHandler({})).open(asked, timeout=60)
    assert refused.value.code == 400
    assert "expected an uploaded file" in refused.value.read().decode()
    assert get(server, "gradio_api/file=http://192.0.2.1/a.png")[0] == 404


def test_server_offline(server):
    """One test, because a server takes seconds to start."""
    check_page(server)
    check_hosts(server)
    check_files_elsewhere(server)
    process, started = server
    assert started["proxy"] is None, "the environment is as it was"
    out, _ = process.communicate("", timeout=60)
    assert json.loads(out) == []
