"""Why an epoch ends, as the store has it."""

import pytest

from megatron_bamboo.agent.ending import Ending
from megatron_bamboo.planner.growing import Growth
from megatron_bamboo.planner.healing import Vacancy
from megatron_bamboo.planner.new_cut import NewCut


@pytest.mark.parametrize(
    "ending",
    [
        Ending(frozenset({"node1", "node2"})),
        Ending(standby=(Vacancy(1, 2), "node8")),
        Ending(leaving=("node3", "node1"), replacing=((Vacancy(0, 1), "node8"),)),
        Ending(cut=NewCut(((1, ("node3", "node9")), (2, ())))),
        Ending(growth=Growth(1, ("node6", "node2.2"))),
        Ending(renewing=("node0", "node2.2")),
    ],
    ids=["losses", "a standby", "who leaves", "a new cut", "a pipeline that begins", "all"],
)
def test_any_coordinator_reads_what_was_announced(ending: Ending) -> None:
    assert Ending.from_json(ending.to_json().encode()) == ending
