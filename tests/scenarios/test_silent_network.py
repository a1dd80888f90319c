"""Networks fall silent: no connection closes, nothing arrives, all processes live on.

Of a node altogether, or between two nodes that both still reach the coordinator.
"""

import re

import pytest
from evidence import Expected
from in_ci import in_ci
from namespaces import Namespaces, why_not
from needs import missing
from scenario_runner import ScenarioRunner
from tiny_gpt import Shape

pytestmark = pytest.mark.multiprocess

LEASE_SECONDS = 3.0
SHAPE = Shape(3, 1, num_steps=15)


@pytest.mark.parametrize("victim", in_ci(["node0", "node1"], "node1"))
def test_a_node_whose_link_is_down_is_taken_over(scenarios: ScenarioRunner, victim: str) -> None:
    if (reason := why_not()) is not None:
        missing("netns", reason)
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


@pytest.mark.parametrize(
    "ways",
    [
        pytest.param(
            (("node1", "node2"), ("node2", "node1")), id="both ways", marks=pytest.mark.slow
        ),
        pytest.param((("node2", "node1"),), id="one way"),
    ],
)
def test_of_two_that_do_not_reach_each_other_one_is_taken_over(
    scenarios: ScenarioRunner, ways: tuple[tuple[str, str], ...]
) -> None:
    if (reason := why_not()) is not None:
        missing("netns", reason)
    flags = ("--bamboo-lease", f"{LEASE_SECONDS:g}")
    with Namespaces(SHAPE.num_nodes) as network:
        job = scenarios.start(SHAPE, "eager", more_flags=flags, namespaces=network.prefix)
        job.wait_for_step("node0", 4)
        for sender, receiver in ways:
            network.cut(sender, receiver)
        cut_since = job.now()
        finished = job.finish()
    (loss,) = finished.events("loss")
    assert loss["node"] == "node2"
    # Not at the end of anybody's patience: the groups' timeout is 45 s.
    assert loss["time"] - cut_since < 3 * LEASE_SECONDS + 15
    named = r"the link between node1 and node2 is broken: node[12] has waited for [0-9.]+ s in "
    named += r"[12]\.0RECV_[FB]\d of step [4-9], epoch 0, for what node[12] has sent; "
    assert re.match(named + "it is given up since it comes last in the plan$", loss["cause"])
    (line,) = [line for line in finished.result.lines if "] lost node2 (" in line]
    assert loss["cause"] in line
    assert scenarios.complaints(finished, Expected(SHAPE, "eager", ["node2"])) == []
