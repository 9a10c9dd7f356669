"""A web server on loopback that does what it is told, wrongly where it is told so: for whatever reads over a network.

    with FaultServer() as server:
        server.put("/a/shard.bin", body)               # ETag: MD5 of the body, changes with it
        server.script("/a/shard.bin", 503, Fault(status=429, retry_after="1"), Fault(reset=100))
        url = server.url("/a/shard.bin")               # three tries go wrong, the fourth is answered
        assert server.count("/a/shard.bin") == 4

A path's faults are used up one a request (HEAD too, unless `heads=False`), then it is answered rightly. `always` stays.
With `key` set, who does not have it in the query is refused (403).
GET knows ranges, If-Match, HEAD; PUT stores. A folder's path ("/a/") is listed as links. Threads; nothing leaves
127.0.0.1. `requests` has what was asked, in order: (method, path, Range header or "", number of bytes sent).
"""

import base64
import hashlib
import http.server
import re
import socket
import struct
import threading
import time
from collections import Counter, defaultdict, deque
from dataclasses import dataclass
from typing import Any

__all__ = ["Fault", "FaultServer"]


@dataclass(frozen=True)
class Fault:
    """One wrong answer. What is None or False stays right.

    status: this one, without the body. retry_after, location: headers with it. reset: the connection is reset after so
    many bytes of the body (0: before any answer). stall: nothing more comes for so many seconds after the headers.
    short: so many bytes less than the headers say, then the connection is closed. length: Content-Length is off by so
    much. zeros: the body is zeros. no_range: Range is ignored, 200 comes. shifted: another range than was asked for.
    slow: seconds before the answer. etag: another one. no_length: neither Content-Length nor chunks, as HTTP/1.0 did.
    """

    status: "int | None" = None
    retry_after: "str | None" = None
    location: "str | None" = None
    reset: "int | None" = None
    stall: float = 0.0
    short: int = 0
    length: int = 0
    zeros: bool = False
    no_range: bool = False
    shifted: bool = False
    slow: float = 0.0
    etag: "str | None" = None
    no_length: bool = False


class _File:
    def __init__(self, body: bytes, headers: "dict[str, str]") -> None:
        self.body, self.headers = body, headers
        self.etag = f'"{hashlib.md5(body, usedforsecurity=False).hexdigest()}"'


class FaultServer:
    def __init__(self) -> None:
        self.requests: list[tuple[str, str, str, int]] = []
        self.headers: list[dict[str, str]] = []
        self.key = ""
        self._files: dict[str, _File] = {}
        self._faults: dict[str, deque[Fault]] = defaultdict(deque)
        self._always: dict[str, Fault] = {}
        self._heads: dict[str, bool] = {}
        self._lock = threading.Lock()
        self.ending = threading.Event()
        server = self

        class Handler(_Handler):
            owner = server

        self._http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.port = self._http.server_address[1]

    def __enter__(self) -> "FaultServer":
        threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.ending.set()
        self._http.shutdown()
        self._http.server_close()

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    def put(self, path: str, body: bytes, md5: bool = False, **headers: str) -> str:
        """Stores a file, and gives its URL. md5: Content-MD5 is said. headers: others, "_" for "-"."""
        extra = {name.replace("_", "-"): value for name, value in headers.items()}
        if md5:
            extra["Content-MD5"] = base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode()
        with self._lock:
            self._files[path] = _File(body, extra)
        return self.url(path)

    def body(self, path: str) -> bytes:
        return self._files[path].body

    def script(self, path: str, *faults: "Fault | int", heads: bool = False, always: "Fault | None" = None) -> None:
        """What goes wrong with the next requests of a path; an integer is a status. heads: HEAD requests, too."""
        with self._lock:
            self._faults[path] = deque(Fault(status=f) if isinstance(f, int) else f for f in faults)
            self._heads[path] = heads
            self._always.pop(path, None)
            if always is not None:
                self._always[path] = always

    def count(self, path: "str | None" = None, method: str = "GET") -> int:
        """How many requests there were of a path, or of all."""
        with self._lock:
            return sum(m == method and path in (None, p) for m, p, _, _ in self.requests)

    def counts(self, method: str = "GET") -> "Counter[str]":
        with self._lock:
            return Counter(p for m, p, _, _ in self.requests if m == method)

    def ranges(self, path: str) -> "list[str]":
        with self._lock:
            return [r for m, p, r, _ in self.requests if m == "GET" and p == path]

    def forget(self) -> None:
        with self._lock:
            self.requests.clear()
            self.headers.clear()

    def _take(self, method: str, path: str) -> Fault:
        with self._lock:
            if method == "HEAD" and not self._heads.get(path, False):
                return Fault()
            if self._faults[path]:
                return self._faults[path].popleft()
            return self._always.get(path, Fault())

    def _note(self, method: str, path: str, asked: str, sent: int, headers: "dict[str, str]") -> None:
        with self._lock:
            self.requests.append((method, path, asked, sent))
            self.headers.append(headers)


