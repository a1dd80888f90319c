"""A worker's way to the embedded store: blocking calls whose deadlines hold.

A silent or stopped server makes a call raise when its time is over, never hang. A broken
connection is made anew and the call sent again until then, to whoever leads the job by then: a
store that is gone for a while stops no worker. So every call may come twice, and none does more
than once what it says. Each thread has a connection of its own, so that one that waits for the next
epoch never delays another's record. A store that does not know the job's secret is none.
"""

import contextlib
import secrets
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from megatron_bamboo.membership.address import Address, Signpost
from megatron_bamboo.membership.channel import Channel, Impostor, OtherSecret
from megatron_bamboo.membership.frames import (
    MalformedFrame,
    decode_value,
    encode_body,
    encode_value,
)
from megatron_bamboo.membership.keys import Credential

RETRY_SECONDS = 0.05
# How often a client that waits for an answer looks whether somebody else would give it.
LOOK_SECONDS = 0.25
# An answer that has begun to arrive is whole within this time, and a request is taken within it.
FRAME_SECONDS = 5.0
# A wait ends at the server; this much later the client stops listening for the answer. It is what a
# way there and back may take, or short waits would never be answered and connections only be made.
ANSWER_GRACE_SECONDS = 2.0


class StoreError(ConnectionError):
    """The store cannot be used: it was closed here, or a call was lost on the way."""


class StoreTimeout(TimeoutError):
    """A call was not answered, or a key did not appear, within its deadline."""


class StoreOfOthers(StoreTimeout):
    """A call was not answered: whenever it was sent, whoever listened had another secret."""


class NodeFenced(Exception):
    """This worker's node was declared lost: it must apply and write nothing any more."""


class _StillGreeting(TimeoutError):
    """A call's time was over before the server had answered the greeting: the next call needs no
    other connection, or calls with little time would never come through to a busy server."""


class _OfOthers(TimeoutError):
    """A call's time was over, and all its failures were OtherSecret."""


