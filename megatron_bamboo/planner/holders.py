"""Who holds which units, by their numbers: what a new cut of pipelines is made from."""

from collections import defaultdict
from collections.abc import Sequence

from megatron_bamboo.planner.plan import PipelinePlan


def held_by(pipelines: Sequence[PipelinePlan]) -> dict[str, frozenset[int]]:
    """By node the units that it runs or shadows."""
    held: dict[str, set[int]] = defaultdict(set)
    for pipeline in pipelines:
        for stage, holders in enumerate(zip(pipeline.stages, pipeline.replicas, strict=True)):
            units = {u for span in pipeline.shape.spans_of(stage) for u in range(*span)}
            for node in holders:
                if node is not None:
                    held[node] |= units
    return {node: frozenset(units) for node, units in held.items()}


def units_held(pipeline: PipelinePlan, node: str) -> tuple[int, ...]:
    """The units that a node runs or shadows in a pipeline, ascending."""
    return tuple(sorted(held_by([pipeline]).get(node, ())))
