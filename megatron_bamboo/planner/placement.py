"""Which live node takes which place of an arrangement.

First the zones: a stage and its shadow, and the holders of a unit, are not to be lost with one
zone, as far as the zones allow it. Among the placements that are spread equally well the one that
has the fewest bytes to move; among those the one that spreads them most evenly over the nodes, and
then the one in which most nodes stay where they are.

Without zones that is an assignment problem, and its answer the least there is. With zones it is
searched (``zone_search``), and the placement says whether the search has come to an end.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from math import gcd

from megatron_bamboo.planner.arrangement import Arrangement
from megatron_bamboo.planner.places import (
    OneZone,
    Place,
    SharedZone,
    clashes_of,
    places_of,
    units_needed,
)
from megatron_bamboo.planner.spread import spread_of, zone_of_all
from megatron_bamboo.planner.zone_search import Answer, Problem, search


@dataclass(frozen=True, slots=True)
class Placement:
    """By pipeline and stage the node that has the place; its shadow is the node before it."""

    pipelines: tuple[tuple[str, ...], ...]
    standbys: tuple[str, ...]
    moved_bytes: int
    shared: tuple[SharedZone, ...]
    one_zone: tuple[OneZone, ...]
    is_least: bool
    """Nothing is spread better or, spread as well, moves less; False: it was not searched out."""

    def needed(self, arrangement: Arrangement) -> dict[str, frozenset[int]]:
        """By node the units of its place."""
        nodes = (node for pipeline in self.pipelines for node in pipeline)
        return dict(zip(nodes, units_needed(arrangement), strict=True))


@dataclass(frozen=True, slots=True)
class Holdings:
    """Who has what now, and where: what a placement is judged by.

    Args:
        held: by node the units of which it has the newest state; who is not named has none.
        unit_bytes: by unit what a new holder receives.
        zones: by node; a node without a zone shares none.
        stay: by node the place that it has now, with the pipeline's number in the new arrangement.
    """

    held: Mapping[str, Set[int]]
    unit_bytes: Mapping[int, int]
    zones: Mapping[str, str] = field(default_factory=dict)
    stay: Mapping[str, Place] = field(default_factory=dict)

    def missing_bytes(self, node: str, needed: Set[int]) -> int:
        """What a node would have to receive."""
        return sum(self.unit_bytes[unit] for unit in needed - self.held.get(node, frozenset()))


def place_nodes(arrangement: Arrangement, nodes: Sequence[str], holdings: Holdings) -> Placement:
    """Places for as many of the live nodes as the arrangement takes; the others are standbys.

    Raises:
        ValueError: there are too few nodes.
    """
    if len(nodes) < arrangement.num_nodes:
        raise ValueError(
            f"{len(nodes)} nodes cannot take {arrangement.num_nodes} places: "
            f"arrange {len(nodes)} nodes or fewer"
        )
    zone_of = tuple(holdings.zones.get(node, f"that of {node} alone") for node in nodes)
    spread = spread_of(arrangement.num_nodes, clashes_of(arrangement), zone_of)
    problem = Problem(_costs(arrangement, nodes, holdings), zone_of, spread)
    answer, is_least = search(problem)
    return _placement(arrangement, nodes, holdings, answer, is_least)


def _costs(
    arrangement: Arrangement, nodes: Sequence[str], holdings: Holdings
) -> tuple[tuple[int, ...], ...]:
    """By place and node one number for all aims: bytes, then their squares, then who stays."""
    needed = units_needed(arrangement)
    unit = gcd(*(holdings.unit_bytes[u] for u in range(arrangement.num_units))) or 1
    amounts = [[holdings.missing_bytes(node, units) // unit for node in nodes] for units in needed]
    places = places_of(arrangement)
    most = max(map(max, amounts))
    return tuple(
        tuple(
            (amount * (len(places) * most**2 + 1) + amount**2) * (2 * len(places) + 1)
            + _strangeness(place, holdings.stay.get(node))
            for amount, node in zip(row, nodes, strict=True)
        )
        for row, place in zip(amounts, places, strict=True)
    )


def _strangeness(place: Place, before: Place | None) -> int:
    """How far a place is from the one before: in another pipeline, elsewhere in it, or the same."""
    if before is None or before[0] != place[0]:
        return 2
    return int(before != place)


def _placement(
    arrangement: Arrangement,
    nodes: Sequence[str],
    holdings: Holdings,
    answer: Answer,
    is_least: bool,
) -> Placement:
    node_at = dict(zip(places_of(arrangement), (nodes[c] for c in answer.columns), strict=True))
    needed = zip(node_at.values(), units_needed(arrangement), strict=True)
    clashes = [
        (clash, zone)
        for clash in clashes_of(arrangement)
        if (zone := zone_of_all(clash, answer.pattern)) is not None
    ]
    places = places_of(arrangement)
    return Placement(
        pipelines=tuple(
            tuple(node_at[number, stage] for stage in range(pipeline.num_stages))
            for number, pipeline in enumerate(arrangement.pipelines)
        ),
        standbys=tuple(node for node in nodes if node not in node_at.values()),
        moved_bytes=sum(holdings.missing_bytes(node, units) for node, units in needed),
        shared=tuple(
            SharedZone(*place, node_at[place], node_at[shadow], zone)
            for clash, zone in clashes
            if not clash.units
            for shadow, place in ((places[clash.places[0]], places[clash.places[1]]),)
        ),
        one_zone=tuple(OneZone(clash.units, zone) for clash, zone in clashes if clash.units),
        is_least=is_least,
    )
