"""No other placement is spread better, or spread as well and cheaper: all are tried."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import pairwise, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_bamboo.planner.arrangement import Arrangement, PipelineShape
from megatron_bamboo.planner.placement import Holdings, Placement, place_nodes
from megatron_bamboo.planner.places import OneZone, SharedZone, units_needed

NODES = tuple(f"node{i}" for i in range(8))


def even_cut(num_units: int, num_stages: int) -> tuple[tuple[int, int], ...]:
    cuts = [num_units * stage // num_stages for stage in range(num_stages + 1)]
    return tuple(pairwise(cuts))


def arranged(num_units: int, *sizes: int) -> Arrangement:
    return Arrangement(tuple(PipelineShape(even_cut(num_units, size), 4) for size in sizes))


def holding(arrangement: Arrangement, nodes: tuple[str, ...]) -> dict[str, frozenset[int]]:
    return dict(zip(nodes, units_needed(arrangement), strict=False))


def flat(placement: Placement) -> tuple[str, ...]:
    return tuple(node for pipeline in placement.pipelines for node in pipeline)


@cache
def exposure(arrangement: Arrangement, zones: tuple[str, ...]) -> tuple[int, int]:
    """Units that one zone alone holds on two nodes or more, then stages in their shadow's zone."""
    holders: list[list[str]] = [[] for _ in range(arrangement.num_units)]
    for zone, units in zip(zones, units_needed(arrangement), strict=True):
        for unit in units:
            holders[unit].append(zone)
    alone = sum(len(held) > 1 and len(set(held)) == 1 for held in holders)
    shared, first = 0, 0
    for pipeline in arrangement.pipelines:
        ring = zones[first : first + pipeline.num_stages]
        if len(ring) > 1:
            shared += sum(ring[stage - 1] == ring[stage] for stage in range(len(ring)))
        first += pipeline.num_stages
    return alone, shared


def zones_of(nodes: tuple[str, ...], zones: dict[str, str]) -> tuple[str, ...]:
    """By node its zone; a node without one has one of its own."""
    return tuple(zones.get(node, node) for node in nodes)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Arrangement, tuple[str, ...], Holdings]:
    num_nodes = draw(st.integers(1, len(NODES)))
    sizes = [draw(st.integers(1, num_nodes))]
    while sum(sizes) < num_nodes and draw(st.booleans()):
        sizes.append(draw(st.integers(1, num_nodes - sum(sizes))))
    arrangement = arranged(draw(st.integers(max(sizes), 9)), *sizes)
    units = range(arrangement.num_units)
    nodes = NODES[:num_nodes]
    held = {node: draw(st.frozensets(st.sampled_from(units))) for node in nodes}
    return arrangement, nodes, Holdings(held, {u: draw(st.integers(0, 9)) for u in units})


Case = tuple[Arrangement, tuple[str, ...], Holdings]


def amounts(case: Case) -> Iterator[tuple[tuple[str, ...], int]]:
    """All ways to place the nodes, and what each moves."""
    arrangement, nodes, holdings = case
    missing = [
        {node: holdings.missing_bytes(node, units) for node in nodes}
        for units in units_needed(arrangement)
    ]
    for way in permutations(nodes, arrangement.num_nodes):
        yield way, sum(row[node] for row, node in zip(missing, way, strict=True))


@given(cases())
@settings(max_examples=40)
def test_without_zones_no_placement_moves_less(case: Case) -> None:
    arrangement, nodes, holdings = case
    placement = place_nodes(arrangement, nodes, holdings)
    moved = dict(amounts(case))
    assert placement.moved_bytes == moved[flat(placement)] == min(moved.values())
    assert placement.is_least
    assert sorted((*flat(placement), *placement.standbys)) == sorted(nodes)


@given(case=cases(), zones=st.lists(st.sampled_from("abc") | st.none(), min_size=8, max_size=8))
@settings(max_examples=40)
def test_with_zones_none_is_spread_better_or_as_well_and_cheaper(
    case: Case, zones: list[str | None]
) -> None:
    arrangement, nodes, holdings = case
    zone_of = {node: zone for node, zone in zip(nodes, zones, strict=False) if zone}
    placement = place_nodes(arrangement, nodes, replace(holdings, zones=zone_of))
    best = min(
        (*exposure(arrangement, zones_of(way, zone_of)), moved) for way, moved in amounts(case)
    )
    assert placement.is_least
    spread = exposure(arrangement, zones_of(flat(placement), zone_of))
    assert (*spread, placement.moved_bytes) == best
    alone = sum(len(entry.units) for entry in placement.one_zone)
    assert (alone, len(placement.shared)) == best[:2]


