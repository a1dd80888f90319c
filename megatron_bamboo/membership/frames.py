"""Messages of the control plane: JSON objects. A plain frame is four bytes of length, then one.

JSON because nothing from the network may be unpickled; a length in front and a limit on it because
a stray or broken client must cost no more than its own connection. Only greetings go as plain
frames, all else is sealed (``sealing.py``).
"""

import base64
import json
import socket
import struct
import time
from collections.abc import Mapping
from typing import Any

FRAME_LIMIT_BYTES = 4 * 1024 * 1024
_LENGTH = struct.Struct(">I")
LENGTH_BYTES = _LENGTH.size


class MalformedFrame(ValueError):
    """Bytes that are no frame: nothing more can be read from this connection."""


def encode_body(message: Mapping[str, Any]) -> bytes:
    """The bytes of one message; ValueError when it is too large for a frame."""
    body = json.dumps(message).encode()
    if len(body) > FRAME_LIMIT_BYTES:
        raise ValueError(f"a message of {len(body)} bytes exceeds {FRAME_LIMIT_BYTES}: split it")
    return body


def decode_body(body: bytes) -> dict[str, Any]:
    """What ``encode_body`` made of a message; MalformedFrame for anything else."""
    try:
        message = json.loads(body)
    # Brackets nested deeply enough are one too.
    except (ValueError, RecursionError) as error:
        raise MalformedFrame(f"a frame that is not JSON: {error}") from None
    if not isinstance(message, dict):
        raise MalformedFrame(f"a frame that is not a JSON object: {body[:80]!r}")
    return message


def encode_frame(message: Mapping[str, Any]) -> bytes:
    """One message as a plain frame; ValueError as above."""
    body = encode_body(message)
    return _LENGTH.pack(len(body)) + body


def body_length(head: bytes, limit: int = FRAME_LIMIT_BYTES) -> int:
    """The length of a plain frame's body by its first ``LENGTH_BYTES``."""
    length = int(_LENGTH.unpack(head)[0])
    if length > limit:
        raise MalformedFrame(f"a frame of {length} bytes exceeds {limit}")
    return length


def encode_value(value: bytes | None) -> str | None:
    """A value of the store as JSON text."""
    return None if value is None else base64.b64encode(value).decode()


def decode_value(text: str | None) -> bytes | None:
    """What ``encode_value`` made of a value."""
    return None if text is None else base64.b64decode(text, validate=True)


def receive_frame(
    connection: socket.socket, until: float | None = None, limit: int = FRAME_LIMIT_BYTES
) -> dict[str, Any]:
    """The next plain frame's message of a blocking socket, by the monotonic time ``until``.

    TimeoutError when the time is over, ConnectionError when the other side has closed.
    """
    length = body_length(receive_exactly(connection, LENGTH_BYTES, until), limit)
    return decode_body(receive_exactly(connection, length, until))


def receive_exactly(connection: socket.socket, count: int, until: float | None) -> bytes:
    """So many bytes of a blocking socket; errors as above."""
    received = bytearray()
    while len(received) < count:
        set_deadline(connection, until)
        chunk = connection.recv(count - len(received))
        if not chunk:
            raise ConnectionResetError("the other side closed the connection")
        received += chunk
    return bytes(received)


def set_deadline(connection: socket.socket, until: float | None) -> None:
    """Let the socket's next call end by ``until``; TimeoutError when that is past."""
    remaining = None if until is None else until - time.monotonic()
    if remaining is not None and remaining <= 0:
        raise TimeoutError("the deadline is past")
    connection.settimeout(remaining)
