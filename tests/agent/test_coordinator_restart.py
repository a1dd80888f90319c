"""A coordinator dies at every one of its writes: the next one comes to the same decisions."""

import asyncio
import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from led_cluster import Writer

from megatron_bamboo.agent.coordinator import Coordinator
from megatron_bamboo.agent.job import JobShape, JobSpec
from megatron_bamboo.agent.report import Reporter
from megatron_bamboo.agent.telling import Announcer
from megatron_bamboo.membership.decision import Record, StepReport
from megatron_bamboo.membership.store_server import AgentLink
from megatron_bamboo.membership.table import Change, Nowhere, Put, Said, Table
from megatron_bamboo.planner.arrangement import equal_pipelines
from megatron_bamboo.planner.plan import Plan

VECTOR = ((2.5).hex(),)
LAST_STEP = 6
NODES, STANDBY = tuple(f"node{number}" for number in range(4)), "node4"
SHAPE = JobShape(equal_pipelines(4, 1, 2), "lazy", train_iters=LAST_STEP, global_batch_size=2)
SPEC = JobSpec(NODES, SHAPE, Path("/nowhere"), standbys=(STANDBY,))
LOSSES = {2: "node2", 4: "node0"}
"""By step the node that is lost in it: first with a standby to take its place, then without."""
QUIET_ROUNDS = 20


class Killed(BaseException):
    """The coordinator is gone, with whatever it held."""


class Disk(Nowhere):
    """Keeps all writes, and kills the coordinator at one of its own."""

    def __init__(self, kill_at: tuple[int, str] | None) -> None:
        self.writes: list[Sequence[Change]] = []
        self.is_worker = False
        """Whether it is a worker that writes."""
        self._kill_at = kill_at
        self._num_own = 0

    def load(self) -> list[Change]:
        return [change for write in self.writes for change in write]

    def keep(self, changes: Sequence[Change]) -> None:
        self._num_own += not self.is_worker
        self._die("before")
        self.writes.append(changes)
        self._die("after")

    def _die(self, moment: str) -> None:
        if self._kill_at == (self._num_own, moment) and not self.is_worker:
            self._kill_at = None
            raise Killed

    @property
    def num_own(self) -> int:
        """How many writes were the coordinators'."""
        return self._num_own

    def facts(self) -> list[dict[str, Any]]:
        return [json.loads(change.text) for change in self.load() if isinstance(change, Said)]


