"""The plan: who runs and who holds what, from one epoch on.

A plan is immutable data, published once under its epoch and read by everyone, so that all workers
agree without asking each other. What follows a loss is a pure function of the plan in force, the
nodes lost and the decision about the newest step (``taking_over.py``).
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any, Self

from megatron_bamboo.membership.decision import StepDecision
from megatron_bamboo.membership.workers import worker_name
from megatron_bamboo.planner.arrangement import Arrangement, PipelineShape
from megatron_bamboo.planner.transfers import UnitTransfer


@dataclass(frozen=True, slots=True)
class PipelinePlan:
    """One pipeline: by stage the node that runs it and the node that holds its replica."""

    stages: tuple[str, ...]
    replicas: tuple[str | None, ...]
    ranks: tuple[str, ...]
    """By rank its node, dead or alive. Who joins in the place of a node that is there, or with a
    new cut, has one beyond these, until the change is made. A rank that has had no node since all
    began again has a name that no node can have."""
    shape: PipelineShape
    """What each stage holds, and how much work there is."""

    def rank_of(self, node: str) -> int:
        """The pipeline rank of a node of this pipeline, dead or alive."""
        return self.ranks.index(node)

    @property
    def begins(self) -> bool:
        """Whether it has its nodes, and gets its first microbatches with the next change."""
        return bool(self.stages) and self.shape.num_microbatches == 0

    def placement(self) -> tuple[int, ...]:
        """By stage the rank that runs it, as the schedule wants it."""
        return tuple(self.rank_of(node) for node in self.stages)

    def replica_ranks(self) -> tuple[int | None, ...]:
        """By stage the rank that holds its replica, as the schedule wants it."""
        return tuple(None if node is None else self.rank_of(node) for node in self.replicas)

    def with_joining(self, nodes: Iterable[str]) -> Self:
        """With a rank of its own for each of some nodes that has none."""
        new = tuple(node for node in nodes if node not in self.ranks)
        return replace(self, ranks=(*self.ranks, *new))

    @property
    def joining(self) -> tuple[str, ...]:
        """Those who join in the places of nodes that are still there, or with a new cut."""
        return self.ranks[len(self.stages) :]

    def without_joining(self) -> Self:
        """Without those who have not joined."""
        return replace(self, ranks=self.ranks[: len(self.stages)])

    def holders(self, stage: int) -> tuple[str, ...]:
        """The node that runs a stage, and the one that has its replica."""
        pair = (self.stages[stage], self.replicas[stage])
        return tuple(node for node in pair if node is not None)

    @classmethod
    def from_fields(cls, values: Mapping[str, Any]) -> Self:
        """The pipeline whose fields JSON has kept."""
        named = {name: tuple(values[name]) for name in ("stages", "replicas", "ranks")}
        return cls(**named, shape=PipelineShape.from_fields(values["shape"]))


@dataclass(frozen=True, slots=True)
class Transfer:
    """The state of one stage, which its primary sends to a node that holds it from then on."""

    pipeline: int
    """The target's; the source's may be another that is cut like it."""
    stage: int
    source: str
    target: str


@dataclass(frozen=True, slots=True)
class Change:
    """What moves during one step, and who runs and holds what once its commit has passed.

    State moves by making its new holder a replica first: between two steps it does not change, so
    a whole step long it can be sent, and the new holder takes part in that step's refresh and
    commit. A passed commit therefore proves that every new holder is in sync.
    """

    step: int
    transfers: tuple[Transfer, ...]
    pipelines: tuple[PipelinePlan, ...]
    moves: tuple[UnitTransfer, ...] = ()
    """The units that go from one node to another since pipelines are cut anew."""
    recut: tuple[int, ...] = ()
    """The numbers of these pipelines; a node of one may be in another of them afterwards."""

    @property
    def targets(self) -> frozenset[str]:
        """The nodes that are sent something."""
        moving = (move.target for move in self.moves)
        return frozenset({*(transfer.target for transfer in self.transfers), *moving})

    def is_made(self, decision: StepDecision | None) -> bool:
        """Whether a decision about the newest step says that this change's step was applied."""
        if decision is None:
            return False
        return decision.step > self.step or (decision.step == self.step and decision.applied)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A state of the whole model that can be read from disk, or made anew."""

    step: int
    """Of 0 it is what the seed gives."""
    folder: str | None = None
    """The folder of checkpoints that holds it; None where there is nothing to read."""

    def __str__(self) -> str:
        return f"step {self.step}" if self.folder is None else f"step {self.step} in {self.folder}"


@dataclass(frozen=True, slots=True)
class Hold:
    """A step that all save, and after which they wait for a plan that ends it."""

    step: int
    is_over: bool = False
    """Then only the save may still be under way."""

    def stops(self, step: int) -> bool:
        """Whether nobody goes on after a step."""
        return step == self.step and not self.is_over


@dataclass(frozen=True, slots=True)
class Plan:
    """Who runs and holds what from ``epoch`` on, and why it came to this."""

    epoch: int
    pipelines: tuple[PipelinePlan, ...]
    lost: tuple[str, ...]
    """The nodes lost in the change to this epoch, not those lost before."""
    decision: StepDecision | None
    reason: str
    change: Change | None = None
    """A planned change, in a step of this epoch; None too once it is made."""
    redone: int | None = None
    """The step that is begun anew in this epoch, since a pipeline has been dissolved or repaired;
    None where what was done stays done."""
    redoing: tuple[int, ...] = ()
    """The pipelines that begin it anew; the others go on with what they have done of it."""
    dismissed: tuple[str, ...] = ()
    """The live nodes of such a pipeline, which are in no place from this epoch on."""
    restored: Checkpoint | None = None
    """The state from which all begin again in this epoch, in new pipelines: whatever came after it
    counts no more. None where the epoch goes on from what live nodes hold."""
    hold: Hold | None = None
    """After which step all wait for nodes."""

    @property
    def nodes(self) -> tuple[str, ...]:
        """The live nodes, pipeline by pipeline in rank order; each runs a stage, or will."""
        joining = frozenset[str]() if self.change is None else self.change.targets
        return tuple(
            node
            for pipe in self.pipelines
            for node in pipe.ranks
            if node in pipe.stages or node in joining
        )

    @property
    def let_go(self) -> tuple[str, ...]:
        """The live nodes that are in no place any more once the planned change is made."""
        if self.change is None:
            return ()
        kept = {node for pipeline in self.change.pipelines for node in pipeline.stages}
        return tuple(node for node in self.nodes if node not in kept)

    def freed(self, decision: StepDecision | None) -> tuple[str, ...]:
        """The nodes that a decision has let go: those of a change that is made."""
        return self.let_go if self.is_changed(decision) else ()

    def is_changed(self, decision: StepDecision | None) -> bool:
        """Whether a change was planned and is made by the end of the epoch."""
        return self.change is not None and self.change.is_made(decision)

    @property
    def lacking(self) -> frozenset[tuple[int, int, str]]:
        """Pipeline, stage and node where a node has a place already and gets the state only in the
        step of the change."""
        moves = () if self.change is None else self.change.transfers
        return frozenset(
            (t.pipeline, t.stage, t.target)
            for t in moves
            if self.pipelines[t.pipeline].stages
            and t.target in self.pipelines[t.pipeline].holders(t.stage)
        )

    @property
    def arrangement(self) -> Arrangement:
        """What the pipelines are, whoever runs them."""
        return Arrangement(tuple(pipeline.shape for pipeline in self.pipelines))

    @property
    def reporter(self) -> str:
        """The node whose word about a step is the first to be written."""
        pipeline = self.pipelines[self.first_pipeline]
        return next(node for node in pipeline.ranks if node in pipeline.stages)

    @property
    def first_pipeline(self) -> int:
        """The number of the first one that has microbatches."""
        numbers = enumerate(self.arrangement.microbatches)
        return next(number for number, microbatches in numbers if microbatches)

    def made(self) -> "Plan":
        """The plan once its change's step has passed."""
        assert self.change is not None, f"epoch {self.epoch} changes nothing"
        return replace(self, pipelines=self.change.pipelines, change=None)

    def after(self, decision: StepDecision | None) -> "Plan":
        """What has become of this plan's change by the end of the epoch: made, or nothing."""
        if self.change is None:
            return self
        if self.is_changed(decision):
            return self.made()
        pipelines = tuple(pipeline.without_joining() for pipeline in self.pipelines)
        return replace(self, pipelines=pipelines, change=None)

    def pipeline_of(self, node: str) -> int:
        """The pipeline that a node belongs to, dead or alive."""
        return next(i for i, pipe in enumerate(self.pipelines) if node in pipe.ranks)

    def pipeline_after(self, node: str) -> int:
        """The pipeline that a live node belongs to once the planned change is made."""
        later = () if self.change is None else self.change.pipelines
        numbers = (number for number, pipe in enumerate(later) if node in pipe.stages)
        return next(numbers, self.pipeline_of(node))

    def for_tensor_rank(self, tensor_rank: int, tensor_size: int) -> "Plan":
        """The same plan among the workers of one tensor rank, by their names.

        They exchange messages and reduce gradients among themselves, so that to a worker its job
        looks like one of nodes with one worker each.
        """

        def name(node: str) -> str:
            return worker_name(node, tensor_rank, tensor_size)

        def named(pipe: PipelinePlan) -> PipelinePlan:
            return replace(
                pipe,
                stages=tuple(map(name, pipe.stages)),
                replicas=tuple(None if n is None else name(n) for n in pipe.replicas),
                ranks=tuple(map(name, pipe.ranks)),
            )

        change = self.change
        if change is not None:
            change = replace(
                change,
                transfers=tuple(
                    replace(t, source=name(t.source), target=name(t.target))
                    for t in change.transfers
                ),
                moves=tuple(
                    replace(m, source=name(m.source), target=name(m.target)) for m in change.moves
                ),
                pipelines=tuple(map(named, change.pipelines)),
            )
        return replace(
            self,
            pipelines=tuple(map(named, self.pipelines)),
            lost=tuple(map(name, self.lost)),
            change=change,
            dismissed=tuple(map(name, self.dismissed)),
        )

    def to_json(self) -> str:
        """The value of ``plan/<epoch>``."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """The plan that ``to_json`` wrote."""
        values: dict[str, Any] = json.loads(text)
        decision = values.pop("decision")
        change = values.pop("change")
        restored, hold = values.pop("restored"), values.pop("hold")
        return cls(
            epoch=int(values.pop("epoch")),
            pipelines=tuple(map(PipelinePlan.from_fields, values.pop("pipelines"))),
            lost=tuple(values.pop("lost")),
            redoing=tuple(values.pop("redoing")),
            dismissed=tuple(values.pop("dismissed")),
            decision=None if decision is None else StepDecision.from_fields(decision),
            change=None if change is None else _change(change),
            restored=None if restored is None else Checkpoint(**restored),
            hold=None if hold is None else Hold(**hold),
            **values,
        )


def plan_digest(published: bytes) -> str:
    """What tells a published plan from every other, in a log."""
    return hashlib.blake2b(published, digest_size=8).hexdigest()


def initial_plan(nodes: Sequence[str], arrangement: Arrangement, redundancy: str) -> Plan:
    """Plan 0: the nodes pipeline by pipeline, each stage's replica on its predecessor's node."""
    if len(nodes) != arrangement.num_nodes:
        sizes = [pipeline.num_stages for pipeline in arrangement.pipelines]
        raise ValueError(
            f"{len(nodes)} nodes do not make whole pipelines of {' and '.join(map(str, sizes))} "
            f"stages: start {arrangement.num_nodes}"
        )
    if len(set(nodes)) != len(nodes):
        raise ValueError(f"each node is named once, got {', '.join(nodes)}")
    left = iter(nodes)
    pipelines = tuple(
        _initial_pipeline(tuple(islice(left, shape.num_stages)), shape, redundancy)
        for shape in arrangement.pipelines
    )
    return Plan(0, pipelines, lost=(), decision=None, reason="start")


def dissolved(pipeline: PipelinePlan) -> PipelinePlan:
    """A pipeline without nodes and microbatches, of which the number and the cut are kept."""
    return PipelinePlan((), (), (), replace(pipeline.shape, num_microbatches=0))


def _initial_pipeline(
    nodes: tuple[str, ...], shape: PipelineShape, redundancy: str
) -> PipelinePlan:
    replicas: tuple[str | None, ...] = (None,) * len(nodes)
    if redundancy != "none" and len(nodes) > 1:
        replicas = tuple(nodes[stage - 1] for stage in range(len(nodes)))
    return PipelinePlan(stages=nodes, replicas=replicas, ranks=nodes, shape=shape)


def _change(values: Mapping[str, Any]) -> Change:
    return Change(
        step=int(values["step"]),
        transfers=tuple(Transfer(**fields) for fields in values["transfers"]),
        pipelines=tuple(map(PipelinePlan.from_fields, values["pipelines"])),
        moves=tuple(UnitTransfer(**fields) for fields in values["moves"]),
        recut=tuple(values["recut"]),
    )
