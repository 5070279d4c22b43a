"""The explorer's local server: one page, and the records of samples and uploaded images.

It answers requests addressed to this machine only, of bounded size, and makes none itself.
"""

import errno
import ipaddress
import json
import socket
import threading
import webbrowser
from collections.abc import Callable
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from PIL import Image

from ppma.explore.images import MAX_BYTES, decode_image, find_image, sample_names
from ppma.explore.page import page_html
from ppma.explore.record import image_record
from ppma.explore.subject import Subject
from ppma.ops import checks

# The browser loads nothing from other servers: the page works offline and leaks nothing.
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; "
POLICY += "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
WAITING = 16  # requests for records; further ones are refused
CACHED = 8  # records of samples


class Refused(Exception):  # noqa: N818  # a response, not an error
    """A rejected request: the HTTP status and a message for the user."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Server(ThreadingHTTPServer):
    """Serves the page of one model; `serve_forever` runs it.

    Args:
        subject: the model.
        image: shown first.
        name: of that image.
        host: address or name to listen on.
        port: port to listen on; 0 for a free one.
    """

    daemon_threads = True

    def __init__(self, subject: Subject, image: Image.Image, name: str, *, host: str = "127.0.0.1", port: int = 0):
        self.host, self.subject = host.strip("[]"), subject
        self.one_at_a_time, self.places = threading.Lock(), threading.BoundedSemaphore(WAITING)
        self.sample = lru_cache(CACHED)(lambda sample: self.record(find_image(sample), sample))
        self.page = page_html(subject, [image_record(subject, image, name)], live=True).encode()
        self.address_family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        super().__init__((self.host, port), _Handler)

    @property
    def url(self) -> str:
        """The address of the page."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.server_address[1]}/"

    def record(self, image: Image.Image, name: str) -> bytes:
        """The record of an image as JSON; one image is computed at a time."""
        if not self.places.acquire(blocking=False):
            raise Refused(503, f"requests: at most {WAITING} at a time")
        try:
            with self.one_at_a_time:
                return json.dumps(image_record(self.subject, image, name)).encode()
        finally:
            self.places.release()


class _Handler(BaseHTTPRequestHandler):
    server: Server
    timeout = 30  # seconds: a connection that sends nothing is closed
    server_version, sys_version = "ppma", ""

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def log_message(self, *args: Any) -> None:
        """Log nothing."""

    def _answer(self, respond: Callable[[], tuple[str, bytes]]) -> None:
        status = 200
        try:
            _check_address(self.headers.get_all("host", []), self.headers.get_all("origin", []), self.server)
            content, body = respond()
        except Refused as refused:
            status, content, body = refused.status, "application/json", _message(refused)
        except ValueError as error:
            status, content, body = 400, "application/json", _message(error)
        self.send_response(status)
        self.send_header("Content-Type", f"{content}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Security-Policy", POLICY)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def _get(self) -> tuple[str, bytes]:
        asked = urlsplit(self.path)
        if asked.path == "/":
            return "text/html", self.server.page
        if asked.path != "/record":
            raise Refused(404, "path: not used by the page")
        name = parse_qs(asked.query).get("sample", [""])[0]
        checks.one_of("sample", name[:40], sample_names())
        return "application/json", self.server.sample(name)

    def _post(self) -> tuple[str, bytes]:
        if self.path != "/record":
            raise Refused(404, "path: not used by the page")
        length = self.headers.get("content-length", "")
        if not (length.isascii() and length.isdigit()):
            raise Refused(411, "body: expected a Content-Length header")
        if len(length) > 12 or int(length) > MAX_BYTES:
            raise Refused(413, f"image: expected at most {MAX_BYTES / 1e6:g} MB")
        content = self.rfile.read(int(length))
        return "application/json", self.server.record(decode_image(content, "the upload"), "upload")


def _message(error: Exception) -> bytes:
    return json.dumps({"error": str(error)}).encode()


def _check_address(hosts: list[str], origins: list[str], server: Server) -> None:
    port = server.server_address[1]
    if len(hosts) != 1 or not is_served_host(hosts[0], server.host, port):
        raise Refused(403, f"host: expected localhost:{port} or the address given by --host")
    if any(origin.removeprefix("https://").removeprefix("http://") != hosts[0] for origin in origins):
        raise Refused(403, "origin: expected the explorer's own page")


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
    listening, address = _address(host), _address(name)
    everywhere = listening is not None and listening.is_unspecified
    if address is None:
        return everywhere and name == socket.gethostname().lower()
    return address.is_loopback or everywhere  # an IP address cannot be rebound


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return None


def check_address(host: str, port: int) -> None:
    """Raise a ValueError unless the host is an address of this machine and the port is free."""
    if not 1 <= port <= 65535:
        raise ValueError(f"port: expected 1 to 65535, got {port}")
    bare = host.strip("[]")
    try:
        family, kind, *_, address = socket.getaddrinfo(bare or None, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except PermissionError:
        raise ValueError(f"port: expected one that this user may open (from 1024 on), got {port}") from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ValueError(f"port: expected a free one, got {port}, which is in use on {host}") from None
        raise ValueError(f"host: expected an address of this machine, got {host!r}") from None
    except UnicodeError:
        raise ValueError(f"host: expected an address of this machine, got {host!r}") from None


def serve(subject: Subject, image: Image.Image, name: str, *, host: str, port: int, browser: bool = True) -> None:
    """Serve the page until interrupted, and open it in the browser."""
    try:
        server = Server(subject, image, name, host=host, port=port)
    except OSError:
        raise ValueError(f"host, port: expected a free port of this machine, got {host}:{port}") from None
    print(f"Exploring {subject.name} at {server.url} (Ctrl-C to stop)", flush=True)
    if browser:
        threading.Thread(target=webbrowser.open, args=(server.url,), daemon=True).start()
    with server:
        server.serve_forever()