class _Handler(http.server.BaseHTTPRequestHandler):
    owner: FaultServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_PUT(self) -> None:
        path = self.path.partition("?")[0]
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            pieces = []
            while size := int(self.rfile.readline(), 16):
                pieces.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            body = b"".join(pieces)
        else:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        fault = self.owner._take("PUT", path)
        self.owner._note("PUT", path, "", len(body), dict(self.headers))
        if fault.status is None:
            self.owner.put(path, body[: len(body) - fault.short])
        self._answer(fault.status or 201, {}, b"", fault)

    def do_GET(self) -> None:
        path, method = self.path.partition("?")[0], self.command
        fault, asked = self.owner._take(method, path), self.headers.get("Range", "")
        self.owner._note(method, path, asked, 0, dict(self.headers))
        if self.owner.key not in self.path:
            return self._answer(403, {}, b"", fault)
        if fault.slow:
            self.owner.ending.wait(fault.slow)
        if fault.reset == 0:
            return self._reset()
        if fault.status is not None:
            headers = {"Retry-After": fault.retry_after, "Location": fault.location}
            return self._answer(fault.status, {k: v for k, v in headers.items() if v}, b"", fault)
        if (file := self.owner._files.get(path)) is None:
            links = sorted(p for p in self.owner._files if p.startswith(path) and path.endswith("/"))
            if not links:
                return self._answer(404, {}, b"", fault)
            page = "".join(f'<a href="{p[len(path) :]}">{p}</a>\n' for p in links if "/" not in p[len(path) :]).encode()
            return self._answer(200, {"Content-Type": "text/html"}, page, fault)
        etag = fault.etag or file.etag
        if (match := self.headers.get("If-Match")) and match != etag:
            return self._answer(412, {}, b"", fault)
        headers = {"ETag": etag, "Accept-Ranges": "bytes", **file.headers}
        body, status = file.body, 200
        if (found := re.fullmatch(r"bytes=(\d+)-(\d*)", asked)) and not fault.no_range:
            start = int(found[1]) + fault.shifted
            stop = min(len(body), int(found[2]) + 1 + fault.shifted if found[2] else len(body))
            if start >= len(body):
                return self._answer(416, {"Content-Range": f"bytes */{len(body)}"}, b"", fault)
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(body)}"
            headers.pop("Content-MD5", None)
            body, status = body[start:stop], 206
        return self._answer(status, headers, bytes(len(body)) if fault.zeros else body, fault)

    def _answer(self, status: int, headers: "dict[str, str]", body: bytes, fault: Fault) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if fault.no_length:
            self.send_header("Connection", "close")
            self.close_connection = True
        else:
            self.send_header("Content-Length", str(len(body) + fault.length))
        self.end_headers()
        if self.command == "HEAD":
            return
        if fault.stall:
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            self.owner.ending.wait(fault.stall)
            self.close_connection = True
            return
        if fault.reset:
            self.wfile.write(body[: fault.reset])
            self.wfile.flush()
            time.sleep(0.02)
            self._reset()
            return
        try:
            self.wfile.write(memoryview(body)[: len(body) - fault.short])
        except OSError:
            self.close_connection = True
        if fault.short or fault.length:
            self.close_connection = True

    def _reset(self) -> None:
        """The other side gets RST, not FIN."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.wfile = self.rfile = open("/dev/null", "r+b", 0)  # type: ignore[assignment]  # noqa: PTH123, SIM115
        self.connection.close()