class StoreClient:
    """The store; every call ends within ``deadline_seconds`` or its own time.

    Args:
        address: ``host:port``, or the path of the file that says it (``address.py``).
        credential: whose calls these are; a worker's are refused once its node is lost.
        fenced: called, in whatever thread, when they are; by default the call raises NodeFenced.
    """

    def __init__(
        self,
        address: str,
        deadline_seconds: float,
        credential: Credential,
        fenced: Callable[[NodeFenced], None] | None = None,
    ) -> None:
        self._signpost = Signpost(address)
        self._credential = credential
        self._fenced = fenced
        self.deadline_seconds = deadline_seconds
        self._local = threading.local()
        self._connections: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._closed = False

    def get(self, key: str) -> bytes | None:
        """The value of a key, None while it has none."""
        return decode_value(self._call("get", key=key)["value"])

    def set(self, key: str, value: bytes) -> None:
        """Give a key a value."""
        self._call("set", key=key, value=encode_value(value))

    def compare_set(self, key: str, expected: bytes | None, desired: bytes) -> bytes | None:
        """Set a key only if it holds ``expected`` (None: nothing); the value that it holds now.

        The write took place if the answer is ``desired``: compare it.
        """
        reply = self._call(
            "compare_set", key=key, expected=encode_value(expected), desired=encode_value(desired)
        )
        return decode_value(reply["value"])

    def add(self, key: str, amount: int) -> int:
        """Add to a number, from 0; the sum."""
        request = secrets.token_hex(8)
        return int(self._call("add", key=key, amount=amount, request=request)["number"])

    def wait(self, keys: Iterable[str], timeout_seconds: float | None = None) -> None:
        """Wait until all keys have values; StoreTimeout names those that have none in time."""
        timeout = self.deadline_seconds if timeout_seconds is None else timeout_seconds
        missing = self._wait("wait", timeout, keys=list(keys))["missing"]
        if missing:
            raise StoreTimeout(f"wait for {', '.join(missing)}: not there after {timeout:g} s")

    def wait_change(
        self, key: str, value: bytes | None, timeout_seconds: float | None = None
    ) -> bytes | None:
        """Wait until a key's value differs from ``value``; its value then, or ``value`` still
        when the time is over."""
        timeout = self.deadline_seconds if timeout_seconds is None else timeout_seconds
        reply = self._wait("wait_change", timeout, key=key, value=encode_value(value))
        return decode_value(reply["value"])

    def delete(self, key: str) -> bool:
        """Remove a key; whether it was there."""
        return bool(self._call("delete", key=key)["deleted"])

    def count(self, prefix: str) -> int:
        """How many keys begin with ``prefix``."""
        return int(self._call("count", key=prefix)["number"])

    def delete_prefix(self, prefix: str) -> int:
        """Remove all keys that begin with ``prefix``; how many there were."""
        return int(self._call("delete_prefix", key=prefix)["number"])

    def filenos(self) -> frozenset[int]:
        """The descriptors of all threads' connections."""
        with self._lock:
            return frozenset(c.fileno() for c in self._connections if c.fileno() >= 0)

    def close(self) -> None:
        """End all connections; calls under way in other threads raise StoreError."""
        with self._lock:
            self._closed = True
            for connection in list(self._connections):
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def _call(self, op: str, **fields: Any) -> dict[str, Any]:
        return self._exchange({"op": op} | fields, self.deadline_seconds)

    def _wait(self, op: str, timeout_seconds: float, **fields: Any) -> dict[str, Any]:
        request = {"op": op, "timeout": timeout_seconds} | fields
        return self._exchange(request, timeout_seconds + ANSWER_GRACE_SECONDS)

    def _exchange(self, request: dict[str, Any], deadline_seconds: float) -> dict[str, Any]:
        what = f"{request['op']} {request.get('key', request.get('keys'))}"
        until = time.monotonic() + deadline_seconds
        try:
            reply = self._ask(request, until)
        except TimeoutError as error:
            kind = StoreOfOthers if isinstance(error, _OfOthers) else StoreTimeout
            raise kind(
                f"{what}: the store at {self._signpost} did not answer "
                f"within {deadline_seconds:g} s{error}"
            ) from None
        except StoreError as error:
            raise StoreError(f"{what}: {error}") from None
        if "fenced" in reply:
            fenced = NodeFenced(
                f"{self._credential.role.name}: its node was declared lost; {what} is refused"
            )
            if self._fenced is not None:
                self._fenced(fenced)
            raise fenced
        if "error" in reply:
            raise ValueError(f"{what}: {reply['error']}")
        return reply

    def _ask(self, request: dict[str, Any], until: float) -> dict[str, Any]:
        """The answer to a request, which is sent again until there is one."""
        body, why = encode_body(request), ""
        failures: set[type[Exception]] = set()
        while True:
            if self._closed:
                raise StoreError("the store client is closed")
            if (left := until - time.monotonic()) <= 0:
                raise _OfOthers(why) if failures == {OtherSecret} else TimeoutError(why)
            try:
                return self._send(body, until)
            except _StillGreeting:
                raise TimeoutError(why) from None
            except (OSError, MalformedFrame) as error:
                self._drop()
                failures.add(type(error))
                if isinstance(error, Impostor):
                    why = f": {error}"
            time.sleep(min(RETRY_SECONDS, left))
            if "timeout" in request:
                left = max(0.0, until - ANSWER_GRACE_SECONDS - time.monotonic())
                body = encode_body(request | {"timeout": left})

    def _send(self, body: bytes, until: float) -> dict[str, Any]:
        """One try; OSError or MalformedFrame where it has failed, or another one leads the job."""
        channel, address = self._connection(until)
        if not channel.is_open:
            try:
                self._await(channel, address, until)
            except TimeoutError:
                raise _StillGreeting from None
            channel.open(_soon(until))
        channel.send(body, _soon(until))
        self._await(channel, address, until)
        return channel.receive(_soon(until))

    def _await(self, channel: Channel, address: Address, until: float) -> None:
        """Wait for the server's next word; ConnectionError where another one leads the job."""
        while not _readable(channel.socket, min(LOOK_SECONDS, until - time.monotonic())):
            if self._signpost.find() != address:
                raise ConnectionResetError("another coordinator leads the job")

    def _connection(self, until: float) -> tuple[Channel, Address]:
        connected: tuple[Channel, Address] | None
        connected = getattr(self._local, "connected", None)
        if connected is None:
            address = self._signpost.find()
            if address is None:
                raise ConnectionRefusedError("nobody leads the job")
            left = _soon(until) - time.monotonic()
            if left <= 0:
                raise TimeoutError
            connection = socket.create_connection((address.host, address.port), timeout=left)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._connections.add(connection)
            channel = Channel(connection, self._credential, _soon(until))
            connected = self._local.connected = channel, address
        return connected

    def _drop(self) -> None:
        connected = self._local.__dict__.pop("connected", None)
        if connected is not None:
            with self._lock:
                self._connections.discard(connected[0].socket)
                connected[0].close()


def _soon(until: float) -> float:
    return min(until, time.monotonic() + FRAME_SECONDS)


def _readable(connection: socket.socket, seconds: float) -> bool:
    """Whether something arrives within the time; TimeoutError when there is none left."""
    if seconds <= 0:
        raise TimeoutError
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(1000 * seconds))
