"""The way into the control plane's port: whoever comes proves who it is, or is turned away.

Until then it costs one descriptor and some hundred bytes, for some seconds, and only so many may
wait at a time: the socket is read no further than a greeting is long. So what strangers send, or do
not send, changes nothing, and those who belong to the job go on being served.
"""

import asyncio
import contextlib
import logging
import secrets
import socket
from collections.abc import Awaitable, Callable
from typing import Any

from megatron_bamboo.membership.frames import (
    LENGTH_BYTES,
    MalformedFrame,
    body_length,
    decode_body,
)
from megatron_bamboo.membership.greeting import GREETING_LIMIT_BYTES, answer_greeting
from megatron_bamboo.membership.keys import NONCE_BYTES, Kind, Role, Secret
from megatron_bamboo.membership.lobby import Lobby
from megatron_bamboo.membership.sealing import HEAD_BYTES, MAC_BYTES, BrokenSeal, Session
from megatron_bamboo.membership.strangers import Strangers

logger = logging.getLogger(__name__)

# A frame that has begun to arrive is whole within this time.
FRAME_SECONDS = 5.0
GREETING_SECONDS = 10.0
"""So long one may take to prove who it is."""
MOST_WAITING = 128
"""So many may be at it at a time."""
QUIET_SECONDS = 30
"""So long nothing comes before the kernel asks whether the other machine is still there."""
ASKING_SECONDS = 10
MOST_ASKED = 3
# With no descriptor left a connection is taken when another one has ended.
ACCEPT_RETRY_SECONDS = 0.1
_LONGEST_PROOF = 64


class SealedStream:
    """A server's end of an authenticated connection."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, session: Session
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._session = session

    async def read(self) -> dict[str, Any]:
        """The next message; ``asyncio.IncompleteReadError`` at the end.

        Raises:
            BrokenSeal: something that the client did not say.
        """
        head = await self._reader.readexactly(HEAD_BYTES)
        count = self._session.num_to_come(head)
        try:
            async with asyncio.timeout(FRAME_SECONDS):
                rest = await self._reader.readexactly(count)
        except TimeoutError:
            raise BrokenSeal(f"{count} bytes were to come and did not") from None
        return decode_body(self._session.open(head, rest))

    def write(self, body: bytes) -> None:
        """Send what ``encode_body`` made of a message."""
        self._writer.write(self._session.seal(body))

    async def drain(self) -> None:
        """Wait until there is room for more."""
        await self._writer.drain()

    def is_closing(self) -> bool:
        """Whether nothing can be sent any more."""
        return self._writer.is_closing()

    def close(self) -> None:
        """End it."""
        self._writer.close()


Serve = Callable[[Role, SealedStream], Awaitable[None]]


class Gate:
    """Takes the connections of one port.

    Args:
        serve: talks with who has proven itself, until either side has enough.
    """

    def __init__(self, listener: socket.socket, secret: Secret, serve: Serve) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._secret = secret
        self._serve = serve
        self._lobby: Lobby[asyncio.Task[None]] = Lobby(MOST_WAITING)
        self._strangers = Strangers(logger.warning)
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Take connections until this is cancelled; then all of them end."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                try:
                    connection, peer = await loop.sock_accept(self._listener)
                except OSError as error:
                    logger.warning("a connection cannot be taken: %s", error)
                    await asyncio.sleep(ACCEPT_RETRY_SECONDS)
                    continue
                self._take(connection, str(peer[0]))
                # However many come, each round of the loop takes one and serves all others.
                await asyncio.sleep(0)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _take(self, connection: socket.socket, address: str) -> None:
        task = asyncio.create_task(self._handle(connection, address))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if (outrun := self._lobby.enter(task, address)) is not None:
            self._strangers.turned_away(address, "more come than say who they are")
            outrun.cancel()

    async def _handle(self, connection: socket.socket, address: str) -> None:
        with contextlib.ExitStack() as ours:
            ours.callback(connection.close)
            if (admitted := await self._admit(connection, address)) is None:
                return
            ours.pop_all()
        await self._converse(connection, *admitted, address)

    async def _admit(self, connection: socket.socket, address: str) -> tuple[Role, Session] | None:
        """Who this is, once it has proven it; None for one that is turned away."""
        task = asyncio.current_task()
        assert task is not None
        try:
            async with asyncio.timeout(GREETING_SECONDS):
                return await self._greet(connection)
        except TimeoutError:
            self._strangers.turned_away(address, "it did not say in time who it is")
        except (MalformedFrame, OSError) as error:
            self._strangers.turned_away(address, str(error))
        finally:
            self._lobby.leave(task, address)
        return None

    async def _greet(self, connection: socket.socket) -> tuple[Role, Session]:
        head = await _receive(connection, LENGTH_BYTES)
        body = await _receive(connection, body_length(head, GREETING_LIMIT_BYTES))
        nonce = secrets.token_bytes(NONCE_BYTES)
        role, session, answer = answer_greeting(self._secret, decode_body(body), nonce)
        await asyncio.get_running_loop().sock_sendall(connection, answer)
        head = await _receive(connection, HEAD_BYTES)
        if (length := session.num_to_come(head)) > MAC_BYTES + _LONGEST_PROOF:
            raise BrokenSeal(f"a proof of {length} bytes")
        session.open(head, await _receive(connection, length))
        return role, session

    async def _converse(
        self, connection: socket.socket, role: Role, session: Session, address: str
    ) -> None:
        # Of an agent's silence its lease decides.
        if role.kind is not Kind.AGENT:
            _end_with_its_machine(connection)
        reader, writer = await asyncio.open_connection(sock=connection)
        stream = SealedStream(reader, writer, session)
        try:
            # Nobody but this task minds how the connection ends.
            with contextlib.suppress(asyncio.IncompleteReadError, OSError, asyncio.CancelledError):
                await self._serve(role, stream)
        except MalformedFrame as error:
            self._strangers.turned_away(address, f"as {role.kind} {role.name}: {error}")
        finally:
            stream.close()


def _end_with_its_machine(connection: socket.socket) -> None:
    """Let a connection end when the machine on the other side has gone without a word.

    It would stay for ever: there is nothing to tell to who asks nothing.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, QUIET_SECONDS),
        (socket.TCP_KEEPINTVL, ASKING_SECONDS),
        (socket.TCP_KEEPCNT, MOST_ASKED),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


async def _receive(connection: socket.socket, count: int) -> bytes:
    loop = asyncio.get_running_loop()
    received = bytearray()
    while len(received) < count:
        chunk = await loop.sock_recv(connection, count - len(received))
        if not chunk:
            raise ConnectionResetError("it left before it had said who it is")
        received += chunk
    return bytes(received)
