"""All begin again from a checkpoint: which nodes take which places.

A checkpoint knows nothing of pipelines or nodes, so any will do. The pipelines are cut as in the
beginning, since it is known that such stages fit into the nodes' memory. With fewer nodes some run
two stages, as they would after takeovers, and have room for it for the same reason; each pipeline
keeps its microbatches, and what is trained has the same bits. Where that is not enough the last
pipelines are dissolved, and the others do their work: gradients are summed in another order, so the
bits are those of this arrangement, which the reason says. One node at least can always go on.

A rank that has no node is a vacancy like a victim's: a standby that comes later takes it.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass

from megatron_bamboo.planner.arrangement import Arrangement, PipelineShape
from megatron_bamboo.planner.healing import protected
from megatron_bamboo.planner.infeasible import counted
from megatron_bamboo.planner.plan import Checkpoint, PipelinePlan, Plan, dissolved
from megatron_bamboo.planner.rebalancing import Balance
from megatron_bamboo.schedule.redundancy import Redundancy


@dataclass(frozen=True, slots=True)
class Beginning:
    """What a job's pipelines were at its start, and by what a batch is shared out."""

    arrangement: Arrangement
    balance: Balance


def begin_again(
    plan: Plan, nodes: Sequence[str], lost: Set[str], checkpoint: Checkpoint, begun: Beginning
) -> Plan:
    """The next epoch's plan: all nodes that there is a place for begin again from a checkpoint.

    Args:
        nodes: all that live, standbys too, those first that shall have a place; one at least.
        lost: the nodes of the plan that are no more.
    """
    pipelines = _arranged(plan, nodes, begun)
    placed = {node for pipeline in pipelines for node in pipeline.stages}
    return Plan(
        plan.epoch + 1,
        pipelines,
        lost=tuple(sorted(lost)),
        decision=None,
        reason=f"all begin again from {checkpoint}, on {_in_words(pipelines, begun)}",
        dismissed=tuple(n for n in plan.nodes if n not in placed and n not in lost),
        restored=checkpoint,
    )


def _arranged(plan: Plan, nodes: Sequence[str], begun: Beginning) -> tuple[PipelinePlan, ...]:
    shapes, redundancy = begun.arrangement.pipelines, begun.balance.redundancy
    least = [_least_nodes(shape, redundancy) for shape in shapes]
    used = next((k for k in range(len(shapes), 0, -1) if sum(least[:k]) <= len(nodes)), 1)
    counts = _counts(len(nodes), shapes[:used], least)
    crews = _crews(plan, nodes, counts)
    placed = [_placed(*pair, redundancy) for pair in zip(shapes, crews, strict=False)]
    empty = [dissolved(PipelinePlan((), (), (), shape)) for shape in shapes[used:]]
    pipelines = (*placed, *empty)
    if not empty:
        return pipelines
    return begun.balance.best(pipelines, begun.arrangement.total_microbatches).apply(pipelines)


def _least_nodes(shape: PipelineShape, redundancy: Redundancy) -> int:
    """With how many a pipeline has room: one with replicas where each node runs two stages."""
    stages = shape.num_stages
    return stages if redundancy is Redundancy.NONE else -(-stages // 2)


def _counts(num_nodes: int, shapes: Sequence[PipelineShape], least: Sequence[int]) -> list[int]:
    """By pipeline its number of nodes: all that it can have, the most needy ones first."""
    counts = [min(few, num_nodes) for few in least[: len(shapes)]]
    sizes = [shape.num_stages for shape in shapes]
    for _ in range(num_nodes - sum(counts)):
        needy = [number for number, count in enumerate(counts) if count < sizes[number]]
        if needy:
            counts[min(needy, key=lambda number: counts[number] / sizes[number])] += 1
    return counts


def _crews(plan: Plan, nodes: Sequence[str], counts: Sequence[int]) -> list[list[str]]:
    """By pipeline its nodes: first those that it had."""
    crews = []
    for number, count in enumerate(counts):
        had = plan.pipelines[number].ranks
        crews.append([node for node in had if node in nodes][:count])
    placed = {node for crew in crews for node in crew}
    others = [node for node in nodes if node not in placed]
    for crew, count in zip(crews, counts, strict=True):
        more = count - len(crew)
        crew += others[:more]
        others = others[more:]
    return crews


def _placed(shape: PipelineShape, crew: Sequence[str], redundancy: Redundancy) -> PipelinePlan:
    """A pipeline on some nodes: each runs the stage of its rank, and those up to the next one's."""
    num_stages = shape.num_stages
    ranks = [f"-{rank}" for rank in range(num_stages)]
    for place, node in enumerate(crew):
        ranks[place * num_stages // len(crew)] = node
    stages: list[str] = []
    for node in ranks:
        stages.append(node if node in crew else stages[-1])
    none: tuple[str | None, ...] = (None,) * num_stages
    pipeline = PipelinePlan(tuple(stages), none, tuple(ranks), shape)
    return pipeline if redundancy is Redundancy.NONE else protected(pipeline)


def _in_words(pipelines: Sequence[PipelinePlan], begun: Beginning) -> str:
    parts = [
        f"{counted(len(set(pipeline.stages)), 'node')} for the {pipeline.shape.num_stages} stages "
        f"of pipeline {number}"
        if pipeline.stages
        else f"none for pipeline {number}"
        for number, pipeline in enumerate(pipelines)
    ]
    numbers = ", ".join(str(pipeline.shape.num_microbatches) for pipeline in pipelines)
    line = f"{', '.join(parts)}; microbatches {numbers}"
    if tuple(pipeline.shape for pipeline in pipelines) == begun.arrangement.pipelines:
        return line
    return f"{line}; from here on the bits are those of this arrangement, not of the first one"
