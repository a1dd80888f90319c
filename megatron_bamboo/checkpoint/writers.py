"""Who writes what of a checkpoint: a pure function of the plan.

Each stage is written by its primary in one pipeline, the stages being spread over the pipelines;
where workers share layers, by all workers of that node. All primaries of a stage hold the same
bits, so a checkpoint is the same whoever writes it.
"""

from dataclasses import dataclass

from megatron_bamboo.membership.workers import node_of, workers_of
from megatron_bamboo.planner.plan import Plan


@dataclass(frozen=True, slots=True)
class Writers:
    """The writing workers, the lead first, and the stages of each one's node."""

    workers: tuple[str, ...]
    stages: tuple[tuple[int, ...], ...]

    @property
    def lead(self) -> str:
        """The worker that makes the folder and publishes it."""
        return self.workers[0]

    def stages_of(self, worker: str) -> tuple[int, ...]:
        """What a worker writes; nothing if it is no writer."""
        if worker not in self.workers:
            return ()
        return self.stages[self.workers.index(worker)]


def writers_of(plan: Plan, tensor_size: int) -> Writers:
    """The writers under a plan, whether it is the nodes' or that of one tensor rank's workers."""
    by_node: dict[str, list[int]] = {}
    for stage in range(len(plan.pipelines[0].stages)):
        pipeline = plan.pipelines[stage % len(plan.pipelines)]
        by_node.setdefault(node_of(pipeline.stages[stage]), []).append(stage)
    return Writers(
        workers=workers_of(by_node, tensor_size),
        stages=tuple(tuple(s) for s in by_node.values() for _ in range(tensor_size)),
    )
