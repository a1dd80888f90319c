"""How the batch is shared out anew when pipelines do not keep pace with each other any more.

A pipeline that has lost a node works at the pace of whoever runs two stages now. With fewer
microbatches for it and more for the others the slowest takes less, and no state has to move: the
shares change between two steps. What an iteration takes is the least that any schedule does: the
first microbatch through all stages, and each other one through the busiest node.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_bamboo.planner.microbatches import Pace, split
from megatron_bamboo.planner.plan import PipelinePlan
from megatron_bamboo.schedule.redundancy import Redundancy
from megatron_bamboo.schedule.schedule import MAX_MICROBATCHES

PARTS = 3
"""A forward is one part of the work of a unit, its backward two."""


@dataclass(frozen=True, slots=True)
class Shares:
    """By pipeline its microbatches, and how long the slowest pipeline takes, in ticks."""

    numbers: tuple[int, ...]
    ticks: int

    def apply(self, pipelines: Sequence[PipelinePlan]) -> tuple[PipelinePlan, ...]:
        """The pipelines with these shares."""
        pairs = zip(pipelines, self.numbers, strict=True)
        return tuple(
            replace(pipe, shape=replace(pipe.shape, num_microbatches=number))
            for pipe, number in pairs
        )


@dataclass(frozen=True, slots=True)
class Rebalancing:
    """Shares that are better than those that there are."""

    before: Shares
    after: Shares

    @property
    def reason(self) -> str:
        """What changes, with the numbers that it was decided by."""
        old, new = (", ".join(map(str, shares.numbers)) for shares in (self.before, self.after))
        saved = 1 - self.after.ticks / self.before.ticks
        return f"microbatches {old} become {new}, with which an iteration takes {saved:.0%} less"

    def apply(self, pipelines: Sequence[PipelinePlan]) -> tuple[PipelinePlan, ...]:
        """The pipelines with these shares."""
        return self.after.apply(pipelines)


@dataclass(frozen=True, slots=True)
class Balance:
    """Compares shares of one model's batch."""

    works: tuple[int, ...]
    """By unit its forward and backward together, in ticks."""
    redundancy: Redundancy

    def better(self, pipelines: Sequence[PipelinePlan]) -> Rebalancing | None:
        """Shares with which the slowest pipeline takes less than it does; None if there are none.

        Where nothing is gained everything stays, so that nobody changes back and forth.
        """
        numbers = [pipeline.shape.num_microbatches for pipeline in pipelines]
        now, best = self._shares(pipelines, numbers), self.best(pipelines, sum(numbers))
        return Rebalancing(now, best) if best.ticks < now.ticks else None

    def best(self, pipelines: Sequence[PipelinePlan], num_microbatches: int) -> Shares:
        """The shares of so many with which the slowest pipeline takes least; a pipeline that is
        dissolved gets none."""
        parts = iter(split([self.pace(p) for p in pipelines if p.stages], num_microbatches))
        return self._shares(pipelines, [next(parts) if p.stages else 0 for p in pipelines])

    def can_share(self, pipelines: Sequence[PipelinePlan], num_microbatches: int) -> bool:
        """Whether pipelines can have so many, a part each; one that is dissolved gets none."""
        number = sum(bool(pipeline.stages) for pipeline in pipelines)
        return number <= num_microbatches <= number * MAX_MICROBATCHES

    def ticks(self, pipelines: Sequence[PipelinePlan]) -> int:
        """What the slowest pipeline takes with the shares that there are."""
        return self._shares(pipelines, [p.shape.num_microbatches for p in pipelines]).ticks

    def pace(self, pipeline: PipelinePlan) -> Pace:
        """What a pipeline's microbatches take on the nodes that run it."""
        loads: Counter[str] = Counter()
        for stage, node in enumerate(pipeline.stages):
            loads[node] += PARTS * self._work(pipeline, stage)
        through = sum(loads.values())
        if self.redundancy is Redundancy.EAGER:
            for stage, holder in enumerate(pipeline.replicas):
                if holder is not None:
                    loads[holder] += self._work(pipeline, stage)
        busiest = max(loads.values())
        return Pace(max(0, through - busiest), busiest, MAX_MICROBATCHES)

    def _work(self, pipeline: PipelinePlan, stage: int) -> int:
        return sum(sum(self.works[first:past]) for first, past in pipeline.shape.spans_of(stage))

    def _shares(self, pipelines: Sequence[PipelinePlan], numbers: Sequence[int]) -> Shares:
        pairs = zip(pipelines, numbers, strict=True)
        times = (self.pace(pipeline).time(n) for pipeline, n in pairs if pipeline.stages)
        return Shares(tuple(numbers), max(times))
