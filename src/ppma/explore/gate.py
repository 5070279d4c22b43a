"""Middleware that admits only requests from the explorer's own page, to its own address, of bounded size."""

import ipaddress
import json
import socket
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

# The browser loads nothing from other servers: the page works offline and leaks nothing.
POLICY = "default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; connect-src 'self' data: blob:"
API = "/gradio_api/"
JOIN, UPLOAD = f"{API}queue/join", f"{API}upload"
POSTED = (JOIN, UPLOAD, f"{API}cancel", f"{API}reset")
# Routes that the page uses. The rest of Gradio's interface (calls by name, a proxy, recordings, ...) stays closed.
READ = ("app_id", "config", "file=", "heartbeat/", "info", "queue/data", "startup-events", "theme.css", "upload_")
JSON_BYTES = 65_536  # ten times the largest valid request
OPEN_REQUESTS = 64  # concurrent, including the event stream of each open page


class Refused(Exception):  # noqa: N818  # a response, not an error
    """A rejected request.

    Args:
        status: HTTP status of the response.
        message: shown to the user.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


class Gate:
    """Middleware in front of the page.

    Args:
        app: the application to protect.
        host: the address that the server listens on.
        parse: validates the body of a call and returns what Gradio receives; a ValueError is shown to the user.
        upload_bytes: maximum file size.
    """

    def __init__(self, app: ASGIApp, host: str, parse: Callable[[bytes], dict[str, Any]], upload_bytes: int) -> None:
        self.app, self.host, self.parse = app, host, parse
        self.limits = dict.fromkeys(POSTED, JSON_BYTES) | {UPLOAD: upload_bytes + JSON_BYTES}
        self.open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def with_policy(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["Content-Security-Policy"] = POLICY
            await send(message)

        self.open += 1
        try:
            received = await self._admit(scope, receive)
        except Refused as refused:
            # Gradio's page shows `detail`.
            await JSONResponse({"detail": refused.message}, refused.status)(scope, receive, with_policy)
        else:
            await self.app(scope, received, with_policy)
        finally:
            self.open -= 1

    async def _admit(self, scope: Scope, receive: Receive) -> Receive:
        """The `receive` callable for the app; raises `Refused`."""
        headers = Headers(scope=scope)
        _check_address(headers, self.host, scope["server"][1])
        if self.open > OPEN_REQUESTS:
            raise Refused(503, f"requests: at most {OPEN_REQUESTS} at a time")
        path = scope["path"].rstrip("/")
        if scope["method"] != "POST":
            _check_read(scope["method"], path)
            return receive
        if path not in self.limits:
            raise Refused(404, "path: not used by the page")
        _check_length(headers, self.limits[path])
        if path != JOIN:
            return receive
        try:
            body = json.dumps(self.parse(await _body(receive))).encode()
        except ValueError as error:
            raise Refused(400, str(error)) from None
        scope["headers"] = [pair for pair in scope["headers"] if pair[0] not in (b"content-length", b"content-type")]
        scope["headers"] += [(b"content-length", b"%d" % len(body)), (b"content-type", b"application/json")]
        return _receive_once(body, receive)


def is_served_host(header: str, host: str, port: int) -> bool:
    """Whether a Host header names this server.

    A website can point its own domain at this machine (DNS rebinding), and the browser then lets it read the
    responses. Such a request carries the other domain in its Host header.

    Args:
        header: value of the Host header.
        host: the address that the server listens on.
        port: the port that it listens on.
    """
    try:
        split = urlsplit(f"//{header}")
        name, given = split.hostname or "", split.port or 80
    except ValueError:
        return False
    if given != port or split.netloc != header or split.username is not None:
        return False
    if name in ("localhost", host.lower().strip("[]")):
        return True
    everywhere = _address(host) is not None and _address(host).is_unspecified  # type: ignore[union-attr]
    address = _address(name)
    if address is None:
        return everywhere and name == socket.gethostname().lower()
    return address.is_loopback or everywhere  # an IP address cannot be rebound


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return None


def _check_address(headers: Headers, host: str, port: int) -> None:
    names, origins = headers.getlist("host"), headers.getlist("origin")
    if len(names) != 1 or not is_served_host(names[0], host, port):
        raise Refused(403, f"host: expected localhost:{port} or the address given by --host")
    if any(origin.removeprefix("https://").removeprefix("http://") != names[0] for origin in origins):
        raise Refused(403, "origin: expected the explorer's own page")


def _check_read(method: str, path: str) -> None:
    if method not in ("GET", "HEAD"):
        raise Refused(405, "method: expected GET, HEAD or POST")
    asked = unquote(path)
    if not asked.startswith(API):
        return  # the page and its scripts
    asked = asked.removeprefix(API)
    if not asked.startswith(READ) or "://" in asked:  # Gradio would fetch file=https://...
        raise Refused(404, "path: not used by the page")


def _check_length(headers: Headers, limit: int) -> None:
    length = headers.get("content-length", "")
    if "transfer-encoding" in headers or not (length.isascii() and length.isdigit()):
        raise Refused(411, "body: expected a Content-Length header")
    if len(length) > 12 or int(length) > limit:
        raise Refused(413, f"body: expected at most {limit} bytes, got more")


async def _body(receive: Receive) -> bytes:
    parts, more = [], True
    while more:
        message = await receive()
        if message["type"] != "http.request":
            raise Refused(400, "body: incomplete")
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    return b"".join(parts)


def _receive_once(body: bytes, receive: Receive) -> Receive:
    waiting = [body]

    async def replay() -> Message:
        if waiting:
            return {"type": "http.request", "body": waiting.pop(), "more_body": False}
        return await receive()

    return replay
