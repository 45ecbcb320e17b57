"""A proxy in front of a server of objects, with faults that a test scripts. Events tell the order, and no clocks.

``with FaultServer(environment) as faults`` takes the environment of :func:`servers.server`, and ``faults.environment``
is the same with the proxy's address. ``faults.add("lose", "PUT", "manifest.json")`` spoils the first request of that
method with that text in its path or query. ``faults.requests`` has all that came.
"""

from __future__ import annotations

import dataclasses
import http.client
import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

import servers

KINDS = {
    "answer": "answers itself, with a status and a code of the store's, and asks no server",
    "lose": "asks the server, and breaks the connection in place of its answer",
    "late": "breaks the connection, and asks the server when the test says `go`; then `done` is set",
    "hold": "is silent until the test says `go`, then does as usual",
    "cut_up": "sends half of the body to the server, and breaks both connections",
    "cut_down": "answers with half of the body, and breaks the connection",
    "flip_up": "flips the lowest bit in the middle of the body that goes to the server",
    "flip_down": "flips the lowest bit in the middle of the body that comes from the server",
}


@dataclasses.dataclass
class Request:
    """A request that came: ``path`` with its query, the bytes of its body, and of its answer, whose status is 0 so far.

    ``span`` is the value of its Range, or an empty string.
    """

    method: str
    path: str
    nbytes: int
    span: str = ""
    status: int = 0
    answered: int = 0


class Fault:
    """One kind of fault for some of the requests that match.

    Attributes:
        met: Set when a request has met it.
        go: What a held or late request waits for.
        done: Set when a late request has been done.
    """

    def __init__(self, kind: str, method: str, part: str, *, first: int, times: int, status: int, code: str) -> None:
        assert kind in KINDS, kind
        self.kind, self.status, self.code = kind, status, code
        self.met, self.go, self.done = threading.Event(), threading.Event(), threading.Event()
        self._method, self._part, self._spoiled, self._seen = method, part, range(first, first + times), 0

    def meets(self, request: Request) -> bool:
        """Whether it spoils a request; counts those that match."""
        if self._method not in ("", request.method) or self._part not in request.path:
            return False
        self._seen += 1
        if self._seen in self._spoiled:
            self.met.set()
            return True
        return False


class FaultServer:
    """The proxy. Thread-safe.

    Attributes:
        environment: What obstore needs to ask the proxy.
        requests: All requests that came, in their order.
    """

    def __init__(self, environment: dict[str, str]) -> None:
        names = [name for name in servers.ENDPOINTS if name in environment]
        self.behind = str(urlsplit(environment[names[0]]).netloc)
        self.requests: list[Request] = []
        self._faults: list[Fault] = []
        self._lock = threading.Lock()
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"faults": self}))
        self.address = f"127.0.0.1:{self._server.server_port}"
        self.environment = {**environment, **dict.fromkeys(names, f"http://{self.address}")}

    def __enter__(self) -> FaultServer:
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.clear()
        self._server.shutdown()
        self._server.server_close()

    def add(
        self,
        kind: str,
        method: str = "",
        part: str = "",
        *,
        first: int = 1,
        times: int = 1,
        status: int = 503,
        code: str = "Canary",
    ) -> Fault:
        """Spoil ``times`` requests from the ``first`` on that match: one of :data:`KINDS`."""
        fault = Fault(kind, method, part, first=first, times=times, status=status, code=code)
        with self._lock:
            self._faults.append(fault)
        return fault

    def clear(self) -> None:
        """Forget faults and requests. What is held or late goes on."""
        with self._lock:
            for fault in self._faults:
                fault.go.set()
            self._faults.clear()
            self.requests.clear()

    def came(self, request: Request) -> Fault | None:
        """Note a request; returns its fault."""
        with self._lock:
            self.requests.append(request)
            met = [fault for fault in self._faults if fault.meets(request)]  # all of them count it
            return met[0] if met else None


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    faults: FaultServer

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        request = Request(self.command, self.path, len(body), self.headers.get("Range") or "")
        fault = self.faults.came(request)
        kind = fault.kind if fault else ""
        if fault and kind == "answer":
            text = f"<Error><Code>{fault.code}</Code><StringToSign>{self.headers.items()}</StringToSign></Error>"
            self._reply(request, fault.status, "of the test", [("Content-Type", "application/xml")], text.encode())
            return
        if kind == "late":
            self._break()
        if fault and kind in ("late", "hold"):
            fault.go.wait()
        with self._asked(_flipped(body) if kind == "flip_up" else body, cut=kind == "cut_up") as answer:
            if answer is None or kind in ("lose", "late"):
                self._break()
            else:
                data = answer.read()
                request.status, request.answered = answer.status, len(data)
                data = _flipped(data) if kind == "flip_down" else data
                self._reply(request, answer.status, answer.reason, answer.getheaders(), data, cut=kind == "cut_down")
        if fault:
            fault.done.set()

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _serve

    @contextmanager
    def _asked(self, body: bytes, *, cut: bool) -> Iterator[http.client.HTTPResponse | None]:
        """The server's answer; None where the request was cut, or the server broke the connection."""
        behind = http.client.HTTPConnection(self.faults.behind)
        try:
            behind.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() != "connection":
                    behind.putheader(name, value)
            behind.endheaders(body[: len(body) // 2] if cut else body)
            answer = None
            if not cut:
                with suppress(OSError, http.client.HTTPException):  # it has no answer
                    answer = behind.getresponse()
            yield answer
        finally:
            behind.close()

    def _reply(
        self,
        request: Request,
        status: int,
        reason: str,
        headers: list[tuple[str, str]],
        body: bytes,
        *,
        cut: bool = False,
    ) -> None:
        request.status = status
        lengths = {"connection", "transfer-encoding", *(["content-length"] if self.command != "HEAD" else [])}
        self.send_response_only(status, reason)
        for name, value in headers:
            if name.lower() not in lengths:
                self.send_header(name, value)
        if self.command != "HEAD" and status not in (204, 304):
            self.send_header("Content-Length", str(len(body)))
        with suppress(ConnectionError):  # the client may have gone
            self.end_headers()
            self.wfile.write(b"" if self.command == "HEAD" else body[: len(body) // 2] if cut else body)
        if cut:
            self._break()

    def _break(self) -> None:
        self.close_connection = True
        with suppress(OSError):
            self.connection.shutdown(2)


def _flipped(data: bytes) -> bytes:
    flipped = bytearray(data)
    if data:
        flipped[len(data) // 2] ^= 1
    return bytes(flipped)
