"""How long an iteration takes, whoever runs its stages, and how much longer a takeover makes it.

It is what the schedule itself says, simulated with the model's costs: of whole pipelines as the
planner has it, of those with a node that runs several stages as the runtime orders their work.
"""

from collections.abc import Set
from functools import cache

from megatron_bamboo.planner.layers import UnitCosts
from megatron_bamboo.planner.makespan import one_f_one_b_seconds
from megatron_bamboo.planner.plan import PipelinePlan
from megatron_bamboo.schedule.costs import Costs
from megatron_bamboo.schedule.generate import compute_schedule
from megatron_bamboo.schedule.redundancy import Redundancy
from megatron_bamboo.schedule.rehearse import loss_at, rehearse
from megatron_bamboo.schedule.schedule import Schedule
from megatron_bamboo.schedule.simulate import simulate
from megatron_bamboo.schedule.steady import steady_schedule

PerChunk = tuple[tuple[float, ...], ...]
"""By stage and chunk."""
MOMENTS = 8
"""Of an iteration, at which a loss is looked at: any other counts as the one before it."""


class IterationTimes:
    """The times of one model's iterations; each is worked out once."""

    def __init__(self, costs: UnitCosts) -> None:
        self._units = costs.units
        self._newest: tuple[tuple[PipelinePlan, ...], float] | None = None
        self._pipeline_seconds = cache(self._simulate)
        self._end_after_loss = cache(self._rehearse)

    def of(self, pipelines: tuple[PipelinePlan, ...]) -> float:
        """What an iteration takes: its slowest pipeline; one that is dissolved does nothing."""
        # Asked after each step of the same plan.
        if self._newest is None or self._newest[0] is not pipelines:
            running = (_anonymous(pipeline) for pipeline in pipelines if pipeline.stages)
            self._newest = pipelines, max(map(self._pipeline_seconds, running))
        return self._newest[1]

    def stretch(self, pipelines: tuple[PipelinePlan, ...], lost: Set[str], elapsed: float) -> float:
        """How much longer the iteration takes in which shadows take over, no pause being counted.

        Of several losses in one pipeline each is taken to cost what it would alone.

        Args:
            elapsed: seconds of the iteration that were over.
        """
        whole = self.of(pipelines)
        moment = int(MOMENTS * min(elapsed / whole, 1.0))
        end = whole
        for pipeline in pipelines:
            if not lost & set(pipeline.stages):
                continue
            hit = _anonymous(pipeline)
            own = self._pipeline_seconds(hit)
            ends = [
                self._end_after_loss(hit, pipeline.rank_of(node), whole * moment / MOMENTS)
                for node in sorted(lost & set(pipeline.stages))
            ]
            end = max(end, own + sum(after - own for after in ends))
        return end - whole

    def _simulate(self, pipeline: PipelinePlan) -> float:
        shape = pipeline.shape
        is_whole = pipeline.placement() == tuple(range(shape.num_stages))
        forwards, backwards = self._seconds(pipeline)
        if is_whole and shape.num_chunks == 1:
            alone = [stage[0] for stage in forwards], [stage[0] for stage in backwards]
            return one_f_one_b_seconds(*alone, shape.num_microbatches)
        costs = Costs(forwards, backwards)
        return simulate(_schedule(pipeline, costs), costs).makespan

    def _rehearse(self, pipeline: PipelinePlan, rank: int, time: float) -> float:
        """When a pipeline's iteration ends after the loss of a rank."""
        costs = Costs(*self._seconds(pipeline))
        schedule = _schedule(pipeline, costs)
        loss = loss_at(simulate(schedule, costs), rank, time)
        return rehearse(schedule, costs, loss).timeline.makespan

    def _seconds(self, pipeline: PipelinePlan) -> tuple[PerChunk, PerChunk]:
        """Of each chunk of each stage its forward, and its backward."""
        shape = pipeline.shape
        chunks = [
            [self._units[first:past] for first, past in shape.spans_of(stage)]
            for stage in range(shape.num_stages)
        ]
        return (
            tuple(tuple(sum(unit.forward for unit in c) for c in stage) for stage in chunks),
            tuple(tuple(sum(unit.backward for unit in c) for c in stage) for stage in chunks),
        )


def _schedule(pipeline: PipelinePlan, costs: Costs) -> Schedule:
    shape = pipeline.shape
    compute = compute_schedule(shape.num_stages, shape.num_chunks, shape.num_microbatches)
    placed = pipeline.placement(), pipeline.replica_ranks()
    return steady_schedule(compute, *placed, Redundancy.LAZY, costs)


def _anonymous(pipeline: PipelinePlan) -> PipelinePlan:
    """The pipeline with ranks in the place of nodes' names: pipelines alike take equally long."""
    names = {node: f"rank{rank}" for rank, node in enumerate(pipeline.ranks)}
    return PipelinePlan(
        tuple(names[node] for node in pipeline.stages),
        tuple(None if node is None else names[node] for node in pipeline.replicas),
        tuple(names.values()),
        pipeline.shape,
    )