class Cluster:
    """The nodes of a job, which live on while its coordinators die; they do one thing at a time,
    when whoever leads has nothing left to do."""

    def __init__(self, disk: Disk) -> None:
        self.disk = disk
        self.dead: set[str] = set()
        self.step = 0
        self.num_lives = 0

    def run(self) -> None:
        while True:
            self.num_lives += 1
            assert self.num_lives <= 3, "a coordinator died that nobody killed"
            with contextlib.suppress(Killed):
                asyncio.run(self._live())
                return

    async def _live(self) -> None:
        self._table = table = Table(self.disk)
        coordinator = Coordinator(SPEC, table, Announcer(table, "test"), Reporter(table, SHAPE))
        self._members = coordinator.members
        async with asyncio.timeout(20):
            await asyncio.gather(coordinator.run(), self._act())

    async def _act(self) -> None:
        for node in (STANDBY, *NODES):
            if node not in self.dead and node not in self._members.lost:
                self._members.joined(self._link(node))
                self._members.heard(self._link(node), {"op": "started", "worker": node, "pid": 1})
        for node in self.dead:
            # Its lease has run out.
            self._members.fence(node, "it is gone")
        while not self._is_over():
            written = -1
            while written != (written := len(self.disk.writes)):
                for _ in range(QUIET_ROUNDS):
                    await asyncio.sleep(0)
            self._do_next()

    def _is_over(self) -> bool:
        return self._table.get("said/finished") is not None

    def _do_next(self) -> None:
        """What the nodes do next in whatever state the job is."""
        epoch = self._table.get("epoch")
        if epoch is None or self._call_standby():
            return
        value = self._table.get(f"plan/{int(epoch)}")
        assert value is not None
        plan = Plan.from_json(value)
        if self._table.get(f"ending/{plan.epoch}") is not None:
            self._leave(plan)
        elif self.step < LAST_STEP:
            self._pass_step(plan)
        else:
            self._finish(plan)

    def _call_standby(self) -> bool:
        is_called = self._table.get(f"called/{STANDBY}") is not None
        is_new = is_called and self._table.get(f"ready/{STANDBY}") is None
        if is_new:
            self._write(f"ready/{STANDBY}", "1")
        return is_new

    def _leave(self, plan: Plan) -> None:
        for node in set(plan.nodes) - self.dead:
            record = Record(node, self.step + 1, entered=False, passed=False)
            self._write(f"record/{plan.epoch}/{node}", record.to_json())

    def _pass_step(self, plan: Plan) -> None:
        victim = LOSSES.get(self.step + 1)
        if victim is not None and victim not in self.dead:
            self.dead.add(victim)
            self._members.fence(victim, "it is gone")
        elif not self.dead & set(plan.nodes):
            self.step += 1
            report = StepReport(
                self.step,
                plan.epoch,
                (1.0).hex(),
                0.1,
                None,
                2 * self.step,
                0.1,
                VECTOR,
                differences=("a difference",) if self.step == 3 else (),
            )
            self._write(f"passed/{self.step}", report.to_json())

    def _finish(self, plan: Plan) -> None:
        last = (plan if plan.change is None else plan.made()).nodes
        for node in last:
            self._write(f"done/{node}", "1")
        for node in last:
            exited = {"op": "exited", "worker": node, "status": 0}
            self._members.heard(self._link(node), exited)

    def _write(self, key: str, value: str) -> None:
        with self._as_worker():
            self._table.compare_set(key, None, value.encode())

    @contextlib.contextmanager
    def _as_worker(self) -> Iterator[None]:
        self.disk.is_worker = True
        try:
            yield
        finally:
            self.disk.is_worker = False

    @staticmethod
    def _link(node: str) -> AgentLink:
        return AgentLink(node, 100, Writer(), node)  # type: ignore[arg-type]


def lines_of(disk: Disk) -> list[str]:
    return [fact["line"].split("] ", 1)[1] for fact in disk.facts() if "line" in fact]


def events_of(disk: Disk) -> list[dict[str, Any]]:
    events = (fact["event"] for fact in disk.facts() if "event" in fact)
    clocks = ("time", "unix")
    return [
        {name: value for name, value in event.items() if name not in clocks}
        for event in events
        if event["event"] != "agent_back"
    ]


def plans_of(disk: Disk) -> list[Plan]:
    """All that were ever written: old ones are forgotten."""
    puts = [change for change in disk.load() if isinstance(change, Put)]
    return [Plan.from_json(put.value) for put in puts if put.key.startswith("plan/")]


@pytest.fixture(scope="module")
def undisturbed() -> Disk:
    disk = Disk(None)
    Cluster(disk).run()
    return disk


def test_the_undisturbed_job_has_all_that_a_coordinator_decides(undisturbed: Disk) -> None:
    kinds = [event["event"] for event in events_of(undisturbed)]
    assert kinds.count("loss") == kinds.count("changed") == len(LOSSES)
    reasons = [plan.reason for plan in plans_of(undisturbed)]
    assert any("node4 takes stage 2" in reason for reason in reasons)
    assert any("shadows" in reason for reason in reasons)
    assert sum("iteration " in line for line in lines_of(undisturbed)) == LAST_STEP
    assert kinds[-1] == "finished_job"


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_death_at_any_write_changes_no_decision(undisturbed: Disk, moment: str) -> None:
    for number in range(1, undisturbed.num_own + 1):
        disk = Disk((number, moment))
        cluster = Cluster(disk)
        cluster.run()
        what = f"killed {moment} write {number}"
        assert cluster.num_lives == 2, what
        assert plans_of(disk) == plans_of(undisturbed), what
        assert sorted(lines_of(disk)) == sorted(lines_of(undisturbed)), what
        assert sorted(map(str, events_of(disk))) == sorted(map(str, events_of(undisturbed))), what
