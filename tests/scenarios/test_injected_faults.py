"""Whatever an injected fault does, the node is lost and the run is the undisturbed one."""

import pytest
from evidence import Expected
from scenario_runner import ScenarioRunner
from tiny_gpt import Shape

from megatron_bamboo.rehearsal.fault import How

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
    How.RAISE: "its worker raised InjectedError",
    How.EXIT: "its worker ended with status 0",
    How.HANG: "its worker was stuck for ",
}


@pytest.mark.parametrize("how", How)
def test_it_is_survived(scenarios: ScenarioRunner, how: How) -> None:
    shape = LONG if how is How.STOP_AGENT else SHAPE
    job = scenarios.run(
        shape, "eager", f"node1@iter3:#7:{how}".removesuffix(":kill"), more_flags=LEASE
    )
    ((_, sign),) = job.result.lost
    assert sign.startswith(SIGNS[how])
    (fault,) = job.events("fault")
    assert (fault["source"], fault["step"], fault["how"]) == ("node1", 3, how)
    assert scenarios.complaints(job, Expected(shape, "eager", ["node1"])) == []
