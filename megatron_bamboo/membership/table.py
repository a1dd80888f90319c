"""The keys and values of the embedded store, with waits and subscriptions, in one event loop.

Every change is one step of the loop, so that a plan and its epoch appear together, and a
compare-and-set from empty is written by exactly one of those who try. What has changed, and what is
said of it, is kept elsewhere before anyone sees it (``stores.py``).
"""

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Subscriber = Callable[[str, bytes], None]


@dataclass(frozen=True, slots=True)
class Put:
    """A key has a value now."""

    key: str
    value: bytes


@dataclass(frozen=True, slots=True)
class Removed:
    """A key has no value any more, and nobody repeats an addition to it."""

    key: str


@dataclass(frozen=True, slots=True)
class Answered:
    """What was answered to one request to add: a repeated one gets the same answer."""

    key: str
    request: str
    total: int


@dataclass(frozen=True, slots=True)
class Said:
    """Something that is told of the job, as one line of JSON."""

    text: str


Change = Put | Removed | Answered | Said


class Keeper(Protocol):
    """Where a table's changes are kept; whatever it raises ends the one who keeps the table."""

    def load(self) -> Iterable[Change]:
        """All that was kept: what makes the table as it was."""

    def keep(self, changes: Sequence[Change]) -> None:
        """Keep some changes, all or none."""

    def check(self) -> None:
        """Make sure that the table may still speak for the job."""

    async def kept(self) -> None:
        """Wait until all that was given is kept, and the table speaks for the job beyond doubt."""


class Nowhere:
    """Keeps nothing: the table lives as long as its process."""

    def load(self) -> Iterable[Change]:
        """Nothing."""
        return ()

    def keep(self, changes: Sequence[Change]) -> None:
        """Forget them."""

    def check(self) -> None:
        """There is no other."""

    async def kept(self) -> None:
        """There is nothing to wait for."""


class Table:
    """A dictionary from text to bytes that others can wait for."""

    def __init__(self, keeper: Keeper | None = None) -> None:
        self.fenced: set[str] = set()
        """The nodes that are lost: nothing that they ask for is answered any more."""
        self._keeper = Nowhere() if keeper is None else keeper
        self._values: dict[str, bytes] = {}
        self._answers: dict[str, dict[str, int]] = {}
        self._waiting: dict[str, set[asyncio.Future[None]]] = {}
        self._subscribers: list[tuple[str, Subscriber]] = []
        self._changes: list[Change] | None = None
        for change in self._keeper.load():
            self._apply(change)

    def check(self) -> None:
        """Make sure that this table may still speak for the job; to be asked before it does."""
        self._keeper.check()

    async def kept(self) -> None:
        """Wait until all changes are kept; to be waited for before anyone is told of them."""
        await self._keeper.kept()

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """All changes within it, and all that is said, are one: kept and seen together.

        What is read within it is up to date already. Nothing may be awaited there.
        """
        if self._changes is not None:
            yield
            return
        changes: list[Change] = []
        self._changes = changes
        try:
            yield
        finally:
            self._changes = None
        if changes:
            self._keeper.keep(changes)
            self._publish(changes)

    def get(self, key: str) -> bytes | None:
        """The value of a key, None while it has none."""
        return self._values.get(key)

    def set(self, key: str, value: bytes) -> None:
        """Give a key a value."""
        self.set_all({key: value})

    def set_all(self, values: Mapping[str, bytes]) -> None:
        """Give several keys their values in one step: nobody sees one without the others."""
        self._change(Put(key, value) for key, value in values.items())

    def compare_set(self, key: str, expected: bytes | None, desired: bytes) -> bytes | None:
        """Set a key only if it holds ``expected`` (None: nothing); the value that it holds now."""
        if self._values.get(key) == expected:
            self.set(key, desired)
        return self._values.get(key)

    def add(self, key: str, amount: int, request: str = "") -> int:
        """Add to a number kept as decimal text, from 0; the sum.

        The same request, if it has a name, is answered again and adds nothing.
        """
        answered = self._answers.get(key, {}).get(request)
        if answered is not None:
            return answered
        total = int(self._values.get(key, b"0")) + amount
        answer = [Answered(key, request, total)] if request else []
        self._change([Put(key, str(total).encode()), *answer])
        return total

    def delete(self, key: str) -> bool:
        """Remove a key; whether it was there."""
        found = key in self._values
        if found:
            self._change([Removed(key)])
        return found

    def say(self, fact: Mapping[str, Any]) -> None:
        """Add to what is told of the job."""
        self._change([Said(json.dumps(fact))])

    def count(self, prefix: str) -> int:
        """How many keys begin with ``prefix``."""
        return sum(key.startswith(prefix) for key in self._values)

    def delete_prefix(self, prefix: str) -> int:
        """Remove all keys that begin with ``prefix``; how many there were."""
        with self.together():
            return sum(self.delete(key) for key in list(self._values) if key.startswith(prefix))

    def items(self, prefix: str) -> dict[str, bytes]:
        """The keys that begin with ``prefix``, with their values, oldest first."""
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
                    await self._next_change(missing[0])
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
                    await self._next_change(key)
        except TimeoutError:
            pass
        return self._values.get(key)

    def _change(self, changes: Iterable[Change]) -> None:
        with self.together():
            assert self._changes is not None
            for change in changes:
                self._apply(change)
                self._changes.append(change)

    def _apply(self, change: Change) -> None:
        match change:
            case Put(key, value):
                self._values[key] = value
            case Removed(key):
                self._values.pop(key, None)
                self._answers.pop(key, None)
            case Answered(key, request, total):
                self._answers.setdefault(key, {})[request] = total

    def _publish(self, changes: Sequence[Change]) -> None:
        for change in changes:
            match change:
                case Put(key, value):
                    self._wake(key)
                    for prefix, subscriber in self._subscribers:
                        if key.startswith(prefix):
                            subscriber(key, value)
                case Removed(key):
                    self._wake(key)

    async def _next_change(self, key: str) -> None:
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
