"""What a worker's main thread is at, for those who ask when it raises, hangs or is waited for.

How long it may be there follows from what it took before: five times the longest of its kind, and
never less than a lease. What has not been done before may have to be compiled; what is no action
(starting, saving, following a plan) may have waits of its own. A wait may last as long as others
work; once they have done their part, five times what such a wait usually took.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

from megatron_bamboo.execution.errors import EpochEnded, PeerLost
from megatron_bamboo.membership.place import DONE, START, Place
from megatron_bamboo.membership.restores import GoBack
from megatron_bamboo.membership.signs import SignPage
from megatron_bamboo.membership.waits import Waiting

_TIMES_LONGEST = 5.0
# Of so many waits of a kind the median is what one usually takes: a takeover prolongs single ones.
_WAITS_KEPT = 9
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
        self._waits: dict[object, deque[float]] = {}
        self._limit_seconds = limits.other_seconds
        self._waiting: Waiting | None = None
        self.place = Place(step, START)
        self._go(self.place, self._limit_seconds, None)

    @contextmanager
    def at(
        self,
        step: int,
        action: str,
        waits_for: str = "",
        kind: object = None,
        waiting: Waiting | None = None,
    ) -> Iterator[None]:
        """Within it the main thread is there; an error that ends the worker leaves it there.

        Args:
            waits_for: whoever has to act first, in words.
            kind: what its duration is compared with, None for nothing.
            waiting: the workers that have to act first, if there are any.
        """
        before = (self.place, self._limit_seconds, self._waiting)
        began, is_wait = self._now(), waiting is not None
        limit_seconds = self._limit_of_wait(kind) if is_wait else self._limit_of(kind)
        self._go(Place(step, action, waits_for), limit_seconds, waiting)
        try:
            yield
        except (PeerLost, EpochEnded, GoBack):  # what others did: the training goes on from before
            self._go(*before)
            raise
        if kind is not None:
            self._note(kind, self._now() - began, is_wait)
        self._go(*before)

    def must_end(self) -> bool:
        """Whether this worker's agent has asked it to end after its step."""
        return self._page is not None and self._page.must_end

    def done(self) -> None:
        """The training is over: whatever keeps this process from ending is no hang."""
        self._go(Place(self.place.step, DONE), self._limits.other_seconds, None)

    def _note(self, kind: object, seconds: float, is_wait: bool) -> None:
        if is_wait:
            self._waits.setdefault(kind, deque(maxlen=_WAITS_KEPT)).append(seconds)
        else:
            self._longest[kind] = max(seconds, self._longest.get(kind, 0.0))

    def _limit_of(self, kind: object) -> float:
        if kind is None:
            return self._limits.other_seconds
        longest = self._longest.get(kind)
        if longest is None:
            return self._limits.first_seconds
        return max(self._shortest_seconds, _TIMES_LONGEST * longest)

    def _limit_of_wait(self, kind: object) -> float:
        """Never more than for what is done first: others wait for this worker, too."""
        known = self._waits.get(kind)
        if not known:
            return self._limits.first_seconds
        usual = max(self._shortest_seconds, _TIMES_LONGEST * median(known))
        return min(self._limits.first_seconds, usual)

    @property
    def _shortest_seconds(self) -> float:
        return self._limits.lease_seconds + _AFTER_LEASE_SECONDS

    def _go(self, place: Place, limit_seconds: float, waiting: Waiting | None) -> None:
        self.place, self._limit_seconds, self._waiting = place, limit_seconds, waiting
        if self._page is not None:
            self._page.show(place, limit_seconds, waiting)
