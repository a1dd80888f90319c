"""Lets the workers of one node pass an action together, or none of them.

Workers that share layers meet in collectives inside of an action, which nothing interrupts. When a
plan changes they may notice at different moments, and one must not enter an action that another
has turned away from. So each arrives here first, and may turn back only as long as not all have
arrived. The node's memory is the meeting place: a page that the first worker makes and the others
map, guarded by a file lock; both vanish with the processes.
"""

import fcntl
import mmap
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import blake2b

from megatron_bamboo.execution.errors import DeadlineExceeded, EpochEnded
from megatron_bamboo.membership.store_client import StoreClient

_SHORTEST_PAUSE = 20e-6
_LONGEST_PAUSE = 1e-3


class Turnstile:
    """The meeting place of the workers of one node."""

    def __init__(self, descriptor: int, tensor_rank: int, tensor_size: int, seconds: float) -> None:
        self._descriptor = descriptor
        self._rank = tensor_rank
        self._size = tensor_size
        self._seconds = seconds
        page = mmap.mmap(descriptor, _bytes_for(tensor_size))
        # By rank what it has arrived at, and behind them what all have arrived at last.
        self._places = memoryview(page).cast("Q")

    @classmethod
    def meet(
        cls, client: StoreClient, node: str, tensor_rank: int, tensor_size: int, seconds: float
    ) -> "Turnstile":
        """Make the meeting place, or find the one that the node's first worker made."""
        size = _bytes_for(tensor_size)
        descriptor = share_memory(client, f"turnstile/{node}", tensor_rank, size, seconds)
        return cls(descriptor, tensor_rank, tensor_size, seconds)

    def pass_together(self, what: str, must_leave: Callable[[], bool]) -> None:
        """Return when all workers of the node have arrived at ``what``.

        Args:
            what: names the action, the step and the epoch; never the same twice.

        Raises:
            EpochEnded: ``must_leave`` said so before all had arrived; none of them passes.
            DeadlineExceeded: a worker of this very node did not arrive.
        """
        token = int.from_bytes(blake2b(what.encode(), digest_size=8).digest(), "little") | 1
        self._arrive(token)
        deadline, pause = time.monotonic() + self._seconds, _SHORTEST_PAUSE
        while self._places[self._size] != token:
            if must_leave() and self._turn_back(token):
                raise EpochEnded
            if time.monotonic() > deadline:
                raise DeadlineExceeded(f"a worker of this node did not come to {what}")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _arrive(self, token: int) -> None:
        with self._locked():
            self._places[self._rank] = token
            if all(self._places[rank] == token for rank in range(self._size)):
                self._places[self._size] = token

    def _turn_back(self, token: int) -> bool:
        """Whether it was still possible."""
        with self._locked():
            if self._places[self._size] == token:
                return False
            self._places[self._rank] = 0
            return True

    @contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.lockf(self._descriptor, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN)


def share_memory(
    client: StoreClient, name: str, tensor_rank: int, num_bytes: int, seconds: float
) -> int:
    """Memory of the node that its first worker makes and the others find: a file descriptor.

    Args:
        name: of the key in the store under which it is found, with the node in it.

    Raises:
        StoreTimeout: the first worker did not make it within ``seconds``.
    """
    if tensor_rank == 0:
        descriptor = os.memfd_create(name.replace("/", "-"))
        os.truncate(descriptor, num_bytes)
        client.set(name, f"/proc/{os.getpid()}/fd/{descriptor}".encode())
        return descriptor
    client.wait([name], seconds)
    path = client.get(name)
    assert path is not None
    return os.open(path, os.O_RDWR | os.O_CLOEXEC)


def _bytes_for(tensor_size: int) -> int:
    return 8 * (tensor_size + 1)
