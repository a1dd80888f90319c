"""One question to a metadata server, with a deadline for the whole answer.

These servers speak plain HTTP on an address of the machine's own, so the standard library's client
is enough. It is asked directly: proxies are for other addresses, and who redirects is no metadata
server.
"""

import http.client
import json
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MOST_BYTES = 1 << 20
LINK_LOCAL = "169.254.169.254"
"""Where all three clouds have their metadata server."""


class NoAnswer(Exception):
    """The server cannot be reached, or did not answer in time."""


class BadAnswer(Exception):
    """The server said what a metadata server does not say."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back; names of headers are in lower case."""

    status: int
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)

    def text(self) -> str:
        """The body as text.

        Raises:
            BadAnswer: it is none.
        """
        try:
            return self.body.decode().strip()
        except UnicodeDecodeError as error:
            raise BadAnswer(f"an answer is no text: {error}") from error

    def json(self, what: str) -> Any:
        """The body as JSON.

        Raises:
            BadAnswer: it is none.
        """
        try:
            return json.loads(self.text())
        except (ValueError, RecursionError) as error:
            raise BadAnswer(f"{what} is no JSON: {error}") from error


@dataclass(frozen=True, slots=True)
class Server:
    """A metadata server.

    Args:
        seconds: how long one whole answer may take.
    """

    host: str = LINK_LOCAL
    port: int = 80
    seconds: float = 2.0

    def ask(
        self,
        path: str,
        headers: Mapping[str, str],
        method: str = "GET",
        body: bytes | None = None,
        seconds: float | None = None,
    ) -> Answer:
        """Ask once.

        Raises:
            NoAnswer: there is none, or it is not whole in time.
            BadAnswer: it is no HTTP, or too long.
        """
        limit = self.seconds if seconds is None else seconds
        connection = http.client.HTTPConnection(self.host, self.port, timeout=limit)
        # A timeout of the socket begins anew with each byte that comes.
        is_late = threading.Event()
        alarm = threading.Timer(limit, _shut, [connection, is_late])
        alarm.daemon = True
        try:
            alarm.start()
            connection.request(method, path, body, dict(headers))
            response = connection.getresponse()
            content = response.read(MOST_BYTES + 1)
        except (OSError, http.client.IncompleteRead) as error:
            raise NoAnswer(f"{self}: {error or type(error).__name__}") from error
        except http.client.HTTPException as error:
            raise BadAnswer(f"{self}: {type(error).__name__}: {error}") from error
        finally:
            alarm.cancel()
            connection.close()
        if len(content) > MOST_BYTES:
            raise BadAnswer(f"{self}: an answer of more than {MOST_BYTES} bytes")
        if is_late.is_set() or response.length:
            raise NoAnswer(f"{self}: the answer was not whole within {limit:g} s")
        names = {name.lower(): value for name, value in response.getheaders()}
        return Answer(response.status, content, names)

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def _shut(connection: http.client.HTTPConnection, is_late: threading.Event) -> None:
    """End whatever waits for this connection."""
    is_late.set()
    opened = connection.sock
    if opened is not None:
        try:
            opened.shutdown(socket.SHUT_RDWR)
        except OSError:  # it has ended by itself
            return
