"""Whose copy of the state is right, and who gives it to whom.

Copies of a unit equal each other bit for bit after every step. Where digests of them differ, most
are believed. With as many on either side nobody can say who is right: then the first one counts,
the primaries' before their replicas' and the first pipeline's before the others', so that all
choose the same. Where pipelines share the optimizer's state, a shard's copies are in one pipeline.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from enum import StrEnum

from megatron_bamboo.membership.workers import node_of
from megatron_bamboo.planner.arrangement import unit_names
from megatron_bamboo.planner.plan import PipelinePlan, Plan


class Kind(StrEnum):
    """What of a unit is compared by itself."""

    PARAMETERS = "parameters"
    OPTIMIZER = "optimizer state"


@dataclass(frozen=True, slots=True, order=True)
class Copy:
    """One holder's copy of something, by the holder's role: who that is the plan says."""

    unit: str
    tensor_rank: int
    kind: Kind
    pipeline: int
    is_replica: bool


@dataclass(frozen=True, slots=True)
class Difference:
    """A copy that is not what it must be."""

    copy: Copy
    stage: int
    worker: str
    """Who holds it."""
    agreeing: tuple[str, ...]
    """Who holds what counts."""
    is_certain: bool
    """Whether more copies say so than anything else."""

    def __str__(self) -> str:
        node, copy = node_of(self.worker), self.copy
        role = "replica" if copy.is_replica else "primary"
        part = f" (tensor rank {copy.tensor_rank})" if copy.tensor_rank else ""
        first, *others = map(node_of, self.agreeing)
        from_whom = f"{first} and {len(others)} more" if others else first
        verdict = (
            f"it gets what {from_whom} {'have' if others else 'has'}"
            if self.is_certain
            else f"nobody can say which is right, so it gets what {first} has, the first of them"
        )
        return (
            f"{copy.unit}{part} on {node}, {role} of stage {self.stage} in pipeline "
            f"{copy.pipeline}, differed in its {copy.kind} from {from_whom}: {verdict}"
        )


@dataclass(frozen=True, slots=True)
class Mend:
    """Holders of a unit get its state from one whose copy is right."""

    unit: str
    source: str | None
    """None where nobody is left who has it."""
    targets: tuple[str, ...]

    @property
    def members(self) -> tuple[str, ...]:
        """All who take part, the source first."""
        return self.targets if self.source is None else (self.source, *self.targets)


def find_differences(
    digests: Mapping[Copy, int], plan: Plan, shared: bool
) -> tuple[Difference, ...]:
    """The copies that differ from what counts, by unit.

    Args:
        plan: by which the copies had their holders.
        shared: the pipelines share the optimizer's state.
    """
    rivals: dict[tuple[object, ...], list[Copy]] = {}
    for copy in sorted(digests):
        apart = copy.pipeline if shared and copy.kind is Kind.OPTIMIZER else None
        rivals.setdefault((copy.unit, copy.tensor_rank, copy.kind, apart), []).append(copy)
    return tuple(
        difference for copies in rivals.values() for difference in _among(copies, digests, plan)
    )


def plan_mends(
    differences: Sequence[Difference], verified: Plan, now: Plan, shared: bool
) -> tuple[Mend, ...]:
    """Who gives the state of each unit that differs to whom, in the order of the units; all
    by one tensor rank's workers.

    Whoever holds such a unit now and was not found right gets it: a shadow that has taken it over
    too, and a worker that was given it in the very step in which they were compared.

    Args:
        verified: the plan by which the copies had their holders.
        now: the plan in force after the step.
        shared: the pipelines share the optimizer's state.
    """
    mends, found = [], {difference.copy.unit for difference in differences}
    for unit in filter(found.__contains__, unit_names(now.arrangement.num_units)):
        wrong = {d.worker for d in differences if d.copy.unit == unit}
        right = {worker for pipe in verified.pipelines for worker in _holders(pipe, unit)} - wrong
        by_pipeline = [_to_mend(now, number, unit) for number in range(len(now.pipelines))]
        groups = by_pipeline if shared else [sum(by_pipeline, ())]
        mends += [mend for holders in groups for mend in _mends(unit, holders, right)]
    return tuple(mends)


def _among(copies: Sequence[Copy], digests: Mapping[Copy, int], plan: Plan) -> Iterator[Difference]:
    """Of copies that must be equal, those that are not."""
    votes = Counter(digests[copy] for copy in copies)
    counting, most = votes.most_common(1)[0]  # of equally many the one that was met first
    is_certain = list(votes.values()).count(most) == 1
    agreeing = tuple(_holder(c, plan) for c in copies if digests[c] == counting)
    for copy in copies:
        if digests[copy] != counting:
            stage = plan.pipelines[copy.pipeline].shape.stage_of(copy.unit)
            yield Difference(copy, stage, _holder(copy, plan), agreeing, is_certain)


def _holder(copy: Copy, plan: Plan) -> str:
    pipeline = plan.pipelines[copy.pipeline]
    stage = pipeline.shape.stage_of(copy.unit)
    holder = pipeline.replicas[stage] if copy.is_replica else pipeline.stages[stage]
    assert holder is not None, f"{copy} has no holder in epoch {plan.epoch}"
    return holder


def _holders(pipeline: PipelinePlan, unit: str) -> tuple[str, ...]:
    if not pipeline.stages:  # it is dissolved
        return ()
    stage = pipeline.shape.stage_of(unit)
    pair = (pipeline.stages[stage], pipeline.replicas[stage])
    return tuple(worker for worker in pair if worker is not None)


def _to_mend(plan: Plan, number: int, unit: str) -> tuple[str, ...]:
    """The holders of a unit in a pipeline, but for those who are about to get all of its stage."""
    pipeline = plan.pipelines[number]
    holders = _holders(pipeline, unit)
    return tuple(
        worker
        for worker in holders
        if (number, pipeline.shape.stage_of(unit), worker) not in plan.lacking
    )


def _mends(unit: str, holders: Sequence[str], right: Set[str]) -> Iterator[Mend]:
    targets = tuple(worker for worker in holders if worker not in right)
    if targets:
        source = next((worker for worker in holders if worker in right), None)
        yield Mend(unit, source, targets)
