"""What a worker's main thread is at, for those who ask when it raises, hangs or is waited for.

How long it may be there follows from what it took before: five times the longest of its kind, and
never less than a lease. What has not been done before may have to be compiled; what is no action
(starting, saving, following a plan) may have waits of its own.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from megatron_bamboo.execution.errors import EpochEnded, PeerLost
from megatron_bamboo.membership.place import DONE, START, Place
from megatron_bamboo.membership.signs import SignPage

_TIMES_LONGEST = 5.0
# Workers that share layers wait for each other inside of an action: one that does not run is found
# before the others count as stuck.
_AFTER_LEASE_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Limits:
    """How long a main thread may be in one place."""

    lease_seconds: float
    first_seconds: float
    """In an action of a kind that was not done before. It must be over before those who wait for
    this worker give up, and they may have waited for others already."""
    other_seconds: float
    """In what is no action."""


class Whereabouts:
    """The place of one worker's main thread; only that thread may change it."""

    def __init__(
        self,
        step: int,
        limits: Limits,
        page: SignPage | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits = limits
        self._now = now
        self._page = page
        self._longest: dict[object, float] = {}
        self._limit_seconds = limits.other_seconds
        self.place = Place(step, START)
        self._go(self.place, self._limit_seconds)

    @contextmanager
    def at(
        self, step: int, action: str, waits_for: str = "", kind: object = None
    ) -> Iterator[None]:
        """Within it the main thread is there; an error that ends the worker leaves it there.

        Args:
            waits_for: whoever has to act first.
            kind: what its duration is compared with, None for nothing.
        """
        before, limit_before, began = self.place, self._limit_seconds, self._now()
        self._go(Place(step, action, waits_for), self._limit_of(kind))
        try:
            yield
        except (PeerLost, EpochEnded):  # what others did: the training goes on from before
            self._go(before, limit_before)
            raise
        if kind is not None:
            seconds = self._now() - began
            self._longest[kind] = max(seconds, self._longest.get(kind, 0.0))
        self._go(before, limit_before)

    def done(self) -> None:
        """The training is over: whatever keeps this process from ending is no hang."""
        self._go(Place(self.place.step, DONE), self._limits.other_seconds)

    def _limit_of(self, kind: object) -> float:
        if kind is None:
            return self._limits.other_seconds
        longest = self._longest.get(kind)
        if longest is None:
            return self._limits.first_seconds
        shortest = self._limits.lease_seconds + _AFTER_LEASE_SECONDS
        return max(shortest, _TIMES_LONGEST * longest)

    def _go(self, place: Place, limit_seconds: float) -> None:
        self.place, self._limit_seconds = place, limit_seconds
        if self._page is not None:
            self._page.show(place, limit_seconds)
