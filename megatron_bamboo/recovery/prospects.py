"""Which pipelines the live nodes could be, how fast they would be, and what would have to move.

Two ways lead to other pipelines: Oobleck's rules, by which no node changes its pipeline that need
not, and the fastest arrangement of so many nodes whatever there is now. Who gets which place, and
who sends what, is the planner's answer in both.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from megatron_bamboo.planner.arrangement import Arrangement, PipelineShape
from megatron_bamboo.planner.healing import transfers_between
from megatron_bamboo.planner.holders import held_by
from megatron_bamboo.planner.infeasible import Infeasible, Request
from megatron_bamboo.planner.microbatches import split
from megatron_bamboo.planner.new_cut import crew_of
from megatron_bamboo.planner.placement import Holdings, place_nodes
from megatron_bamboo.planner.places import Place
from megatron_bamboo.planner.plan import PipelinePlan, Plan, initial_plan
from megatron_bamboo.planner.propose import Planner
from megatron_bamboo.planner.reconfigure import Reconfiguration, reconfigure
from megatron_bamboo.planner.regroup import PipelineNodes, Sizes
from megatron_bamboo.planner.transfers import Links, UnitTransfer, plan_transfers
from megatron_bamboo.recovery.outlook import Weighing
from megatron_bamboo.recovery.prices import Prices
from megatron_bamboo.recovery.times import IterationTimes
from megatron_bamboo.recovery.view import View
from megatron_bamboo.schedule.redundancy import Redundancy


@dataclass(frozen=True, slots=True)
class Prospect:
    """Pipelines as they could be."""

    pipelines: tuple[PipelinePlan, ...]
    iteration_seconds: float
    moved_bytes: int
    move_seconds: float
    """Until the busiest link, sending or receiving, has carried its part."""
    why: str
    """How it comes to these pipelines."""


def numbers_of(prospect: Prospect, weighing: Weighing | None = None) -> dict[str, float]:
    """What a reason says of a prospect, and of what it was weighed with."""
    numbers: dict[str, float] = {
        "iteration_seconds_then": prospect.iteration_seconds,
        "moved_bytes": prospect.moved_bytes,
        "move_seconds": prospect.move_seconds,
    }
    if weighing is None:
        return numbers
    return numbers | {
        "iteration_seconds": weighing.before,
        "expected_seconds": weighing.expected,
        "pause_seconds": weighing.pause,
        "iterations": weighing.unchanged,
        "iterations_then": weighing.changed,
    }


class Prospects:
    """What there is to choose from, for one model and batch.

    Args:
        planner: of the model; its costs have bytes.
        fault_tolerance: so many pipelines more than one, where there are nodes for it.
        redundancy: whether stages have replicas in new pipelines.

    Raises:
        ValueError: the costs have no bytes.
    """

    def __init__(
        self,
        planner: Planner,
        times: IterationTimes,
        prices: Prices,
        num_microbatches: int,
        fault_tolerance: int,
        redundancy: Redundancy,
    ) -> None:
        sizes = [unit.bytes for unit in planner.costs.units if unit.bytes is not None]
        if not planner.costs.has_bytes:
            raise ValueError("it is not known how many bytes of state the units have")
        self.times = times
        self.works = planner.costs.works().ticks
        self._unit_bytes = {number: size.state for number, size in enumerate(sizes)}
        self._planner = planner
        self._prices = prices
        self._num_microbatches = num_microbatches
        self._fault_tolerance = fault_tolerance
        self._redundancy = redundancy
        self._arrange = cache(self._fastest)

    def afresh(self, nodes: Sequence[str]) -> Prospect | None:
        """The fastest pipelines of nodes that load a checkpoint; None if there are too few."""
        arrangement = self._arrange(len(nodes))
        if arrangement is None:
            return None
        pipelines = self._put(arrangement, nodes[: arrangement.num_nodes])
        why = f"the fastest pipelines of {len(nodes)} nodes"
        return Prospect(pipelines, self.times.of(pipelines), 0, 0.0, why)

    def fastest(self, view: View) -> Prospect | None:
        """The fastest pipelines of all live nodes, from the state that they hold; None if there
        are none or some state has no live holder."""
        arrangement = self._arrange(len(view.nodes))
        if arrangement is None:
            return None
        return self._move(view, arrangement, {}, f"the fastest of {len(view.nodes)} nodes")

    def by_rules(self, view: View) -> Prospect | None:
        """What Oobleck's rules make of the pipelines; None as above."""
        assert view.plan is not None
        templates = self._sizes(len(view.nodes))
        if templates is None:
            return None
        old = tuple(map(_nodes_of, view.plan.pipelines))
        found = reconfigure(old, templates, view.lost, view.standbys)
        arrangement = self._cut(found) if found.pipelines else None
        if arrangement is None:
            return None
        why = "; ".join(applied.reason for applied in found.applied) or "no rule applies"
        return self._move(view, arrangement, found.stay(old), why)

    def healed(self, before: Plan, pipelines: tuple[PipelinePlan, ...], why: str) -> Prospect:
        """Pipelines whose stages have got other holders, cut as they were."""
        moves = [
            UnitTransfer(unit, transfer.source, transfer.target)
            for number, pair in enumerate(zip(before.pipelines, pipelines, strict=True))
            for transfer in transfers_between(number, *pair)
            for span in pair[0].shape.spans_of(transfer.stage)
            for unit in range(*span)
        ]
        return self._prospect(pipelines, moves, why)

    def _move(
        self, view: View, arrangement: Arrangement, stay: Mapping[str, Place], why: str
    ) -> Prospect | None:
        assert view.plan is not None
        alive = set(view.survivors)
        held = {
            node: units for node, units in held_by(view.plan.pipelines).items() if node in alive
        }
        holdings = Holdings(held, self._unit_bytes, stay=stay)
        placement = place_nodes(arrangement, view.nodes, holdings)
        placed = [node for pipeline in placement.pipelines for node in pipeline]
        pipelines = self._put(arrangement, placed)
        needed = held_by(pipelines)
        moves = plan_transfers(needed, held, Links(self._unit_bytes))
        if moves.lost_units:
            return None
        return self._prospect(pipelines, moves.transfers, why)

    def _prospect(
        self, pipelines: tuple[PipelinePlan, ...], moves: Sequence[UnitTransfer], why: str
    ) -> Prospect:
        loads: Counter[tuple[str, str]] = Counter()
        for move in moves:
            loads["from", move.source] += self._unit_bytes[move.unit]
            loads["to", move.target] += self._unit_bytes[move.unit]
        total = sum(self._unit_bytes[move.unit] for move in moves)
        seconds = max(loads.values(), default=0) / self._prices.bandwidth
        return Prospect(pipelines, self.times.of(pipelines), total, seconds, why)

    def _put(self, arrangement: Arrangement, nodes: Sequence[str]) -> tuple[PipelinePlan, ...]:
        return initial_plan(nodes, arrangement, self._redundancy).pipelines

    def _fastest(self, num_nodes: int) -> Arrangement | None:
        """The fastest arrangement of so many nodes: with less fault tolerance rather than with
        fewer nodes, which wait then."""
        for used in range(num_nodes, 0, -1):
            for fault_tolerance in range(self._fault_tolerance, -1, -1):
                request = Request(used, fault_tolerance, self._num_microbatches)
                try:
                    return self._planner.propose(request)[0].arrangement
                except Infeasible:
                    continue
        return None

    def _sizes(self, num_nodes: int) -> Sizes | None:
        """The numbers of nodes that a pipeline can have."""
        if not num_nodes:
            return None
        request = Request(num_nodes, 0, self._num_microbatches)
        try:
            made = self._planner.templates(request)
        except Infeasible:
            return None
        return Sizes(min(made), max(made), self._fault_tolerance)

    def _cut(self, found: Reconfiguration) -> Arrangement | None:
        """The regrouped pipelines with the templates' stages and their shares of the batch; None
        if memory has no room for it, or there are not so many microbatches."""
        num_nodes = sum(len(pipeline.nodes) for pipeline in found.pipelines)
        made = self._planner.templates(Request(num_nodes, 0, self._num_microbatches))
        if not {pipeline.num_stages for pipeline in found.pipelines} <= made.keys():
            return None
        templates = [made[pipeline.num_stages] for pipeline in found.pipelines]
        try:
            shares = split([t.pace for t in templates], self._num_microbatches)
        except ValueError:
            return None
        pairs = zip(templates, shares, strict=True)
        return Arrangement(tuple(PipelineShape(t.cut.spans, share) for t, share in pairs))


def _nodes_of(pipeline: PipelinePlan) -> PipelineNodes:
    """The nodes that run a pipeline, in the order of their stages."""
    return PipelineNodes(crew_of(pipeline), pipeline.shape.num_stages)
