"""What is said of those who were turned away: a line for each address, and few lines for many.

A flood must not fill the log's disk either, nor the memory in which it is remembered who was named.
"""

import time
from collections import deque
from collections.abc import Callable

LINE_SECONDS = 60.0
"""How often an address is named."""
MOST_LINES = 30
"""Lines in that time, whatever the number of addresses."""
MOST_ADDRESSES = 1024
_LONGEST_REASON = 200


class Strangers:
    """Counts them all and names some.

    Args:
        say: takes a line.
    """

    def __init__(
        self, say: Callable[[str], None], now: Callable[[], float] = time.monotonic
    ) -> None:
        self._say = say
        self._now = now
        self._named: dict[str, float] = {}
        self._unnamed: dict[str, int] = {}
        self._lines: deque[float] = deque(maxlen=MOST_LINES)
        self.number = 0

    def turned_away(self, address: str, why: str) -> None:
        """Say it, unless enough was said."""
        self.number += 1
        now = self._now()
        named = self._named.get(address, now - LINE_SECONDS)
        is_full = len(self._lines) == MOST_LINES and self._lines[0] > now - LINE_SECONDS
        if named > now - LINE_SECONDS or is_full:
            self._unnamed[address] = self._unnamed.pop(address, 0) + 1
            _forget(self._unnamed)
            return
        before = self._unnamed.pop(address, 0)
        more = f" ({before} more since it was last named)" if before else ""
        self._named.pop(address, None)
        self._named[address] = now
        _forget(self._named)
        self._lines.append(now)
        # What a stranger has sent is part of the reason: in one line, and not too long.
        self._say(f"turned away {address}: {why[:_LONGEST_REASON]!a}{more}")


def _forget(addresses: dict[str, float] | dict[str, int]) -> None:
    """Keep those that came last."""
    while len(addresses) > MOST_ADDRESSES:
        del addresses[next(iter(addresses))]
