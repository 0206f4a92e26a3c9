"""An engine that records what it is asked and misbehaves on request; a real HTTP server."""

from __future__ import annotations

import json
import socket
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Seen:
    """One request."""

    method: str
    path: str
    """With the query."""
    headers: dict[str, str]
    """Lower-case names."""
    body: bytes
    at: float = field(default_factory=time.monotonic)


class RecordingEngine:
    """Answers everything with JSON that names itself. Special paths:

    `/stream` sends `pieces` numbered lines, `piece_interval_s` apart; `/break` sends half an answer
    and closes; `/teapot` answers 418 with a header; `/slow` waits until the client has left.
    """

    def __init__(self, name: str = "engine") -> None:
        self.name = name
        self.seen: list[Seen] = []
        self.health_status = 200
        self.drop_next = 0
        """Requests to close without a byte of an answer."""
        self.fail_next = 0
        """Requests to answer with 500."""
        self.pieces = 5
        self.piece_interval_s = 0.05
        self.left = threading.Event()
        """A client of `/slow` has hung up."""
        self.weight_version = 0
        self._connections: set[socket.socket] = set()
        self._server = _Server(("127.0.0.1", 0), _handler_of(self))
        self.port: int = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._start()

    def paths(self) -> list[str]:
        """Paths asked for, health checks left out."""
        return [request.path for request in self.seen]

    def stop(self) -> None:
        """Die: close the port and every connection."""
        self._server.shutdown()
        self._server.server_close()
        for connection in list(self._connections):
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # closed by its client already
        self._thread.join(5)

    def restart(self) -> None:
        """Come back on the same port."""
        self._server = _Server(("127.0.0.1", self.port), _handler_of(self))
        self._start()

    def _start(self) -> None:
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        )
        self._thread.start()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256
    allow_reuse_address = True


def _handler_of(engine: RecordingEngine) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def setup(self) -> None:
            super().setup()
            engine._connections.add(self.connection)

        def finish(self) -> None:
            engine._connections.discard(self.connection)
            try:
                super().finish()
            except OSError:
                return  # the connection was closed under us

        def log_message(self, format: str, *arguments: Any) -> None:
            """Says nothing."""

        def do_GET(self) -> None:
            if self.path == "/health":
                return self.respond(engine.health_status, {"status": "ok"})
            self.take("GET")

        def do_POST(self) -> None:
            self.take("POST")

        def take(self, method: str) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            headers = {key.lower(): value for key, value in self.headers.items()}
            engine.seen.append(Seen(method, self.path, headers, body))
            if engine.drop_next > 0:
                engine.drop_next -= 1
                self.close_connection = True
            elif engine.fail_next > 0:
                engine.fail_next -= 1
                self.respond(500, {"error": {"message": "told to fail"}})
            else:
                self.special(self.path.partition("?")[0], body)

        def special(self, path: str, body: bytes) -> None:
            if path == "/stream":
                self.stream()
            elif path == "/break":
                self.send_response(200)
                self.send_header("Content-Length", "100")
                self.end_headers()
                self.wfile.write(b"half")
                self.close_connection = True
            elif path == "/slow":
                self.wait_for_hangup()
            elif path == "/teapot":
                self.respond(418, {"engine": engine.name}, {"X-Tea": "green"})
            elif path == "/update_weights":
                engine.weight_version = json.loads(body)["update_info"]["version"]
                self.respond(200, {"status": "ok"})
            elif path == "/weight_info":
                self.respond(200, {"weight_version": str(engine.weight_version)})
            else:
                self.respond(200, {"engine": engine.name, "bytes": len(body)})

        def stream(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for number in range(engine.pieces):
                text = f"data: {number}\n\n".encode()
                self.wfile.write(b"%x\r\n%s\r\n" % (len(text), text))
                time.sleep(engine.piece_interval_s)
            self.wfile.write(b"0\r\n\r\n")

        def wait_for_hangup(self) -> None:
            self.connection.settimeout(10)
            try:
                if self.connection.recv(1) == b"":
                    engine.left.set()
            except OSError:
                engine.left.set()
            self.close_connection = True

        def respond(self, status: int, content: Any, headers: dict[str, str] | None = None) -> None:
            text = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(text)

    return Handler
