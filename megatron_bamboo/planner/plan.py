"""The plan: who runs and who holds what, from one epoch on.

A plan is immutable data, published once under its epoch and read by everyone, so that all workers
agree without asking each other. What follows a loss is a pure function of the plan in force, the
nodes lost and the decision about the newest step.
"""

import json
from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from megatron_bamboo.membership.decision import StepDecision
from megatron_bamboo.membership.workers import worker_name


class NoHolder(Exception):
    """No live node holds a stage of a pipeline: it cannot go on without a checkpoint."""

    def __init__(self, pipeline: int, stage: int, holders: Sequence[str]) -> None:
        self.pipeline = pipeline
        self.stage = stage
        self.holders = tuple(holders)
        held = f"{holders[0]} was its only one"
        if len(holders) > 1:
            held = f"{' and '.join(holders)} are both lost"
        super().__init__(f"pipeline {pipeline}: stage {stage} has no live holder ({held})")


@dataclass(frozen=True, slots=True)
class PipelinePlan:
    """One pipeline: by stage the node that runs it and the node that holds its replica."""

    stages: tuple[str, ...]
    replicas: tuple[str | None, ...]
    ranks: tuple[str, ...]
    """The nodes as they started: a node's index here is its pipeline rank for its whole life."""

    def rank_of(self, node: str) -> int:
        """The pipeline rank of a node of this pipeline, dead or alive."""
        return self.ranks.index(node)

    def placement(self) -> tuple[int, ...]:
        """By stage the rank that runs it, as the schedule wants it."""
        return tuple(self.rank_of(node) for node in self.stages)

    def replica_ranks(self) -> tuple[int | None, ...]:
        """By stage the rank that holds its replica, as the schedule wants it."""
        return tuple(None if node is None else self.rank_of(node) for node in self.replicas)


@dataclass(frozen=True, slots=True)
class Plan:
    """Who runs and holds what from ``epoch`` on, and why it came to this."""

    epoch: int
    pipelines: tuple[PipelinePlan, ...]
    microbatches: tuple[int, ...]
    lost: tuple[str, ...]
    """The nodes lost in the change to this epoch, not those lost before."""
    decision: StepDecision | None
    reason: str

    @property
    def nodes(self) -> tuple[str, ...]:
        """The live nodes, pipeline by pipeline in rank order; each runs at least one stage."""
        return tuple(
            node for pipe in self.pipelines for node in pipe.ranks if node in set(pipe.stages)
        )

    def pipeline_of(self, node: str) -> int:
        """The pipeline that a node belongs to, dead or alive."""
        return next(i for i, pipe in enumerate(self.pipelines) if node in pipe.ranks)

    def for_tensor_rank(self, tensor_rank: int, tensor_size: int) -> "Plan":
        """The same plan among the workers of one tensor rank, by their names.

        They exchange messages and reduce gradients among themselves, so that to a worker its job
        looks like one of nodes with one worker each.
        """

        def name(node: str) -> str:
            return worker_name(node, tensor_rank, tensor_size)

        pipelines = tuple(
            PipelinePlan(
                stages=tuple(map(name, pipe.stages)),
                replicas=tuple(None if n is None else name(n) for n in pipe.replicas),
                ranks=tuple(map(name, pipe.ranks)),
            )
            for pipe in self.pipelines
        )
        return replace(self, pipelines=pipelines, lost=tuple(map(name, self.lost)))

    def to_json(self) -> str:
        """The value of ``plan/<epoch>``."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """The plan that ``to_json`` wrote."""
        values: dict[str, Any] = json.loads(text)
        decision = values.pop("decision")
        return cls(
            epoch=int(values.pop("epoch")),
            pipelines=tuple(_pipeline(fields) for fields in values.pop("pipelines")),
            microbatches=tuple(values.pop("microbatches")),
            lost=tuple(values.pop("lost")),
            decision=None if decision is None else StepDecision.from_fields(decision),
            **values,
        )


def initial_plan(
    nodes: Sequence[str], num_stages: int, microbatches_per_pipeline: int, redundancy: str
) -> Plan:
    """Plan 0: the nodes pipeline by pipeline, each stage's replica on its predecessor's node."""
    if len(nodes) % num_stages or not nodes:
        raise ValueError(
            f"{len(nodes)} nodes do not make whole pipelines of {num_stages} stages: "
            f"start a multiple of {num_stages}"
        )
    if len(set(nodes)) != len(nodes):
        raise ValueError(f"each node is named once, got {', '.join(nodes)}")
    pipelines = tuple(
        _initial_pipeline(tuple(nodes[first : first + num_stages]), redundancy)
        for first in range(0, len(nodes), num_stages)
    )
    microbatches = (microbatches_per_pipeline,) * len(pipelines)
    return Plan(0, pipelines, microbatches, lost=(), decision=None, reason="start")


def plan_after_loss(plan: Plan, lost: Set[str], decision: StepDecision | None) -> Plan:
    """The next epoch's plan: each lost node's stages run where their replicas are."""
    pipelines, moves = [], []
    for number, pipeline in enumerate(plan.pipelines):
        taken = [
            _taker(number, stage, pipeline, lost) if node in lost else node
            for stage, node in enumerate(pipeline.stages)
        ]
        moves += [
            f"{new} takes over stage {stage} of pipeline {number} from {old}"
            for stage, (old, new) in enumerate(zip(pipeline.stages, taken, strict=True))
            if old != new
        ]
        replicas = [
            None if pipeline.stages[stage] in lost or holder in lost else holder
            for stage, holder in enumerate(pipeline.replicas)
        ]
        pipelines.append(replace(pipeline, stages=tuple(taken), replicas=tuple(replicas)))
    return Plan(
        epoch=plan.epoch + 1,
        pipelines=tuple(pipelines),
        microbatches=plan.microbatches,
        lost=tuple(sorted(lost)),
        decision=decision,
        reason="; ".join(moves) or "no stage was lost",
    )


def _initial_pipeline(nodes: tuple[str, ...], redundancy: str) -> PipelinePlan:
    replicas: tuple[str | None, ...] = (None,) * len(nodes)
    if redundancy != "none" and len(nodes) > 1:
        replicas = tuple(nodes[stage - 1] for stage in range(len(nodes)))
    return PipelinePlan(stages=nodes, replicas=replicas, ranks=nodes)


def _taker(number: int, stage: int, pipeline: PipelinePlan, lost: Set[str]) -> str:
    holder = pipeline.replicas[stage]
    if holder is None:
        raise NoHolder(number, stage, [pipeline.stages[stage]])
    if holder in lost:
        raise NoHolder(number, stage, [pipeline.stages[stage], holder])
    return holder


def _pipeline(values: Mapping[str, Any]) -> PipelinePlan:
    return PipelinePlan(**{name: tuple(nodes) for name, nodes in values.items()})
