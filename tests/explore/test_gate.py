"""Which requests reach the explorer."""

import asyncio
import json
import socket

import pytest

pytest.importorskip("gradio", reason="the explorer needs gradio: pip install 'ppma[explore]'")
from ppma.explore import gate

PORT = 7860


def ask(path="/", *, method="GET", headers=(), body=b"", host="127.0.0.1", parse=json.loads, protected=None):
    """Status, text and what the app behind the gate received (None if nothing)."""
    seen, sent = [], []

    async def app(scope, receive, send):
        seen.append((await receive())["body"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"fine"})

    async def receive():
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message):
        sent.append(message)

    named = {b"host": f"localhost:{PORT}".encode(), b"content-length": b"%d" % len(body)}
    named |= {name.encode(): value.encode() for name, value in dict(headers).items()}
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "server": ("127.0.0.1", PORT),
        "headers": [(name, value) for name, value in named.items() if value],
    }
    asyncio.run((protected or gate.Gate(app, host, parse, 1000))(scope, receive, send))
    return sent[0]["status"], sent[1]["body"].decode(), seen[0] if seen else None


@pytest.mark.parametrize(
    ("header", "host", "served"),
    [
        ("localhost:7860", "127.0.0.1", True),
        ("LOCALHOST:7860", "127.0.0.1", True),
        ("127.0.0.1:7860", "127.0.0.1", True),
        ("[::1]:7860", "127.0.0.1", True),
        ("evil.example:7860", "127.0.0.1", False),
        ("127.0.0.1.evil.example:7860", "127.0.0.1", False),
        ("localhost:7861", "127.0.0.1", False),
        ("localhost", "127.0.0.1", False),
        ("192.168.0.7:7860", "127.0.0.1", False),
        ("localhost:7860@evil.example", "127.0.0.1", False),
        ("user@localhost:7860", "127.0.0.1", False),
        ("localhost:7860/x", "127.0.0.1", False),
        ("localhost:x", "127.0.0.1", False),
        ("[::1:7860", "127.0.0.1", False),
        ("", "127.0.0.1", False),
        ("gpu-box:7860", "gpu-box", True),
        ("localhost:7860", "gpu-box", True),
        ("evil.example:7860", "gpu-box", False),
        ("192.168.0.7:7860", "0.0.0.0", True),
        ("[fe80::1]:7860", "::", True),
        (f"{socket.gethostname()}:7860", "0.0.0.0", True),
        ("evil.example:7860", "0.0.0.0", False),
    ],
)
def test_gate_host_header(header, host, served):
    assert gate.is_served_host(header, host, PORT) is served


def test_gate_foreign_host_or_origin():
    assert ask()[0] == 200
    assert ask(headers={"host": "evil.example:7860"})[0] == 403
    assert ask(headers={"host": ""})[0] == 403
    assert ask(headers={"origin": "http://localhost:7860"})[0] == 200
    for origin in ("http://evil.example", "null", "http://localhost:7861", "http://[bad"):
        status, text, received = ask(headers={"origin": origin})
        assert (status, received) == (403, None), origin
        assert "expected the explorer's own page" in text


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 200),
        ("HEAD", "/", 200),
        ("GET", "/assets/index.js", 200),
        ("GET", "/gradio_api/file=/tmp/gradio/a.webp", 200),
        ("GET", "/gradio_api/file=http://evil.example/a", 404),
        ("GET", "/gradio_api/file=https%3A%2F%2Fevil.example/a", 404),
        ("GET", "/gradio_api/proxy=http://evil.example", 404),
        ("GET", "/gradio_api/deep_link", 404),
        ("POST", "/gradio_api/run/redraw", 404),
        ("POST", "/gradio_api/call/redraw", 404),
        ("POST", "/gradio_api/process_recording", 404),
        ("POST", "/login", 404),
        ("DELETE", "/", 405),
        ("OPTIONS", "/", 405),
    ],
)
def test_gate_routes(method, path, status):
    assert ask(path, method=method)[0] == status


def test_gate_body_size():
    assert ask(gate.JOIN, method="POST", body=b'{"a": 1}')[::2] == (200, b'{"a": 1}')
    assert ask(gate.JOIN, method="POST", body=b"1" * (gate.JSON_BYTES + 1))[0] == 413
    assert ask(gate.UPLOAD, method="POST", body=b"1" * (gate.JSON_BYTES + 1000))[0] == 200
    assert ask(gate.UPLOAD, method="POST", body=b"1" * (gate.JSON_BYTES + 1001))[0] == 413
    for headers in ({"content-length": ""}, {"content-length": "-1"}, {"transfer-encoding": "chunked"}):
        assert ask(gate.UPLOAD, method="POST", headers=headers)[0] == 411
    assert ask(gate.UPLOAD, method="POST", headers={"content-length": "9" * 5000})[0] == 413


def test_gate_parse_error():
    def parse(body):
        raise ValueError("rows: expected 2 to 8, got 9")

    assert ask(gate.JOIN, method="POST", body=b"{}", parse=parse) == (
        400,
        '{"detail":"rows: expected 2 to 8, got 9"}',
        None,
    )


def test_gate_open_requests():
    waiting, answers = asyncio.Event(), []

    async def app(scope, receive, send):
        await waiting.wait()

    async def send(message):
        answers.append(message.get("status"))
        waiting.set()

    async def ask_often():
        protected = gate.Gate(app, "127.0.0.1", json.loads, 1000)
        headers = [(b"host", b"localhost:7860")]
        scope = {"type": "http", "method": "GET", "path": "/", "server": ("127.0.0.1", PORT), "headers": headers}
        await asyncio.gather(*(protected(dict(scope), None, send) for _ in range(gate.OPEN_REQUESTS + 1)))
        assert protected.open == 0

    asyncio.run(ask_often())
    assert answers[0] == 503
