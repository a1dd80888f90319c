"""A decision and its reason, as data: to be carried out, written to a log, or counted."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from megatron_bamboo.planner.plan import PipelinePlan


class Action(StrEnum):
    """What is done, the cheapest answers first."""

    STAY = "stay"  # nothing changes
    TAKE_OVER = "take over"  # shadows finish the iteration in their victims' places
    HEAL = "heal"  # standbys take the places of victims, lost replicas are made anew
    REBALANCE = "rebalance"  # the batch is shared out anew, from the next iteration on
    RECONFIGURE = "reconfigure"  # other pipelines, whose state comes from live holders
    RESTORE = "restore"  # all start from the last checkpoint
    WAIT = "wait"  # until more nodes have come


@dataclass(frozen=True, slots=True)
class Decision:
    """What is done, and which pipelines there are then."""

    action: Action
    pipelines: tuple[PipelinePlan, ...] = ()
    """Once it is done; none while waiting, and where nothing changes."""
    move_seconds: float = 0.0
    """In which state moves to its new holders."""
    in_background: bool = False
    """Whether training goes on while it moves, and the change comes between two steps."""
    saves: bool = False
    """Whether those who wait save a checkpoint first, since together they have all state."""


@dataclass(frozen=True, slots=True)
class Reason:
    """Why, in words, and the numbers that the decision was made from."""

    words: str
    numbers: Mapping[str, float]

    def __str__(self) -> str:
        if not self.numbers:
            return self.words
        listed = ", ".join(f"{name} {value:.6g}" for name, value in self.numbers.items())
        return f"{self.words} ({listed})"


Verdict = tuple[Decision, Reason]
