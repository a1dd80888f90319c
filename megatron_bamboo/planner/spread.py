"""A zone for each place, so that as little as possible can be lost with one zone.

To colour rings from few zones of unequal size is a search. These are its quick parts: a good
beginning, and exchanges until none helps; what is the best is for ``placement`` to say.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_bamboo.planner.places import Clash

Pattern = list[str]
"""By place the zone of the node that is to take it."""


@dataclass(frozen=True, slots=True)
class Spread:
    """What is to be spread: the clashes, also by place, and how many nodes each zone has."""

    num_places: int
    clashes: tuple[Clash, ...]
    clashes_at: tuple[tuple[Clash, ...], ...]
    num_nodes: Counter[str]


def spread_of(num_places: int, clashes: Sequence[Clash], zones: Sequence[str]) -> Spread:
    """Places and clashes, over nodes of these zones."""
    at = defaultdict(list)
    for clash in clashes:
        for place in clash.places:
            at[place].append(clash)
    by_place = tuple(tuple(at[place]) for place in range(num_places))
    return Spread(num_places, tuple(clashes), by_place, Counter(zones))


def zone_of_all(clash: Clash, pattern: Sequence[str]) -> str | None:
    """The zone that all places of a clash are in; None if there are two."""
    zone = pattern[clash.places[0]]
    return zone if all(pattern[place] == zone for place in clash.places) else None


def penalty(clashes: Sequence[Clash], pattern: Sequence[str]) -> int:
    """The weight of all clashes whose places are in one zone."""
    return sum(clash.weight for clash in clashes if zone_of_all(clash, pattern) is not None)


def alternating(spread: Spread) -> Pattern:
    """Zones in turn: the largest on every second place, the others between."""
    counts = spread.num_nodes.copy()
    for _ in range(counts.total() - spread.num_places):
        counts[max(counts, key=lambda zone: (counts[zone], zone))] -= 1
    by_size = sorted(counts, key=lambda zone: (-counts[zone], zone))
    zones = [zone for zone in by_size for _ in range(counts[zone])]
    order = [*range(0, spread.num_places, 2), *range(1, spread.num_places, 2)]
    zone_at = dict(zip(order, zones, strict=True))
    return [zone_at[place] for place in range(spread.num_places)]


def improved(spread: Spread, pattern: Pattern) -> Pattern:
    """The pattern after exchanges of two zones, as long as one lowers the penalty."""
    pattern = pattern.copy()
    while True:
        changes = ((_gain(spread, pattern, change), change) for change in _changes(spread, pattern))
        gain, change = max(changes, default=(0, {}), key=lambda entry: entry[0])
        if gain <= 0:
            return pattern
        for place, zone in change.items():
            pattern[place] = zone


def _changes(spread: Spread, pattern: Pattern) -> Iterator[dict[int, str]]:
    """Another zone for each place of a clash, from another place or from a node without one."""
    spare = spread.num_nodes - Counter(pattern)
    wrong = (clash for clash in spread.clashes if zone_of_all(clash, pattern) is not None)
    for place in sorted({place for clash in wrong for place in clash.places}):
        zone = pattern[place]
        yield from ({place: other} for other in spare if other != zone)
        for partner, other in enumerate(pattern):
            if other != zone:
                yield {place: other, partner: zone}


def _gain(spread: Spread, pattern: Pattern, change: dict[int, str]) -> int:
    touched = {id(clash): clash for place in change for clash in spread.clashes_at[place]}
    clashes = tuple(touched.values())
    before = penalty(clashes, pattern)
    kept = {place: pattern[place] for place in change}
    for place, zone in change.items():
        pattern[place] = zone
    after = penalty(clashes, pattern)
    for place, zone in kept.items():
        pattern[place] = zone
    return before - after
