"""What the places of an arrangement need, and which of them should not share a zone.

A place is a stage of a pipeline, as something that a node can take. Whoever takes it holds the
units of its own stage and, as their shadow, those of the stage after it. That depends on the place
alone and not on who its neighbours are, so what a node must receive for a place is a plain number.
Zones are what couples places: a zone is lost as a whole.
"""

from collections import defaultdict
from dataclasses import dataclass

from megatron_bamboo.planner.arrangement import Arrangement, PipelineShape

Place = tuple[int, int]
"""Pipeline and stage."""


@dataclass(frozen=True, slots=True)
class Clash:
    """Places that should not all be in one zone.

    ``units`` are those that only these places hold; without any the clash is that a stage and its
    shadow could be lost together.
    """

    places: tuple[int, ...]
    units: tuple[int, ...]
    weight: int


@dataclass(frozen=True, slots=True)
class SharedZone:
    """A stage in the zone of its shadow: if the zone is lost, the pipeline has lost the stage."""

    pipeline: int
    stage: int
    node: str
    shadow: str
    zone: str


@dataclass(frozen=True, slots=True)
class OneZone:
    """Units all of whose holders are in one zone: if it is lost, no holder is left."""

    units: tuple[int, ...]
    zone: str


def places_of(arrangement: Arrangement) -> tuple[Place, ...]:
    """All places, pipeline by pipeline."""
    return tuple(
        (number, stage)
        for number, pipeline in enumerate(arrangement.pipelines)
        for stage in range(pipeline.num_stages)
    )


def units_needed(arrangement: Arrangement) -> tuple[frozenset[int], ...]:
    """By place the units of its own stage and of the one that it shadows.

    A pipeline of one stage is shadowed by the other pipelines, which have its units anyway.
    """
    return tuple(
        _units(pipeline, stage) | _units(pipeline, (stage + 1) % pipeline.num_stages)
        for pipeline in arrangement.pipelines
        for stage in range(pipeline.num_stages)
    )


def _units(pipeline: PipelineShape, stage: int) -> frozenset[int]:
    return frozenset(unit for span in pipeline.spans_of(stage) for unit in range(*span))


def clashes_of(arrangement: Arrangement) -> tuple[Clash, ...]:
    """What zones should keep apart: first each stage and its shadow, then all holders of a unit.

    A unit that is lost with a zone weighs more than all stages that other pipelines still have.
    """
    neighbours = []
    first = 0
    for pipeline in arrangement.pipelines:
        size = pipeline.num_stages
        if size > 1:
            pairs = ((first + (stage - 1) % size, first + stage) for stage in range(size))
            neighbours += [Clash(pair, (), 1) for pair in pairs]
        first += size
    holders = defaultdict(list)
    needed = units_needed(arrangement)
    for unit in range(arrangement.num_units):
        places = tuple(number for number, units in enumerate(needed) if unit in units)
        holders[places].append(unit)
    heavy = arrangement.num_nodes + 1
    together = (
        Clash(places, tuple(units), heavy * len(units))
        for places, units in holders.items()
        if len(places) > 1
    )
    return (*neighbours, *together)
