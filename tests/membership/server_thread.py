"""A store server beside the tests' blocking clients."""

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from megatron_bamboo.membership.channel import Channel
from megatron_bamboo.membership.keys import Credential, Secret
from megatron_bamboo.membership.store_client import StoreClient
from megatron_bamboo.membership.store_server import AgentWatcher, StoreServer
from megatron_bamboo.membership.table import Table
from megatron_bamboo.membership.workers import node_of

SECRET_TEXT = "the secret of all jobs of the tests"
SECRET = Secret.of(SECRET_TEXT)
INCARNATION = "1"


def credential(worker: str = "") -> Credential:
    """A worker's, or that of a tool."""
    if not worker:
        return SECRET.tool()
    return SECRET.node(node_of(worker), INCARNATION).worker(worker)


def store_client(
    address: str, deadline_seconds: float, worker: str = "", **hooks: Any
) -> StoreClient:
    """A client of the tests' servers."""
    return StoreClient(address, deadline_seconds, credential(worker), **hooks)


@contextlib.contextmanager
def channel(address: str, whose: Credential, seconds: float = 5.0) -> Iterator[Channel]:
    """A connection that both sides have proven themselves on."""
    until = time.monotonic() + seconds
    host, _, port = address.rpartition(":")
    made = Channel(socket.create_connection((host, int(port)), seconds), whose, until)
    with contextlib.closing(made):
        made.open(until)
        yield made


def agent_channel(address: str, node: str) -> AbstractContextManager[Channel]:
    """As an agent has it."""
    return channel(address, SECRET.node(node, INCARNATION).agent())


def tool_channel(address: str) -> AbstractContextManager[Channel]:
    """As a tool has it."""
    return channel(address, SECRET.tool())


class ServerThread:
    """A store server in a thread of its own, for clients that block."""

    def __init__(
        self,
        watcher: AgentWatcher | None = None,
        secret: Secret = SECRET,
        table: Table | None = None,
    ) -> None:
        self.table = Table() if table is None else table
        self.server = StoreServer(self.table, secret, watcher)
        self.address = self.server.address
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=[self._serve()])
        self._thread.start()

    async def _serve(self) -> None:
        async with self.server:
            await self._stop.wait()

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function in the server's loop, as a coordinator would."""

        async def run() -> Any:
            return function(*args)

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(5)

    @property
    def is_stopped(self) -> bool:
        """Whether it was stopped."""
        return self._loop.is_closed()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(5)
        assert not self._thread.is_alive()
        self._loop.close()
