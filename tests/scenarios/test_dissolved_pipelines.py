"""A pipeline that nobody has whole any more is dissolved, and the others do its work.

The step in which it is lost is begun anew; beside an undisturbed run only the order of sums
differs.
"""

import pytest
import rounding
from scenario_runner import ScenarioRunner
from tiny_gpt import Shape

pytestmark = pytest.mark.multiprocess

TWO = Shape(2, 2, num_steps=8)
THREE = Shape(2, 3, num_steps=8)
LOSSES = {
    # Its neighbour is let go.
    "without replicas, in a backward": (TWO, "none", ("node3@iter3:1.0B1",), [8, 0]),
    "without replicas, at the commit": (TWO, "none", ("node0@iter3:0COMMIT",), [0, 8]),
    # The third is in a microbatch that its pipeline has only since the step was begun anew.
    "both holders, and one of another pipeline then": (
        THREE,
        "lazy",
        ("node0@iter3:0.0B3", "node1@iter3:1REDUCE", "node4@iter3:0.0F5"),
        [0, 8, 4],
    ),
    "one after the other": (
        THREE,
        "none",
        ("node2@iter3:0.0F2", "node5@iter4:1.0B5"),
        [12, 0, 0],
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_others_do_the_work(scenarios: ScenarioRunner, name: str) -> None:
    shape, redundancy, faults, shares = LOSSES[name]
    victims = [fault.partition("@")[0] for fault in faults]
    job = rounding.run(scenarios, shape, redundancy, *faults)
    whole = rounding.undisturbed(scenarios, shape)
    assert rounding.complaints(job, shape, victims, whole) == []
    said = "\n".join(job.result.lines)
    # Those that are let go may be enough to begin one of them again before the end.
    arranged = [event for kind in ("plan", "changed") for event in job.events(kind)]
    known = [event["pipelines"] for event in arranged if "pipelines" in event]
    assert shares in [[p["shape"]["num_microbatches"] for p in pipes] for pipes in known]
    survivors = [e["node"] for e in job.events("drained") if e["stays"]]
    assert all(f"{node} stays (its pipeline is dissolved)" in said for node in survivors)
    assert (len(survivors) > 0) == (redundancy == "none")
    assert "so it is dissolved; step" in said
