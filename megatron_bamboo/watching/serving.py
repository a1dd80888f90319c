"""The process that answers Prometheus: ``python -m megatron_bamboo.watching.serving FD FOLDER``.

It is a process of its own, started anew: the launcher forks coordinators, and neither a thread nor
a file that is open for a look may be copied into one. Whatever a stranger does to its port, the job
does not notice.
"""

import contextlib
import socket
import sys
import threading
from collections.abc import Iterable, Sequence
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, MetricsHandler
from prometheus_client.core import Metric

from megatron_bamboo.errors import UserError
from megatron_bamboo.watching.metrics import metrics_of
from megatron_bamboo.watching.store_view import StoreWatcher
from megatron_bamboo.watching.summary import status_of

IDLE_SECONDS = 10.0
"""A connection on which nothing is asked for so long is closed."""
MOST_CONNECTIONS = 64
"""With one more the oldest is closed: it may be of one who asks for ever."""


class JobCollector:
    """Looks into a job's store whenever it is asked."""

    def __init__(self, job_dir: Path) -> None:
        self._watcher = StoreWatcher(job_dir)
        # Several may ask at once, and each fact is to be read once.
        self._lock = threading.Lock()

    def collect(self) -> Iterable[Metric]:
        """The metrics of now; UserError where the store cannot be read."""
        with self._lock:
            return list(metrics_of(status_of(self._watcher.look())))

    def describe(self) -> Iterable[Metric]:
        """Nothing beforehand: the store is looked into only when it is asked for."""
        return ()


class _Handler(MetricsHandler):
    timeout = IDLE_SECONDS

    def do_GET(self) -> None:
        """Answer; where nothing can be read, say so: Prometheus then notes that it is down."""
        try:
            super().do_GET()
        except UserError as error:
            self.send_error(503, explain=str(error))


class _Server(ThreadingHTTPServer):
    """Has a thread for each connection, and so many of them at most."""

    def __init__(self, listener: socket.socket, handler: type[_Handler]) -> None:
        super().__init__(("", 0), handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self._guests: dict[Any, None] = {}
        self._guests_lock = threading.Lock()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer one in a thread of its own."""
        with self._guests_lock:
            self._guests[request] = None
            if len(self._guests) > MOST_CONNECTIONS:
                oldest = next(iter(self._guests))
                del self._guests[oldest]
                # Its thread ends of it, and closes it.
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection; called by its thread."""
        with self._guests_lock:
            self._guests.pop(request, None)
            super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say what went wrong here; that somebody has left is nothing."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


def serve(listener: socket.socket, job_dir: Path) -> None:
    """Answer on an open port for as long as this process lives."""
    registry = CollectorRegistry()
    registry.register(JobCollector(job_dir))
    handler = type("Handler", (_Handler,), {"registry": registry})
    _Server(listener, handler).serve_forever()


def main(arguments: Sequence[str]) -> None:
    """Serve on a descriptor that was handed over."""
    descriptor, job_dir = arguments
    serve(socket.socket(fileno=int(descriptor)), Path(job_dir))


if __name__ == "__main__":
    main(sys.argv[1:])
