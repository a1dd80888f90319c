"""What a worker's main thread is at, for those who ask when it raises, hangs or is waited for."""

from collections.abc import Iterator
from contextlib import contextmanager

from megatron_bamboo.execution.errors import EpochEnded, PeerLost
from megatron_bamboo.membership.place import START, Place


class Whereabouts:
    """The place of one worker's main thread."""

    def __init__(self, step: int) -> None:
        self.place = Place(step, START)

    @contextmanager
    def at(self, step: int, action: str) -> Iterator[None]:
        """Within it the main thread is there; an error that ends the worker leaves it there."""
        before, self.place = self.place, Place(step, action)
        try:
            yield
        except (PeerLost, EpochEnded):  # what others did: the training goes on from before
            self.place = before
            raise
        self.place = before
