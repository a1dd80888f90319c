"""The keys and values of the embedded store, with waits and subscriptions, in one event loop.

Every change is one step of the loop, so that a plan and its epoch appear together, and a
compare-and-set from empty is written by exactly one of those who try.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping

Subscriber = Callable[[str, bytes], None]


class Table:
    """A dictionary from text to bytes that others can wait for."""

    def __init__(self) -> None:
        self.fenced: set[str] = set()
        """The nodes that are lost: nothing that they ask for is answered any more."""
        self._values: dict[str, bytes] = {}
        self._waiting: dict[str, set[asyncio.Future[None]]] = {}
        self._subscribers: list[tuple[str, Subscriber]] = []

    def get(self, key: str) -> bytes | None:
        """The value of a key, None while it has none."""
        return self._values.get(key)

    def set(self, key: str, value: bytes) -> None:
        """Give a key a value."""
        self.set_all({key: value})

    def set_all(self, values: Mapping[str, bytes]) -> None:
        """Give several keys their values in one step: nobody sees one without the others."""
        self._values.update(values)
        for key, value in values.items():
            self._wake(key)
            for prefix, subscriber in self._subscribers:
                if key.startswith(prefix):
                    subscriber(key, value)

    def compare_set(self, key: str, expected: bytes | None, desired: bytes) -> bytes | None:
        """Set a key only if it holds ``expected`` (None: nothing); the value that it holds now."""
        if self._values.get(key) == expected:
            self.set(key, desired)
        return self._values.get(key)

    def add(self, key: str, amount: int) -> int:
        """Add to a number kept as decimal text, from 0; the sum."""
        total = int(self._values.get(key, b"0")) + amount
        self.set(key, str(total).encode())
        return total

    def delete(self, key: str) -> bool:
        """Remove a key; whether it was there."""
        found = self._values.pop(key, None) is not None
        if found:
            self._wake(key)
        return found

    def count(self, prefix: str) -> int:
        """How many keys begin with ``prefix``."""
        return sum(key.startswith(prefix) for key in self._values)

    def delete_prefix(self, prefix: str) -> int:
        """Remove all keys that begin with ``prefix``; how many there were."""
        return sum(self.delete(key) for key in list(self._values) if key.startswith(prefix))

    def items(self, prefix: str) -> dict[str, bytes]:
        """The keys that begin with ``prefix``, with their values."""
        return {key: value for key, value in self._values.items() if key.startswith(prefix)}

    def subscribe(self, prefix: str, subscriber: Subscriber) -> None:
        """Call ``subscriber(key, value)`` whenever a key that begins with ``prefix`` is set."""
        self._subscribers.append((prefix, subscriber))

    async def wait(self, keys: Iterable[str], timeout_seconds: float) -> tuple[str, ...]:
        """Wait until all keys have values; those that have none when the time is over."""
        keys = tuple(keys)
        try:
            async with asyncio.timeout(timeout_seconds):
                while missing := [key for key in keys if key not in self._values]:
                    await self._change(missing[0])
        except TimeoutError:
            pass
        return tuple(key for key in keys if key not in self._values)

    async def wait_change(
        self, key: str, value: bytes | None, timeout_seconds: float
    ) -> bytes | None:
        """Wait until a key's value differs from ``value``; its value then or when time is over."""
        try:
            async with asyncio.timeout(timeout_seconds):
                while self._values.get(key) == value:
                    await self._change(key)
        except TimeoutError:
            pass
        return self._values.get(key)

    async def _change(self, key: str) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, set()).add(future)
        try:
            await future
        finally:
            waiting = self._waiting.get(key, set())
            waiting.discard(future)
            if not waiting:
                self._waiting.pop(key, None)

    def _wake(self, key: str) -> None:
        for future in self._waiting.pop(key, set()):
            if not future.done():
                future.set_result(None)
