"""A clock for judging the silence of others."""

import time
from collections.abc import Callable

LONGEST_GAP_SECONDS = 0.5


def boot_time() -> float:
    """Seconds since the machine was started, also those in which it was suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class PatientClock:
    """The seconds in which this process could hear others.

    Whoever was stopped itself, or got no processor, has not listened: what others said meanwhile
    is still to be read. So a gap between two looks counts for little, however long it was.
    """

    def __init__(self, now: Callable[[], float] = boot_time) -> None:
        self._now = now
        self._last = now()
        self.seconds = 0.0

    def look(self) -> float:
        """Let the time since the last look count; look more often than the longest gap."""
        now = self._now()
        self.seconds += min(now - self._last, LONGEST_GAP_SECONDS)
        self._last = now
        return self.seconds
