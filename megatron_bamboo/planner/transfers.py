"""Who sends which unit to whom, so that every node has what its new place needs.

Each unit that a node lacks is sent once, by one of those that hold it: that is the fewest bytes.
What a node receives follows from its place. What it sends is chosen here: the node whose link is
busy longest with sending is to be done as early as possible.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class UnitTransfer:
    """One unit's state, from a holder to a node that needs it."""

    unit: int
    source: str
    target: str


@dataclass(frozen=True, slots=True)
class Links:
    """What has to be carried, and how fast each node can send.

    Args:
        unit_bytes: by unit.
        speeds: by node in bytes a second, or in any other measure; who is not named has 1.
    """

    unit_bytes: Mapping[int, int]
    speeds: Mapping[str, float] = field(default_factory=dict)

    def time(self, node: str, num_bytes: int) -> float:
        """How long a node's link is busy with so much."""
        return num_bytes / self.speeds.get(node, 1)


@dataclass(frozen=True, slots=True)
class TransferList:
    """What moves, and the units that nobody has any more: those must come from a checkpoint."""

    transfers: tuple[UnitTransfer, ...]
    lost_units: tuple[int, ...]

    def total_bytes(self, links: Links) -> int:
        """All that is sent."""
        return sum(links.unit_bytes[transfer.unit] for transfer in self.transfers)

    def busiest(self, links: Links) -> tuple[str, float] | None:
        """The node that is busy sending for longest, and for how long; None if nothing moves."""
        sent: dict[str, int] = defaultdict(int)
        for transfer in self.transfers:
            sent[transfer.source] += links.unit_bytes[transfer.unit]
        times = ((node, links.time(node, num_bytes)) for node, num_bytes in sorted(sent.items()))
        return max(times, key=lambda entry: entry[1], default=None)


def plan_transfers(
    needed: Mapping[str, Set[int]], held: Mapping[str, Set[int]], links: Links
) -> TransferList:
    """The transfers, by unit and target.

    With units of one size no choice of sources is done earlier. With units of several sizes one may
    be, by less than the largest unit takes; that is what trying all choices has shown, not a proof.

    Args:
        needed: by node the units of its place.
        held: by live node the units that it has; also nodes that are about to leave.
    """
    holders = defaultdict(list)
    for node in sorted(held):
        for unit in held[node]:
            holders[unit].append(node)
    lacking = [
        (unit, node) for node in sorted(needed) for unit in needed[node] - held.get(node, set())
    ]
    lost = sorted({unit for unit, _ in lacking} - set(holders))
    loads = _Loads(links, holders)
    for unit, target in sorted(lacking, key=lambda lack: (-links.unit_bytes[lack[0]], *lack)):
        if unit in holders:
            loads.add(unit, target)
    while loads.relieve():
        pass
    return TransferList(tuple(loads.transfers()), tuple(lost))


@dataclass(slots=True)
class _Loads:
    """What each holder is to send so far."""

    links: Links
    holders: Mapping[int, Sequence[str]]
    num_bytes: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    targets: dict[str, dict[int, list[str]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(list))
    )
    """By source and unit."""

    def transfers(self) -> list[UnitTransfer]:
        """In the order of units and targets."""
        every = (
            UnitTransfer(unit, source, target)
            for source, units in self.targets.items()
            for unit, targets in units.items()
            for target in targets
        )
        return sorted(every, key=lambda t: (t.unit, t.target))

    def time(self, node: str, more_bytes: int = 0) -> float:
        """How long a node sends, with so much more."""
        return self.links.time(node, self.num_bytes[node] + more_bytes)

    def add(self, unit: int, target: str) -> None:
        """One more transfer, by the holder that is done first with it."""
        size = self.links.unit_bytes[unit]
        source = min(self.holders[unit], key=lambda node: self.time(node, size))
        self._put(unit, source, target)

    def relieve(self) -> bool:
        """Take something from the node that sends for longest, others passing on what they had.

        Returns False when no chain of such changes makes it shorter.
        """
        slowest = max(self.num_bytes, key=self.time, default=None)
        if slowest is None:
            return False
        # How each node is reached: the unit that it would take over, and from whom.
        reached: dict[str, tuple[int, str] | None] = {slowest: None}
        queue = [slowest]
        for node in queue:
            for unit, other in self._offers(node, reached[node], slowest):
                if other in reached:
                    continue
                reached[other] = (unit, node)
                if self.time(other, self.links.unit_bytes[unit]) < self.time(slowest):
                    self._pass_on(other, reached)
                    return True
                queue.append(other)
        return False

    def _offers(
        self, node: str, taken: tuple[int, str] | None, slowest: str
    ) -> Iterator[tuple[int, str]]:
        """Units that a node could give away, and to whom, to take over another one instead."""
        sizes = self.links.unit_bytes
        for unit in sorted(self.targets[node]):
            if taken is not None:
                growth = sizes[taken[0]] - sizes[unit]
                if growth > 0 and self.time(node, growth) >= self.time(slowest):
                    continue
            yield from ((unit, other) for other in self.holders[unit])

    def _pass_on(self, last: str, reached: Mapping[str, tuple[int, str] | None]) -> None:
        while (step := reached[last]) is not None:
            unit, giver = step
            self._put(unit, last, self._take(unit, giver))
            last = giver

    def _put(self, unit: int, source: str, target: str) -> None:
        self.num_bytes[source] += self.links.unit_bytes[unit]
        self.targets[source][unit].append(target)

    def _take(self, unit: int, source: str) -> str:
        self.num_bytes[source] -= self.links.unit_bytes[unit]
        target = self.targets[source][unit].pop()
        if not self.targets[source][unit]:
            del self.targets[source][unit]
        return target
