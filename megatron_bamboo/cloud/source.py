"""What every source of notices can do, whichever cloud is behind it."""

from dataclasses import dataclass
from typing import Protocol

from megatron_bamboo.membership.leaving import Notice


@dataclass(frozen=True, slots=True)
class Word:
    """What a source says now."""

    notice: Notice | None = None
    """That this machine is to be taken; None if nobody says so, or not any more."""
    hint: str = ""
    """What may come to that, or concerns the machine and does not take it."""


NOTHING = Word()


class Source(Protocol):
    """Who knows whether this machine is to be taken."""

    name: str
    look_seconds: float
    """How often it is to be asked."""

    def look(self) -> Word:
        """Ask it; every call has a deadline.

        Raises:
            NoAnswer: it is not there, or too slow.
            BadAnswer: it says what this kind of source does not say.
        """

    def acknowledge(self) -> None:
        """Say that the machine may be taken now, where somebody wants to know; errors as above."""
