"""Lines of a command that waits: what for and why, once it has lasted, and again at other reasons.

Whoever has made a mistake that others could still mend sees it soon, and a wait that is over at
once says nothing.
"""

import time
from collections.abc import Callable

SILENT_SECONDS = 3.0

Say = Callable[[str], None]


class WaitLines:
    """Says what is waited for.

    Args:
        say: takes a line.
    """

    def __init__(self, say: Say, now: Callable[[], float] = time.monotonic) -> None:
        self._say = say
        self._now = now
        self._what = self._said = ""
        self._since = 0.0

    def waits(self, what: str, why: str) -> None:
        """To be called again and again while something is waited for."""
        now = self._now()
        if what != self._what:
            self._what, self._since = what, now
        if why != self._said and now - self._since >= SILENT_SECONDS:
            self._said = why
            self._say(f"waits for {what}: {why}")