@pytest.mark.parametrize(("before", "after"), [((4, 4), (3, 5)), ((8,), (4, 4)), ((3, 5), (2, 6))])
@pytest.mark.parametrize("zones", ["", "aabbaabb", "aaabbbcc"])
def test_eight_nodes_in_a_new_arrangement_move_the_least(
    before: tuple[int, ...], after: tuple[int, ...], zones: str
) -> None:
    held = holding(arranged(12, *before), NODES)
    zone_of = dict(zip(NODES, zones, strict=False))
    holdings = Holdings(held, {unit: 7 + (unit in (0, 11)) for unit in range(12)}, zone_of)
    arrangement = arranged(12, *after)
    placement = place_nodes(arrangement, NODES, holdings)
    best = min(
        (exposure(arrangement, zones_of(way, zone_of)) if zones else (0, 0), moved)
        for way, moved in amounts((arrangement, NODES, holdings))
    )
    assert placement.is_least
    spread = exposure(arrangement, zones_of(flat(placement), zone_of))
    assert (spread, placement.moved_bytes) == best


def test_one_loss_in_a_job_of_two_pipelines() -> None:
    """Of [0-3] [4-7] node 2 is lost: the second pipeline keeps its nodes, and receives nothing."""
    before, after = arranged(8, 4, 4), arranged(8, 3, 4)
    live = tuple(node for node in NODES if node != "node2")
    holdings = Holdings(holding(before, NODES), dict.fromkeys(range(8), 100))
    placement = place_nodes(after, live, holdings)
    assert placement.pipelines == (("node0", "node1", "node3"), NODES[4:])
    assert placement.moved_bytes == 400


def test_who_may_stay_stays() -> None:
    """Stages of two pipelines hold the same: a node changes its place only for what it saves."""
    arrangement = arranged(8, 4, 4)
    places = [(pipeline, stage) for pipeline in (1, 0) for stage in range(4)]
    holdings = Holdings(
        holding(arrangement, NODES),
        dict.fromkeys(range(8), 100),
        stay=dict(zip(NODES, places, strict=True)),
    )
    placement = place_nodes(arrangement, NODES, holdings)
    assert placement.pipelines == (NODES[4:], NODES[:4])
    assert placement.moved_bytes == 0


def test_what_has_to_be_received_is_spread_over_the_nodes() -> None:
    """Two units move either way: both to node0 as stage 0, or one each to node0 and node1."""
    held = {"node0": {2}, "node1": {1, 2}, "node2": {2, 3}, "node3": {3, 0}}
    holdings = Holdings(held, dict.fromkeys(range(4), 100))
    placement = place_nodes(arranged(4, 4), NODES[:4], holdings)
    assert placement.pipelines == (("node1", "node0", "node2", "node3"),)
    assert placement.moved_bytes == 200


def test_what_one_zone_could_take_away_is_named() -> None:
    """Three stages in two zones: one stage must be in its shadow's zone, and so are its units."""
    arrangement = arranged(6, 3)
    zones = {"node0": "east", "node1": "west", "node2": "east"}
    holdings = Holdings(holding(arrangement, NODES[:3]), dict.fromkeys(range(6), 1), zones)
    placement = place_nodes(arrangement, NODES[:3], holdings)
    assert placement.pipelines == (("node0", "node1", "node2"),)
    assert placement.shared == (SharedZone(0, 0, "node0", "node2", "east"),)
    assert placement.one_zone == (OneZone((0, 1), "east"),)


def test_another_pipeline_can_have_the_units_in_another_zone() -> None:
    """Each ring of three has a pair in one zone, but not of the same stage in the same zone."""
    arrangement = arranged(6, 3, 3)
    zones = {node: "east" if number % 2 else "west" for number, node in enumerate(NODES[:6])}
    holdings = Holdings({}, dict.fromkeys(range(6), 1), zones)
    placement = place_nodes(arrangement, NODES[:6], holdings)
    assert len(placement.shared) == 2 and not placement.one_zone


def test_many_nodes_are_spread_as_well_as_the_search_gets() -> None:
    arrangement = arranged(48, *(8,) * 8)
    nodes = tuple(f"node{i}" for i in range(64))
    zones = {node: "east" if number < 32 else "west" for number, node in enumerate(nodes)}
    placement = place_nodes(arrangement, nodes, Holdings({}, dict.fromkeys(range(48), 1), zones))
    assert not placement.shared and not placement.one_zone


def test_too_few_nodes_are_refused() -> None:
    with pytest.raises(ValueError, match="2 nodes cannot take 3 places"):
        place_nodes(arranged(6, 3), NODES[:2], Holdings({}, dict.fromkeys(range(6), 1)))
