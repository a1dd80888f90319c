"""The least that a change could move, by trying all ways, and what nodes hold before it."""

from dataclasses import asdict

import pytest
from least_moves import held_by, least_bytes, places_needed

from megatron_bamboo.planner.arrangement import Arrangement, PipelineShape
from megatron_bamboo.planner.placement import Holdings, place_nodes
from megatron_bamboo.planner.plan import PipelinePlan

SHAPE = PipelineShape(((0, 2), (2, 4)), 4)
BYTES = {0: 10, 1: 20, 2: 20, 3: 30}
WHOLE = PipelinePlan(("node0", "node1"), ("node1", "node0"), ("node0", "node1"), SHAPE)


def test_a_node_holds_what_it_runs_and_what_it_shadows() -> None:
    alone = PipelinePlan(("node0", "node0"), (None, None), ("node0", "node1"), SHAPE)
    assert held_by([asdict(alone)]) == {"node0": {0, 1, 2, 3}}
    mixed = PipelinePlan(("node0", "node1"), (None, "node0"), ("node0", "node1"), SHAPE)
    assert held_by([asdict(mixed)]) == {"node0": {0, 1, 2, 3}, "node1": {2, 3}}


def test_a_dissolved_pipeline_has_no_places() -> None:
    gone = PipelinePlan((), (), (), PipelineShape(SHAPE.spans, 0))
    assert len(places_needed([asdict(WHOLE), asdict(gone)])) == 2


def test_who_has_most_stays_and_who_has_nothing_gets_it() -> None:
    needed = (frozenset({0, 1}), frozenset({2, 3}))
    held = {"a": frozenset({2, 3}), "b": frozenset({0}), "c": frozenset[int]()}
    assert least_bytes(needed, ["a", "b", "c"], held, BYTES) == 20


@pytest.mark.parametrize("num_nodes", [3, 5, 6])
def test_the_planner_finds_no_less_and_no_more(num_nodes: int) -> None:
    shapes = (SHAPE, PipelineShape(((0, 1), (1, 3), (3, 4)), 4))[: 1 + (num_nodes > 3)]
    arrangement = Arrangement(shapes)
    nodes = [f"node{number}" for number in range(num_nodes)]
    held = {node: frozenset({n % 4, (n * 3) % 4}) for n, node in enumerate(nodes)}
    needed = places_needed([asdict(PipelinePlan(("x",), (), (), shape)) for shape in shapes])
    least = least_bytes(needed, nodes, held, BYTES)
    assert place_nodes(arrangement, nodes, Holdings(held, BYTES)).moved_bytes == least
