"""A metadata server on this machine: answers what a test says, well or badly."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from megatron_bamboo.cloud.asking import Server


@dataclass(frozen=True, slots=True)
class Asked:
    """One question as it came; names of headers are in lower case."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


Reply = tuple[int, str] | tuple[int, str, dict[str, str]]
Answering = Callable[[Asked], Reply]


@dataclass
class MetadataServer:
    """Where it is, and what it was asked."""

    port: int
    asked: list[Asked] = field(default_factory=list)

    def client(self, seconds: float = 2.0) -> Server:
        return Server("127.0.0.1", self.port, seconds)

    def paths(self) -> list[str]:
        return [one.path for one in self.asked]


@contextmanager
def serving(answering: Answering) -> Iterator[MetadataServer]:
    """A server that answers with what ``answering`` gives."""

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            headers = {name.lower(): value for name, value in self.headers.items()}
            asked = Asked(self.command, self.path, headers, self.rfile.read(length))
            known.asked.append(asked)
            status, text, *more = answering(asked)
            self.send_response(status)
            for name, value in (more[0] if more else {}).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(text.encode())

        do_GET = do_PUT = do_POST = _answer

        def log_message(self, format: str, *args: object) -> None:
            """Tests are quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    known = MetadataServer(server.server_address[1])
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield known
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def raw(*chunks: bytes, pause_seconds: float = 0.0) -> Iterator[Server]:
    """A server that sends some bytes, however badly, with pauses, and then nothing more."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                for chunk in chunks:
                    try:
                        connection.sendall(chunk)
                    except OSError:  # whoever asked has gone
                        return
                    time.sleep(pause_seconds)

        thread = threading.Thread(target=serve)
        thread.start()
        yield Server("127.0.0.1", listener.getsockname()[1], 0.5)
        thread.join()


def nobody() -> Server:
    """An address at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    return Server("127.0.0.1", port, 0.5)
