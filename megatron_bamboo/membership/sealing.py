"""Sealed frames: what one side of a connection says, so that nobody else can have said it.

A frame is a head (the length of its body, its direction, its number), the body, and a MAC of both.
Whoever receives takes only the next number of the other direction: what is repeated, left out, in
another order, sent back or changed in any bit is no frame, and ends the connection.
"""

import hmac
import struct
from dataclasses import dataclass
from enum import IntEnum

from megatron_bamboo.membership.frames import FRAME_LIMIT_BYTES, MalformedFrame
from megatron_bamboo.membership.keys import Credential, derive

_HEAD = struct.Struct(">IBQ")
HEAD_BYTES = _HEAD.size
MAC_BYTES = 32


class BrokenSeal(MalformedFrame):
    """Something that the other side did not say here and now."""


class Direction(IntEnum):
    """Who speaks."""

    TO_SERVER = 0
    TO_CLIENT = 1


@dataclass(frozen=True, slots=True)
class Nonces:
    """What makes a connection unlike every other: each side has drawn one."""

    client: bytes
    server: bytes


class Session:
    """One side of a connection: seals what it says, opens what it hears."""

    def __init__(self, credential: Credential, nonces: Nonces, speaks: Direction) -> None:
        role = credential.role
        text = (role.kind.encode(), role.name.encode(), role.incarnation.encode())
        key = derive(credential.key, b"session", nonces.client, nonces.server, *text)
        hears = Direction(1 - speaks)
        self._ours = hmac.new(_direction_key(key, speaks), digestmod="sha256")
        self._theirs = hmac.new(_direction_key(key, hears), digestmod="sha256")
        # Plain numbers: they are compared with each frame.
        self._speaks, self._hears = int(speaks), int(hears)
        self._num_said = self._num_heard = 0

    def seal(self, body: bytes) -> bytes:
        """The next frame to send, of a body within the limit of frames."""
        head = _HEAD.pack(len(body), self._speaks, self._num_said)
        self._num_said += 1
        return b"".join((head, body, _mac(self._ours, head, body)))

    def num_to_come(self, head: bytes) -> int:
        """How many bytes follow the head of the next frame; BrokenSeal if it cannot be that."""
        length, direction, number = _HEAD.unpack(head)
        if length > FRAME_LIMIT_BYTES:
            raise BrokenSeal(f"a frame of {length} bytes exceeds {FRAME_LIMIT_BYTES}")
        if number != self._num_heard or direction != self._hears:
            raise BrokenSeal(f"frame {number} of direction {direction} comes out of turn")
        return int(length) + MAC_BYTES

    def open(self, head: bytes, rest: bytes) -> bytes:
        """The body of the next frame; BrokenSeal if it is none of the other side's."""
        body, mac = rest[:-MAC_BYTES], rest[-MAC_BYTES:]
        if not hmac.compare_digest(mac, _mac(self._theirs, head, body)):
            raise BrokenSeal(f"frame {self._num_heard} has a wrong seal")
        self._num_heard += 1
        return body


def _direction_key(key: bytes, direction: Direction) -> bytes:
    return derive(key, direction.name.encode())


def _mac(keyed: hmac.HMAC, head: bytes, body: bytes) -> bytes:
    mac = keyed.copy()
    mac.update(head)
    mac.update(body)
    return mac.digest()
