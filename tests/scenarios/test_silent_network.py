"""A node's network falls silent: no connection closes, nothing arrives, its processes live on."""

import pytest
from evidence import Expected
from namespaces import Namespaces, why_not
from scenario_runner import ScenarioRunner
from tiny_gpt import Shape

pytestmark = pytest.mark.multiprocess

LEASE_SECONDS = 3.0
SHAPE = Shape(3, 1, num_steps=15)


@pytest.mark.parametrize("victim", ["node0", "node1"])
def test_a_node_whose_link_is_down_is_taken_over(scenarios: ScenarioRunner, victim: str) -> None:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    flags = ("--bamboo-lease", f"{LEASE_SECONDS:g}")
    with Namespaces(SHAPE.num_nodes) as network:
        job = scenarios.start(SHAPE, "eager", more_flags=flags, namespaces=network.prefix)
        job.wait_for_step(victim, 3)
        network.silence(victim)
        silent_since = job.now()
        finished = job.finish()
    assert finished.result.lost[0][1].startswith("nothing was heard of it for 3.")
    (loss,) = finished.events("loss")
    assert loss["time"] - silent_since < LEASE_SECONDS + 10
    assert scenarios.complaints(finished, Expected(SHAPE, "eager", [victim])) == []
