"""Which pipelines are to be cut anew, and for whom."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from megatron_bamboo.planner.plan import PipelinePlan, Plan

FEWEST_STAGES = 2
"""A pipeline of one stage has no shadows, and keeps a tied weight once and not twice."""


@dataclass(frozen=True, slots=True)
class NewCut:
    """The pipelines that are cut anew together, and who is in each of them then.

    Nodes of several may be exchanged where fewer bytes move then. One that is left without nodes is
    dissolved; one that is dissolved begins again.
    """

    crews: tuple[tuple[int, tuple[str, ...]], ...]
    """Pipelines' numbers and their nodes."""

    @classmethod
    def of(cls, plan: Plan, number: int, joining: Sequence[str] = ()) -> Self:
        """One pipeline, with the nodes that it has and some that have no place."""
        return cls(((number, (*crew_of(plan.pipelines[number]), *joining)),))

    @property
    def numbers(self) -> tuple[int, ...]:
        """The pipelines'."""
        return tuple(number for number, _ in self.crews)


def crew_of(pipeline: PipelinePlan) -> tuple[str, ...]:
    """The nodes that run a pipeline, in the order of their stages."""
    return tuple(dict.fromkeys(pipeline.stages))
