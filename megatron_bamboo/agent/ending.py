"""Why an epoch ends: announced in the store before it does, so that any coordinator goes on."""

import json
from collections.abc import Mapping, Set
from dataclasses import asdict, dataclass
from typing import Any, Self

from megatron_bamboo.planner.growing import Growth
from megatron_bamboo.planner.healing import Vacancy
from megatron_bamboo.planner.new_cut import NewCut

Standby = tuple[Vacancy, str]


@dataclass(frozen=True, slots=True)
class Ending:
    """All that the decision needs and that is not in the store elsewhere.

    One with losses counts for them alone; what was planned gives way.
    """

    lost: Set[str] = frozenset()
    standby: Standby | None = None
    """Who joins, and where."""
    leaving: tuple[str, ...] = ()
    """Who goes, the most urgent ones first."""
    replacing: tuple[Standby, ...] = ()
    """Who joins in the places of some of them."""
    growth: Growth | None = None
    """Who becomes a pipeline."""
    cut: NewCut | None = None
    """Which pipelines are cut anew, and for whom."""
    renewing: tuple[str, ...] = ()
    """All who go back to the last checkpoint, to begin again with those of them who have come."""

    def to_json(self) -> str:
        """The value of ``ending/<epoch>``."""
        called = None if self.standby is None else _fields(self.standby)
        values = {"lost": sorted(self.lost), "standby": called, "leaving": self.leaving}
        values["replacing"] = [_fields(standby) for standby in self.replacing]
        growth = None if self.growth is None else asdict(self.growth)
        cut = None if self.cut is None else asdict(self.cut)
        return json.dumps({**values, "growth": growth, "cut": cut, "renewing": self.renewing})

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """The ending that ``to_json`` wrote."""
        values = json.loads(text)
        called = values["standby"]
        standby = None if called is None else _standby(called)
        replacing = tuple(map(_standby, values["replacing"]))
        growth = values["growth"]
        if growth is not None:
            growth = Growth(growth["pipeline"], tuple(growth["nodes"]))
        cut = values["cut"]
        if cut is not None:
            cut = NewCut(tuple((number, tuple(nodes)) for number, nodes in cut["crews"]))
        lost, leaving = frozenset(values["lost"]), tuple(values["leaving"])
        renewing = tuple(values["renewing"])
        return cls(lost, standby, leaving, replacing, growth, cut, renewing)


def _fields(standby: Standby) -> dict[str, Any]:
    place, node = standby
    return {**asdict(place), "node": node}


def _standby(fields: Mapping[str, Any]) -> Standby:
    return Vacancy(fields["pipeline"], fields["rank"]), fields["node"]
