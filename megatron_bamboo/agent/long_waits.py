"""The long waits of which the coordinator has heard, by node.

A wait counts only when this coordinator has heard of it for the length of a lease, and lately: one
that has just come must give everybody the time to go on with what needed a coordinator.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_bamboo.membership.clock import PatientClock, boot_time
from megatron_bamboo.membership.waits import Wait

# Agents speak four times a lease; what was said before that may not be so any more.
_FRESH_PART = 0.5


@dataclass(frozen=True, slots=True)
class _Heard:
    first: float
    last: float
    wait: Wait


class LongWaits:
    """For whom the workers of all live nodes wait."""

    def __init__(self, lease_seconds: float, now: Callable[[], float] = boot_time) -> None:
        self._lease_seconds = lease_seconds
        self._clock = PatientClock(now)
        self._heard: dict[str, dict[str, _Heard]] = {}

    def hear(self, node: str, waits: Sequence[Wait]) -> None:
        """An agent has told all long waits of its workers."""
        now, before = self._clock.look(), self._heard.get(node, {})
        self._heard[node] = {
            wait.worker: _Heard(_since(before.get(wait.worker), wait, now), now, wait)
            for wait in waits
        }

    def forget(self, node: str) -> None:
        """A node is lost or has finished."""
        self._heard.pop(node, None)

    def clear(self) -> None:
        """Nobody waits any more."""
        self._heard.clear()

    def lasting(self) -> tuple[Wait, ...]:
        """The waits that go on and of which was heard for long enough."""
        now = self._clock.look()
        return tuple(
            heard.wait
            for waits in self._heard.values()
            for heard in waits.values()
            if heard.last - heard.first >= self._lease_seconds
            and now - heard.last < _FRESH_PART * self._lease_seconds
        )


def _since(before: _Heard | None, wait: Wait, now: float) -> float:
    return before.first if before is not None and before.wait.number == wait.number else now
