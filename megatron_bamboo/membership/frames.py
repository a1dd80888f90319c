"""Frames of the control plane: four bytes of length, big-endian, then one JSON object.

JSON because nothing from the network may be unpickled; a length in front and a limit on it because
a stray or broken client must cost no more than its own connection.
"""

import asyncio
import base64
import json
import socket
import struct
import time
from collections.abc import Mapping
from typing import Any

FRAME_LIMIT_BYTES = 4 * 1024 * 1024
_LENGTH = struct.Struct(">I")


class MalformedFrame(ValueError):
    """Bytes that are no frame: nothing more can be read from this connection."""


def encode_frame(message: Mapping[str, Any]) -> bytes:
    """The bytes of one message; ValueError when it is too large for a frame."""
    body = json.dumps(message).encode()
    if len(body) > FRAME_LIMIT_BYTES:
        raise ValueError(f"a message of {len(body)} bytes exceeds {FRAME_LIMIT_BYTES}: split it")
    return _LENGTH.pack(len(body)) + body


def encode_value(value: bytes | None) -> str | None:
    """A value of the store as JSON text."""
    return None if value is None else base64.b64encode(value).decode()


def decode_value(text: str | None) -> bytes | None:
    """What ``encode_value`` made of a value."""
    return None if text is None else base64.b64decode(text, validate=True)


async def read_frame(reader: asyncio.StreamReader) -> dict[str, Any]:
    """The next message of a stream; ``asyncio.IncompleteReadError`` at its end."""
    length = _body_length(await reader.readexactly(_LENGTH.size))
    return _decode_body(await reader.readexactly(length))


def receive_frame(connection: socket.socket, until: float | None = None) -> dict[str, Any]:
    """The next message of a blocking socket, by the monotonic time ``until``.

    TimeoutError when the time is over, ConnectionError when the other side has closed.
    """
    length = _body_length(_receive_exactly(connection, _LENGTH.size, until))
    return _decode_body(_receive_exactly(connection, length, until))


def _receive_exactly(connection: socket.socket, count: int, until: float | None) -> bytes:
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


def _body_length(head: bytes) -> int:
    length = int(_LENGTH.unpack(head)[0])
    if length > FRAME_LIMIT_BYTES:
        raise MalformedFrame(f"a frame of {length} bytes exceeds {FRAME_LIMIT_BYTES}")
    return length


def _decode_body(body: bytes) -> dict[str, Any]:
    try:
        message = json.loads(body)
    except ValueError as error:
        raise MalformedFrame(f"a frame that is not JSON: {error}") from None
    if not isinstance(message, dict):
        raise MalformedFrame(f"a frame that is not a JSON object: {body[:80]!r}")
    return message
