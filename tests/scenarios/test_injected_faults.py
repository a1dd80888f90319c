"""Whatever an injected fault does, the node is lost and the run is the undisturbed one."""

import pytest
from evidence import Expected
from in_ci import in_ci
from needs import missing
from scenario_runner import ScenarioRunner
from tiny_gpt import Shape

from megatron_bamboo.agent.outcome import Status
from megatron_bamboo.rehearsal.fault import LOSSES, How
from megatron_bamboo.rehearsal.networks import why_not

pytestmark = pytest.mark.multiprocess

LEASE = ("--bamboo-lease", "2")
SHAPE = Shape(3, 1, num_steps=8)
# A worker whose agent is stopped trains on: for longer than a lease.
LONG = Shape(3, 1, num_steps=60, variant="emulated")
SIGNS = {
    How.KILL: "its connection closed",
    How.KILL_WORKER: "its worker was ended by signal 9",
    How.KILL_AGENT: "its connection closed",
    How.STOP: "nothing was heard of it for 2.",
    How.STOP_WORKER: "its worker did not run for 2.",
    How.STOP_AGENT: "nothing was heard of it for 2.",
    How.CUT: "nothing was heard of it for 2.",
    How.RAISE: "its worker raised InjectedError",
    How.EXIT: "its worker ended with status 0",
    How.HANG: "its worker was stuck for ",
}


@pytest.mark.parametrize("how", in_ci(LOSSES, How.KILL_AGENT, How.CUT, How.EXIT, How.HANG))
def test_it_is_survived(scenarios: ScenarioRunner, how: How) -> None:
    if how is How.CUT and (reason := why_not()) is not None:
        missing("netns", reason)
    shape = LONG if how is How.STOP_AGENT else SHAPE
    job = scenarios.run(
        shape, "eager", f"node1@iter3:#7:{how}".removesuffix(":kill"), more_flags=LEASE
    )
    ((_, sign),) = job.result.lost
    assert sign.startswith(SIGNS[how])
    (fault,) = job.events("fault")
    assert (fault["source"], fault["step"], fault["how"]) == ("node1", 3, how)
    assert scenarios.complaints(job, Expected(shape, "eager", ["node1"])) == []


def test_a_hang_in_what_a_shadow_does_for_the_first_time_is_its_own(
    scenarios: ScenarioRunner,
) -> None:
    """Those who wait for it do not give up before."""
    job = scenarios.run(
        SHAPE, "lazy", "node2@iter3:2.0B0", "node1@iter3:2.0B1:hang", more_flags=LEASE
    )
    assert job.result.status == Status.NO_HOLDER
    assert [node for node, _ in job.result.lost] == ["node2", "node1"]
    assert job.result.lost[1][1].startswith("its worker was stuck for ")
