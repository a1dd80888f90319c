"""The least that a change could have moved: all ways to put live nodes on its places, tried."""

from collections.abc import Mapping, Sequence, Set
from itertools import permutations
from typing import Any

from megatron_bamboo.planner.arrangement import Arrangement
from megatron_bamboo.planner.places import units_needed
from megatron_bamboo.planner.plan import PipelinePlan

MOST_NODES = 8


def least_bytes(
    needed: Sequence[Set[int]],
    nodes: Sequence[str],
    held: Mapping[str, Set[int]],
    unit_bytes: Mapping[int, int],
) -> int:
    """What must at least be received so that each place has its units, each on a node of its own.

    Args:
        needed: by place the units that its node must hold.
        held: by node the units of which it has the newest state.
    """
    assert len(needed) <= len(nodes) <= MOST_NODES, (len(needed), nodes)
    costs = {
        (place, node): sum(unit_bytes[unit] for unit in units - held.get(node, frozenset()))
        for place, units in enumerate(needed)
        for node in nodes
    }
    return min(
        sum(costs[place, node] for place, node in enumerate(chosen))
        for chosen in permutations(nodes, len(needed))
    )


def held_by(pipelines: Sequence[Mapping[str, Any]]) -> dict[str, frozenset[int]]:
    """By node the units that it runs or shadows, of an event's pipelines."""
    found: dict[str, set[int]] = {}
    for pipeline in map(PipelinePlan.from_fields, pipelines):
        for stage, holders in enumerate(zip(pipeline.stages, pipeline.replicas, strict=True)):
            units = {u for span in pipeline.shape.spans_of(stage) for u in range(*span)}
            for node in holders:
                if node is not None:
                    found.setdefault(node, set()).update(units)
    return {node: frozenset(units) for node, units in found.items()}


def places_needed(pipelines: Sequence[Mapping[str, Any]]) -> tuple[frozenset[int], ...]:
    """By place what its node must hold, of those pipelines that have nodes."""
    plans = map(PipelinePlan.from_fields, pipelines)
    return units_needed(Arrangement(tuple(plan.shape for plan in plans if plan.stages)))
