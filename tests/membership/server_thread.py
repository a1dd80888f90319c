"""A store server beside the tests' blocking clients."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from megatron_bamboo.membership.store_server import AgentWatcher, StoreServer
from megatron_bamboo.membership.table import Table


class ServerThread:
    """A store server in a thread of its own, for clients that block."""

    def __init__(self, watcher: AgentWatcher | None = None) -> None:
        self.table = Table()
        self.server = StoreServer(self.table, watcher)
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
