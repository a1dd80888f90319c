"""The embedded store as torch's process groups want it.

torch's TCPStore does not keep its deadlines when its host falls silent, and loses writes when it
dies. A process group that rendezvous over this store fails exactly at the deadline given here, and
at once when ``cancel`` is called: a worker that learns of a loss while it is forming a group must
not sit out the wait for a peer that will never come.
"""

import threading
import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from megatron_bamboo.membership.store_client import StoreClient, StoreTimeout

# How long after ``cancel`` a wait may go on.
SLICE_SECONDS = 0.05


class StoreCancelled(RuntimeError):
    """The epoch that this store belongs to has ended."""


class BambooStore(dist.Store):
    """The keys under ``prefix`` of the embedded store, with one deadline for every wait.

    Keep a reference for as long as a group or a ``PrefixStore`` uses it: torch keeps only the C++
    half alive.
    """

    def __init__(self, client: StoreClient, prefix: str, deadline_seconds: float) -> None:
        super().__init__()
        self._client = client
        self._prefix = prefix
        self._deadline_seconds = deadline_seconds
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        """Make every wait under way raise StoreCancelled, and every later call."""
        self._cancelled.set()

    def set(self, key: str, value: bytes | str) -> None:
        """Give a key a value."""
        self._check_alive()
        self._client.set(self._prefix + key, _bytes(value))

    def get(self, key: str) -> bytes:
        """The value of a key, once it has one."""
        self.wait([key])
        value = self._client.get(self._prefix + key)
        if value is None:
            raise KeyError(f"{self._prefix}{key} was deleted")
        return value

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        """Set a key only if it holds ``expected`` (empty: nothing), in torch's way: the value
        that the key holds now, ``expected`` where it holds none."""
        self._check_alive()
        wanted = _bytes(expected)
        held = self._client.compare_set(self._prefix + key, wanted or None, _bytes(desired))
        return wanted if held is None else held

    def add(self, key: str, amount: int) -> int:
        """Add to a number, from 0; the sum."""
        self._check_alive()
        return self._client.add(self._prefix + key, amount)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys have values now."""
        self._check_alive()
        return all(self._client.get(self._prefix + key) is not None for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys have values; StoreTimeout at the deadline, StoreCancelled after
        ``cancel``. A group asks for its own, longer timeout here: the store's deadline holds."""
        seconds = self._deadline_seconds
        if timeout is not None:
            seconds = min(seconds, timeout.total_seconds())
        until = time.monotonic() + seconds
        names = [self._prefix + key for key in keys]
        while True:
            self._check_alive()
            remaining = until - time.monotonic()
            try:
                self._client.wait(names, max(0.0, min(SLICE_SECONDS, remaining)))
                return
            except StoreTimeout:
                if remaining <= SLICE_SECONDS:
                    raise StoreTimeout(
                        f"wait for {', '.join(names)}: not there after {seconds:g} s"
                    ) from None

    def delete_key(self, key: str) -> bool:
        """Remove a key; whether it was there."""
        self._check_alive()
        return self._client.delete(self._prefix + key)

    def num_keys(self) -> int:
        """How many keys there are under the prefix."""
        self._check_alive()
        return self._client.count(self._prefix)

    # What torch's C++ looks for when a PrefixStore or a group calls the two methods above.
    deleteKey = delete_key
    getNumKeys = num_keys

    def set_timeout(self, timeout: timedelta) -> None:
        """Change the deadline of later waits."""
        self._deadline_seconds = timeout.total_seconds()

    @property
    def timeout(self) -> timedelta:
        """The deadline of every wait."""
        return timedelta(seconds=self._deadline_seconds)

    def _check_alive(self) -> None:
        if self._cancelled.is_set():
            raise StoreCancelled(f"the groups under {self._prefix} belong to an epoch that ended")


def _bytes(value: bytes | str) -> bytes:
    return value.encode() if isinstance(value, str) else value
