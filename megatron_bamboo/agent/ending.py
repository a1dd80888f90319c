"""Why an epoch ends: announced in the store before it does, so that any coordinator goes on."""

import json
from collections.abc import Set
from dataclasses import asdict, dataclass
from typing import Self

from megatron_bamboo.planner.growing import Growth
from megatron_bamboo.planner.healing import Vacancy

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
    growth: Growth | None = None
    """Who becomes a pipeline."""

    def to_json(self) -> str:
        """The value of ``ending/<epoch>``."""
        called = None
        if self.standby is not None:
            called = {**asdict(self.standby[0]), "node": self.standby[1]}
        values = {"lost": sorted(self.lost), "standby": called, "leaving": self.leaving}
        growth = None if self.growth is None else asdict(self.growth)
        return json.dumps({**values, "growth": growth})

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """The ending that ``to_json`` wrote."""
        values = json.loads(text)
        called = values["standby"]
        standby = None
        if called is not None:
            standby = Vacancy(called["pipeline"], called["rank"]), called["node"]
        growth = values["growth"]
        if growth is not None:
            growth = Growth(growth["pipeline"], tuple(growth["nodes"]))
        return cls(frozenset(values["lost"]), standby, tuple(values["leaving"]), growth)
