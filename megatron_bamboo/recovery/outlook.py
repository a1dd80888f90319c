"""Whether a change pays: what is expected until nodes are lost or come again.

Then everything is decided anew, so a change has to earn back by then what it costs. How long that
is is not known; what happened in the last hour says what to expect.
"""

from bisect import bisect_right
from dataclasses import dataclass

from megatron_bamboo.recovery.view import History

WINDOW_SECONDS = 3600.0
"""What is longer ago says little about now."""
ASSUMED_SECONDS = 600.0
"""A job that has seen nothing yet expects as if it had seen one event in so long."""

ROUNDING = 1e-9


def expected_seconds(history: History, now: float) -> float:
    """How long nothing will happen, by what happened lately."""
    first = max(history.began, now - WINDOW_SECONDS)
    number = len(history.moments) - bisect_right(history.moments, first)
    return (now - first + ASSUMED_SECONDS) / (number + 1)


@dataclass(frozen=True, slots=True)
class Weighing:
    """Iterations until the next event, as it is and with a change.

    Args:
        expected: seconds until the next event.
        before: seconds of an iteration as it is.
        after: seconds of an iteration once the change is made.
        moving: seconds until it is made, in which iterations take as long as before.
        pause: seconds in which there are none.
        undone: iterations that the next event undoes, as it is, each weighed by how likely it is.
        undone_then: the same with the change.
    """

    expected: float
    before: float
    after: float
    moving: float
    pause: float
    undone: float = 0.0
    undone_then: float = 0.0

    @property
    def unchanged(self) -> float:
        """Iterations without the change."""
        return self.expected / self.before - self.undone

    @property
    def changed(self) -> float:
        """Iterations with it."""
        as_before = min(self.moving, self.expected)
        left = self.expected - self.moving - self.pause
        return as_before / self.before + max(0.0, left) / self.after - self.undone_then

    @property
    def pays(self) -> bool:
        """Whether there are more with it, and not only by rounding."""
        return self.changed > self.unchanged + ROUNDING * abs(self.unchanged)
