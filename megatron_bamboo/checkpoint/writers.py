"""Who writes what of a checkpoint: a pure function of the plan.

Each stage is written by its primary in one pipeline, the stages being spread over the pipelines; if
these are not all cut alike, over those that are like the most. Where workers share layers, all
workers of that node write. All primaries of a unit hold the same bits, so a checkpoint is the same
whoever writes it. Where the pipelines share the optimizer's state each primary writes its share of
that.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_bamboo.membership.workers import node_of, workers_of
from megatron_bamboo.planner.plan import PipelinePlan, Plan


@dataclass(frozen=True, slots=True)
class Writers:
    """The writing workers, the lead first, and the stages of each one's node.

    Of ``shares`` a worker writes what it has of the optimizer's state.
    """

    workers: tuple[str, ...]
    stages: tuple[tuple[int, ...], ...]
    shares: tuple[tuple[int, ...], ...]

    @property
    def lead(self) -> str:
        """The worker that makes the folder and publishes it."""
        return self.workers[0]

    def stages_of(self, worker: str) -> tuple[int, ...]:
        """The stages that a worker writes; none if it is no writer."""
        return self.stages[self.workers.index(worker)] if worker in self.workers else ()

    def shares_of(self, worker: str) -> tuple[int, ...]:
        """The stages that a worker writes its share of."""
        return self.shares[self.workers.index(worker)] if worker in self.workers else ()


def writers_of(plan: Plan, tensor_size: int, sharded: bool = False) -> Writers:
    """The writers under a plan, whether it is the nodes' or that of one tensor rank's workers.

    Args:
        sharded: the pipelines share the optimizer's state.
    """
    stages: dict[str, list[int]] = {}
    alike, lacking = _cut_alike(plan), plan.lacking
    for stage in range(len(alike[0][1].stages)):
        primaries = [
            pipeline.stages[stage]
            for number, pipeline in alike
            # Of the step that is saved it has nothing.
            if (number, stage, pipeline.stages[stage]) not in lacking
        ]
        stages.setdefault(node_of(primaries[stage % len(primaries)]), []).append(stage)
    shares = _primaries(plan) if sharded else {}
    nodes = tuple(dict.fromkeys((*stages, *shares)))
    return Writers(
        workers=workers_of(nodes, tensor_size),
        stages=_of_workers(nodes, stages, tensor_size),
        shares=_of_workers(nodes, shares, tensor_size),
    )


def _cut_alike(plan: Plan) -> list[tuple[int, PipelinePlan]]:
    """The pipelines that have the same stages as most have, with their numbers."""
    by_cut: dict[object, list[tuple[int, PipelinePlan]]] = {}
    for number, pipeline in enumerate(plan.pipelines):
        if pipeline.stages:
            by_cut.setdefault(pipeline.shape.spans, []).append((number, pipeline))
    return max(by_cut.values(), key=len)


def _primaries(plan: Plan) -> dict[str, list[int]]:
    """By node the stages that it runs."""
    stages: dict[str, list[int]] = {}
    for pipeline in plan.pipelines:
        for stage, node in enumerate(pipeline.stages):
            stages.setdefault(node_of(node), []).append(stage)
    return stages


def _of_workers(
    nodes: Sequence[str], stages: Mapping[str, Sequence[int]], tensor_size: int
) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(stages.get(node, ())) for node in nodes for _ in range(tensor_size))
