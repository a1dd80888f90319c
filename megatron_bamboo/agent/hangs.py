"""Whether a worker hangs, by the signs that it shows: a judgement on values alone.

A worker hangs if it cannot run at all for the length of a lease (it was stopped or frozen), or if
its main thread stays where it is for longer than that may take, while it waits for nobody: then
the one that it waits for is to blame. All times are the agent's own, from its own looking.
"""

from dataclasses import dataclass

from megatron_bamboo.membership.place import DONE
from megatron_bamboo.membership.signs import Signs
from megatron_bamboo.membership.waits import Wait

# A process that was busy for so much of the time has run, though a thread kept the others from it.
_BUSY_PART = 0.1


@dataclass(slots=True)
class _Seen:
    signs: Signs
    beat_at: float
    busy_seconds: float
    place_at: float
    now: float


class HangJudge:
    """The judgement of one worker."""

    def __init__(self, lease_seconds: float) -> None:
        self._lease_seconds = lease_seconds
        self._seen: _Seen | None = None

    @property
    def place(self) -> str:
        """Where the worker was seen last; nothing while it is not there yet."""
        return str(self._seen.signs.place) if self._seen else ""

    def wait(self, worker: str) -> Wait | None:
        """What the worker waited for when it was looked at last; None where it did not."""
        if self._seen is None or self._seen.signs.waiting is None:
            return None
        signs, seconds = self._seen.signs, self._seen.now - self._seen.place_at
        place, waiting = signs.place, signs.waiting
        assert waiting is not None
        return Wait(
            worker, signs.number, place.step, place.action, waiting, seconds, signs.limit_seconds
        )

    def look(self, signs: Signs | None, busy_seconds: float, now: float) -> str | None:
        """Why the worker hangs; None if it does not.

        Args:
            signs: what it shows now; None tells nothing.
            busy_seconds: the processor time that it has used.
            now: the agent's clock.
        """
        seen = self._seen
        if signs is None:
            return None
        if seen is None:
            self._seen = _Seen(signs, now, busy_seconds, now, now)
            return None
        if signs.beat != seen.signs.beat:
            seen.beat_at, seen.busy_seconds = now, busy_seconds
        if signs.number != seen.signs.number:
            seen.place_at = now
        seen.signs, seen.now = signs, now
        return self._verdict(seen, busy_seconds, now)

    def _verdict(self, seen: _Seen, busy_seconds: float, now: float) -> str | None:
        place, silent, stuck = seen.signs.place, now - seen.beat_at, now - seen.place_at
        is_busy = busy_seconds - seen.busy_seconds > _BUSY_PART * silent
        if place.action == DONE:
            return None
        if silent > self._lease_seconds and not is_busy:
            return f"its worker did not run for {silent:.1f} s, in {place}"
        if stuck > seen.signs.limit_seconds and not place.waits_for:
            return f"its worker was stuck for {stuck:.1f} s in {place}"
        return None
