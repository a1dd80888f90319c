"""The coordinator against a table in memory: whom it asks, what it publishes, how long it waits."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron_bamboo.agent import calls, headway
from megatron_bamboo.agent.coordinator import Coordinator, JobFailed, JobStopped
from megatron_bamboo.agent.job import Deadlines, JobShape, JobSpec
from megatron_bamboo.agent.long_waits import LongWaits
from megatron_bamboo.agent.members import FINISH
from megatron_bamboo.agent.report import Reporter
from megatron_bamboo.agent.telling import Announcer
from megatron_bamboo.evaluation.due import Kind
from megatron_bamboo.evaluation.outcome import Evaluated
from megatron_bamboo.membership.decision import FENCED_VALUE, Record, StepReport
from megatron_bamboo.membership.leaving import Notice
from megatron_bamboo.membership.stopping import STOP_KEY, StopWish
from megatron_bamboo.membership.store_server import AgentLink
from megatron_bamboo.membership.table import Change, Nowhere, Said, Table
from megatron_bamboo.membership.waits import Sent, Wait, Waiting
from megatron_bamboo.planner.arrangement import equal_pipelines
from megatron_bamboo.planner.plan import Checkpoint, Plan
from megatron_bamboo.planner.taking_over import NoHolder

NODES = tuple(f"node{number}" for number in range(4))
LATER = ("node6", "node7", "node8", "node9")
"""Nodes of which an open job hears when they join."""
VECTOR = ((2.5).hex(),)


class Writer:
    """Stands in for an agent's connection; keeps what the agent is told."""

    def __init__(self) -> None:
        self.told: list[bytes] = []

    def is_closing(self) -> bool:
        return False

    def write(self, frame: bytes) -> None:
        self.told.append(frame)


class Memory(Nowhere):
    """Keeps in memory what was changed and said."""

    def __init__(self) -> None:
        self.changes: list[Change] = []

    def load(self) -> list[Change]:
        return list(self.changes)

    def keep(self, changes: Sequence[Change]) -> None:
        self.changes += changes

    @property
    def facts(self) -> list[dict[str, Any]]:
        return [json.loads(c.text) for c in self.changes if isinstance(c, Said)]


class Cluster:
    """A coordinator, and nodes that do what a test says."""

    def __init__(
        self,
        tmp_path: Path,
        deadlines: Deadlines,
        standbys: Sequence[str] = (),
        nodes: Sequence[str] = NODES,
        respawn_seconds: float | None = None,
        memory: Memory | None = None,
        **more: Any,
    ) -> None:
        shape = JobShape(
            equal_pipelines(4, 1, 2), "lazy", train_iters=9, global_batch_size=2, **more
        )
        self.memory = Memory() if memory is None else memory
        self.table = Table(self.memory)
        spec = JobSpec(
            tuple(nodes),
            shape,
            tmp_path,
            deadlines=deadlines,
            standbys=tuple(standbys),
            respawn_seconds=respawn_seconds,
        )
        reporter, events = Reporter(self.table, shape), Announcer(self.table, "coordinator")
        self.coordinator = Coordinator(spec, self.table, events, reporter)
        self.links = {
            node: AgentLink(node, 100, Writer())  # type: ignore[arg-type]
            for node in (*NODES, *standbys, *LATER)
        }

    @property
    def said(self) -> list[str]:
        return [fact["line"] for fact in self.memory.facts if "line" in fact]

    def join(self, *nodes: str) -> None:
        for node in nodes:
            self.coordinator.members.joined(self.links[node])
            self.table.set(f"ready/{node}", b"1")

    def lose(self, node: str) -> None:
        self.coordinator.members.closed(self.links[node])

    def finish(self, *nodes: str) -> None:
        for node in nodes:
            self.table.set(f"done/{node}", b"1")
            ended = {"op": "exited", "worker": node, "status": 0}
            self.coordinator.members.heard(self.links[node], ended)

    def record(self, epoch: int, node: str, step: int, entered: bool, passed: bool) -> None:
        record = Record(node, step, entered, passed, VECTOR if passed else None)
        value = record.to_json().encode()
        key = f"record/{epoch}/{node}"
        assert self.table.compare_set(key, None, value) == value

    def confirm(self, step: int, epoch: int) -> None:
        report = StepReport(step, epoch, (1.0).hex(), 0.1, None, 2 * step, 0.1, VECTOR)
        self.table.set(f"passed/{step}", report.to_json().encode())

    def wait(self, node: str, action: str, awaits: str, *sent: Sent) -> None:
        """A node says that it is there, and for whom it has waited for 20 s."""
        wait = Wait(node, 1, 2, action, Waiting((awaits,), sent), 20.0, 10.0)
        alive = {"op": "alive", "word": "", "places": {}, "waits": [wait.to_fields()]}
        self.coordinator.members.heard(self.links[node], json.loads(json.dumps(alive)))

    def said_iterations(self) -> int:
        return sum("] iteration " in line for line in self.said)

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await asyncio.sleep(0.001)

    async def plan(self, epoch: int) -> Plan:
        assert await self.table.wait([f"plan/{epoch}"], 5) == ()
        assert self.table.get("epoch") == str(epoch).encode()
        value = self.table.get(f"plan/{epoch}")
        assert value is not None
        return Plan.from_json(value)


@pytest.fixture
def lead(tmp_path: Path) -> Callable[..., Cluster]:
    """Run a coordinator beside a test's story."""

    def run(
        story: Callable[[Cluster], Awaitable[None]],
        deadlines: Deadlines = Deadlines(),  # noqa: B008
        standbys: Sequence[str] = (),
        **more: Any,
    ) -> Cluster:
        cluster = Cluster(tmp_path, deadlines, standbys, **more)

        async def both() -> None:
            async with asyncio.timeout(20):
                await asyncio.gather(cluster.coordinator.run(), story(cluster))

        asyncio.run(both())
        return cluster

    return run


Lead = Callable[..., Cluster]


def test_a_change_of_epoch_from_hello_to_done(lead: Lead) -> None:
    async def story(cluster: Cluster) -> None:
        cluster.join(*NODES)
        assert (await cluster.plan(0)).nodes == NODES
        cluster.confirm(1, 0)
        cluster.lose("node2")
        assert await cluster.table.wait(["ending/0"], 5) == ()
        announced = json.loads(cluster.table.get("ending/0") or b"")
        assert announced["lost"] == ["node2"]
        cluster.record(0, "node0", 1, True, True)
        cluster.record(0, "node1", 2, True, False)
        cluster.record(0, "node3", 2, True, False)
        plan = await cluster.plan(1)
        assert plan.pipelines[0].stages == ("node0", "node1", "node1", "node3")
        assert plan.lost == ("node2",)
        assert plan.decision is not None
        assert (plan.decision.step, plan.decision.applied) == (2, False)
        cluster.finish("node0", "node1", "node3")

    said = lead(story).said
    assert sum("iteration        1/" in line for line in said) == 1
    assert sum("lost node2 (its connection closed); epoch 1" in line for line in said) == 1


def test_while_an_open_job_waits_each_who_comes_or_goes_is_named(lead: Lead) -> None:
    async def story(cluster: Cluster) -> None:
        for come in ("node2", "node1"):
            cluster.join(come)
            await cluster.until(lambda come=come: come in "".join(cluster.said))
        cluster.lose("node2")
        await cluster.until(lambda: len(cluster.said) == 4)
        cluster.join("node0", "node3", "node6")
        await cluster.plan(0)
        cluster.finish("node0", "node1", "node3", "node6")

    lines = [line.partition("] ")[2] for line in lead(story, nodes=()).said[:5]]
    assert lines[:4] == [
        "1 of 4 nodes are there: node2",
        "2 of 4 nodes are there: node2, node1",
        "lost node2 (its connection closed) before the start",
        "1 of 4 nodes are there: node1",
    ]
    assert lines[4].startswith("started")


def test_the_line_of_the_start_names_those_who_train_and_standbys_and_none_that_was_lost(
    lead: Lead,
) -> None:
    async def story(cluster: Cluster) -> None:
        cluster.join("node0", "node1")
        cluster.lose("node1")
        cluster.join("node6", "node2", "node3", "node7")
        cluster.lose("node2")
        assert (await cluster.plan(0)).nodes == ("node0", "node3", "node6", "node7")
        cluster.join("node8")
        await cluster.until(lambda: any("node8" in line for line in cluster.said))
        cluster.finish("node0", "node3", "node6", "node7")

    said = [line.split("] ", 1)[1] for line in lead(story, nodes=()).said]
    assert said[:2] == [
        "started, with process groups: node0 100, node3 100, node6 100, node7 100",
        "node8 has joined as a standby, with process group 100",
    ]


def test_the_line_of_the_start_names_standbys_as_such(lead: Lead) -> None:
    async def story(cluster: Cluster) -> None:
        cluster.join("node4", *NODES)
        await cluster.plan(0)
        cluster.finish(*NODES)

    said = lead(story, standbys=("node4",)).said
    assert said[0].endswith(
        "started, with process groups: node0 100, node1 100, node2 100, node3 100; "
        "standbys: node4 100"
    )


def ask_to_stop(cluster: Cluster, saves: bool) -> None:
    cluster.table.set(STOP_KEY, StopWish(saves, "a test").to_json().encode())


def test_a_job_that_is_to_save_and_end_asks_its_nodes_and_moves_nothing_more(lead: Lead) -> None:
    async def story(cluster: Cluster) -> None:
        cluster.join(*NODES)
        await cluster.plan(0)
        cluster.confirm(1, 0)
        cluster.lose("node2")
        await cluster.table.wait(["ending/0"], 5)
        ask_to_stop(cluster, saves=True)
        for node in ("node0", "node1", "node3"):
            cluster.record(0, node, 2, True, False)
        await cluster.plan(1)
        for node in ("node0", "node1", "node3"):
            told = cluster.links[node].writer.told  # type: ignore[attr-defined]
            assert json.loads(told[-1]) == FINISH
        for step in (2, 3):
            cluster.confirm(step, 1)
            await cluster.until(lambda step=step: cluster.said_iterations() == step)
        assert cluster.table.get("ending/1") is None, "stages were given new shadows"
        saved = {"step": 3, "epoch": 1, "folder": "/saves", "seconds": 0.1, "failure": None}
        cluster.table.set("saved/3", json.dumps(saved).encode())
        cluster.finish("node0", "node1", "node3")

    with pytest.raises(JobStopped) as stopped:
        lead(story)
    assert str(stopped.value) == (
        "stopped after step 3 of 9 (a test); start it again with --load /saves, which holds step 3"
    )


@pytest.mark.parametrize(("saves", "has_begun"), [(False, True), (True, False)])
def test_a_job_that_has_nothing_to_save_first_ends_at_once(
    lead: Lead, saves: bool, has_begun: bool
) -> None:
    async def story(cluster: Cluster) -> None:
        cluster.join(*(NODES if has_begun else NODES[:3]))
        ask_to_stop(cluster, saves)

    with pytest.raises(JobStopped, match=r"stopped after step 0 of 9 \(a test\)"):
        lead(story)


def test_at_a_broken_link_one_node_is_given_up(lead: Lead) -> None:
    async def story(cluster: Cluster) -> None:
        cluster.coordinator.members.waits = LongWaits(1.0)
        cluster.join(*NODES)
        await cluster.plan(0)
        while not cluster.coordinator.members.lost:
            cluster.wait("node1", "1.0RECV_B0", "node2", Sent("node2", 2, "2.0RECV_F0"))
            cluster.wait("node2", "2.0RECV_F0", "node1")
            await asyncio.sleep(0.1)
        for node in ("node0", "node1", "node3"):
            cluster.record(0, node, 2, False, False)
        assert (await cluster.plan(1)).lost == ("node2",)
        assert cluster.coordinator.members.waits.lasting() == ()
        cluster.finish("node0", "node1", "node3")

    (line,) = [line for line in lead(story).said if "] lost " in line]
    assert "lost node2 (the link between node1 and node2 is broken: node2 has waited for" in line
    assert "in 2.0RECV_F0 of step 2, epoch 0, for what node1 has sent; it is given up" in line


@pytest.mark.parametrize("confirmed_in", [0, 1])
def test_only_a_confirmation_of_the_ended_epoch_counts(lead: Lead, confirmed_in: int) -> None:
    async def story(cluster: Cluster) -> None:
        cluster.join(*NODES)
        cluster.lose("node2")
        await cluster.table.wait(["ending/0"], 5)
        for node in ("node0", "node1", "node3"):
            cluster.record(0, node, 2, False, False)
        await cluster.plan(1)
        # The worker of epoch 0 is a lost one that wrote late.
        cluster.confirm(2, confirmed_in)
        cluster.lose("node0")
        await cluster.table.wait(["ending/1"], 5)
        for node in ("node1", "node3"):
            cluster.record(1, node, 2, True, False)
        decision = (await cluster.plan(2)).decision
        assert decision is not None
        assert decision.applied == (confirmed_in == 1)
        assert decision.vector == (VECTOR if decision.applied else None)
        cluster.finish("node1", "node3")

    lead(story)


def test_keys_of_older_epochs_are_kept_until_nobody_can_need_them(lead: Lead) -> None:
    """Else a job that loses nodes now and then would grow without end."""

    async def story(cluster: Cluster) -> None:
        cluster.join(*NODES)
        for epoch, victim, left in ((0, "node2", "node0 node1 node3"), (1, "node0", "node1 node3")):
            await cluster.plan(epoch)
            cluster.table.set(f"group/{epoch}/all/0", b"address")
            cluster.lose(victim)
            await cluster.table.wait([f"ending/{epoch}"], 5)
            for node in left.split():
                cluster.table.set(f"progress/{epoch}/{node}", b"what it has done")
                cluster.record(epoch, node, 1, False, False)
        await cluster.plan(2)
        cluster.table.set("group/2/all/0", b"address")
        for step, groups, others in ((1, 3, 5), (2, 1, 0)):
            cluster.confirm(step, 2)
            await cluster.until(lambda step=step: cluster.said_iterations() == step)
            assert cluster.table.count("group/") == groups
            assert cluster.table.count("progress/") == cluster.table.count("record/") == others
        # The first plan is for those who come late.
        assert set(cluster.table.items("plan/")) == {"plan/0", "plan/2"}
        assert not {"ending/0", "ending/1"} & cluster.table.items("ending/").keys()
        cluster.finish("node1", "node3")

    lead(story)


class CountingTable(Table):
    """Counts how often a record is looked for."""

    number = 0

    def get(self, key: str) -> bytes | None:
        self.number += key.startswith("record/")
        return super().get(key)


def test_each_record_is_looked_for_a_few_times_however_many_come_one_by_one(tmp_path: Path) -> None:
    nodes = tuple(f"node{number}" for number in range(100))
    shape = JobShape(equal_pipelines(10, 10, 2), "lazy", train_iters=9, global_batch_size=20)
    table = CountingTable()
    reporter, events = Reporter(table, shape), Announcer(table, "coordinator")
    coordinator = Coordinator(JobSpec(nodes, shape, tmp_path), table, events, reporter)

    async def story() -> None:
        leading = asyncio.create_task(coordinator.run())
        links = {node: AgentLink(node, 100, Writer()) for node in nodes}  # type: ignore[arg-type]
        for node in nodes:
            coordinator.members.joined(links[node])
            table.set(f"ready/{node}", b"1")
        assert await table.wait(["plan/0"], 5) == ()
        coordinator.members.closed(links["node3"])
        assert await table.wait(["ending/0"], 5) == ()
        for node in nodes:
            if node != "node3":
                table.set(f"record/0/{node}", Record(node, 1, False, False).to_json().encode())
                await asyncio.sleep(0)
        assert await table.wait(["plan/1"], 5) == ()
        leading.cancel()

    asyncio.run(story())
    assert table.number <= 10 * len(nodes)


def test_old_reports_are_forgotten(lead: Lead, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headway, "KEPT_REPORTS", 2)

    async def story(cluster: Cluster) -> None:
        cluster.join(*NODES)
        await cluster.plan(0)
        for step in range(1, 6):
            cluster.confirm(step, 0)
            await cluster.until(lambda step=step: cluster.said_iterations() == step)
        assert list(cluster.table.items("passed/")) == ["passed/4", "passed/5"]
        cluster.finish(*NODES)

    lead(story)


def test_a_standby_that_never_gets_ready_gives_its_turn_away(
    lead: Lead, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else would be changed while it is waited for, and the job trains on meanwhile."""
    clock = [100.0]
    monkeypatch.setattr(calls, "monotonic", lambda: clock[0])

    async def story(cluster: Cluster) -> None:
        cluster.join(*NODES)
        cluster.coordinator.members.joined(cluster.links["node4"])
        await cluster.plan(0)
        cluster.confirm(1, 0)
        cluster.lose("node2")
        for node in ("node0", "node1", "node3"):
            cluster.record(0, node, 1, True, True)
        await cluster.plan(1)
        cluster.confirm(2, 1)
        assert await cluster.table.wait(["called/node4"], 5) == ()
        for step, later in ((3, 0.0), (4, 29.0)):
            clock[0] += later
            cluster.confirm(step, 1)
            await cluster.until(lambda: cluster.said_iterations() == step)  # noqa: B023
        assert cluster.table.get("lost/node4") is None
        clock[0] += 2.0
        cluster.confirm(5, 1)
        assert await cluster.table.wait(["lost/node4", "ending/1"], 5) == ()
        for node in ("node0", "node1", "node3"):
            cluster.record(1, node, 5, True, True)
        plan = await cluster.plan(2)
        assert plan.change is not None and len(plan.change.transfers) == 2
        cluster.finish("node0", "node1", "node3")

    cluster = lead(story, Deadlines(stall_seconds=30.0), standbys=("node4",))
    assert cluster.coordinator.members.lost["node4"] == (
        "it was called for a place and was not ready within 30 s"
    )


def test_a_silent_node_is_fenced_told_to_stop_and_lost(lead: Lead) -> None:
    async def story(cluster: Cluster) -> None:
        cluster.join(*NODES)
        cluster.lose("node2")
        await cluster.table.wait(["ending/0"], 5)
        cluster.record(0, "node1", 1, False, False)
        cluster.record(0, "node3", 1, False, False)
        plan = await cluster.plan(1)
        assert plan.lost == ("node0", "node2")
        assert cluster.table.get("record/0/node0") == FENCED_VALUE
        assert b"stop" in cluster.links["node0"].writer.told[-1]  # type: ignore[attr-defined]
        cluster.finish("node1", "node3")

    began = time.monotonic()
    cluster = lead(story, Deadlines(record_seconds=0.2))
    assert time.monotonic() - began < 2
    assert any("node0 (it left no record within 0.2 s)" in line for line in cluster.said)


def test_a_worker_that_is_still_starting_gets_the_time_of_a_start(lead: Lead) -> None:
    async def story(cluster: Cluster) -> None:
        cluster.join(*NODES)
        cluster.table.delete("ready/node0")
        cluster.lose("node2")
        await cluster.table.wait(["ending/0"], 5)
        cluster.record(0, "node1", 1, False, False)
        cluster.record(0, "node3", 1, False, False)
        await asyncio.sleep(0.3)
        cluster.record(0, "node0", 1, False, False)
        assert (await cluster.plan(1)).lost == ("node2",)
        cluster.finish("node0", "node1", "node3")

    lead(story, Deadlines(record_seconds=0.1))


def test_a_node_lost_in_the_middle_of_a_decision_with_its_record_waits_its_turn(
    lead: Lead,
) -> None:
    async def story(cluster: Cluster) -> None:
        cluster.join(*NODES)
        cluster.lose("node2")
        await cluster.table.wait(["ending/0"], 5)
        cluster.record(0, "node0", 1, False, False)
        cluster.lose("node0")
        cluster.record(0, "node1", 1, False, False)
        cluster.record(0, "node3", 1, False, False)
        assert (await cluster.plan(1)).lost == ("node2",)
        await cluster.table.wait(["ending/1"], 5)
        cluster.record(1, "node1", 1, False, False)
        cluster.record(1, "node3", 1, False, False)
        assert (await cluster.plan(2)).lost == ("node0",)
        cluster.finish("node1", "node3")

    lead(story)


def test_neighbours_lost_together_are_the_end(lead: Lead) -> None:
    async def story(cluster: Cluster) -> None:
        cluster.join(*NODES)
        cluster.lose("node2")
        cluster.lose("node1")
        await cluster.table.wait(["ending/0"], 5)
        cluster.record(0, "node0", 1, False, False)
        cluster.record(0, "node3", 1, False, False)

    with pytest.raises(NoHolder, match="stage 2 has no live holder"):
        lead(story)


def test_all_who_live_begin_again_from_the_last_save(lead: Lead) -> None:
    async def story(cluster: Cluster) -> None:
        cluster.join(*NODES)
        await cluster.plan(0)
        for step in (1, 2, 3):
            cluster.confirm(step, 0)
        saved = {"step": 2, "epoch": 0, "folder": "/saves", "seconds": 0.1, "failure": None}
        cluster.table.set("saved/2", json.dumps(saved).encode())
        await cluster.until(lambda: cluster.said_iterations() == 3)
        cluster.lose("node2")
        cluster.lose("node1")
        await cluster.table.wait(["ending/0"], 5)
        cluster.record(0, "node0", 4, True, True)
        cluster.record(0, "node3", 4, True, False)
        plan = await cluster.plan(1)
        assert plan.restored == Checkpoint(2, "/saves")
        assert plan.pipelines[0].stages == ("node0", "node0", "node3", "node3")
        assert cluster.table.get("ready/node0") is None
        assert cluster.table.get("passed/3") is None
        # A worker says late what it did before; then the step passes again.
        cluster.confirm(4, 0)
        assert cluster.table.get("passed/4") is None
        for step in range(3, 10):
            cluster.confirm(step, 1)
        await cluster.until(lambda: cluster.said_iterations() == 10)
        cluster.finish("node0", "node3")

    cluster = lead(story, restores=True)
    said = "\n".join(cluster.said)
    assert "both lost): 2 iterations with 4 samples are undone, to be done again" in said
    assert "all begin again from step 2 in /saves, on 2 nodes for the 4 stages" in said
    losses = [fact["loss"] for fact in cluster.memory.facts if "loss" in fact]
    assert [(loss["step"], loss.get("again")) for loss in losses] == [
        *((1, None), (2, None), (3, None), (3, 1), (4, 1)),
        *((step, None) for step in range(5, 10)),
    ]


async def lose_all(cluster: Cluster) -> None:
    """Let an open job lose its first nodes, all together, and wait for others."""
    cluster.join(*NODES)
    await cluster.plan(0)
    cluster.confirm(1, 0)
    await cluster.until(lambda: cluster.said_iterations() == 1)
    for node in NODES:
        cluster.lose(node)
    assert await cluster.table.wait(["awaited/0"], 5) == ()


def of_waiting(cluster: Cluster) -> list[str]:
    return [
        line.split("] ", 1)[1] for line in cluster.said if "nodes" in line and "no live" in line
    ]


def test_a_job_of_which_nobody_is_left_says_at_once_that_it_waits_and_begins_with_all_who_come(
    lead: Lead, tmp_path: Path
) -> None:
    async def story(cluster: Cluster) -> None:
        await lose_all(cluster)
        assert len(of_waiting(cluster)) == 1
        for node in LATER:
            assert cluster.table.get("plan/1") is None
            cluster.join(node)
            await asyncio.sleep(0.01)
        plan = await cluster.plan(1)
        assert plan.pipelines[0].stages == LATER
        assert plan.restored == Checkpoint(0, None)
        cluster.finish(*LATER)

    limits = Deadlines(gathering_seconds=60.0)
    cluster = lead(story, limits, nodes=(), restores=True, policy="bamboo")
    line, begun = of_waiting(cluster)
    assert line == (
        "lost node0, node1, node2, node3 (its connection closed): pipeline 0: stage 0 has no live "
        "holder (node0 and node3 are both lost); waits up to 120 s for nodes; they join with "
        f"bamboo agent --join {tmp_path}/coordinator.json"
    )
    assert begun.endswith(
        "are both lost); all 4 nodes are there: 1 iteration with 2 samples are undone, to be done "
        "again"
    )
    (event,) = (
        fact["event"]
        for fact in cluster.memory.facts
        if fact.get("event", {}).get("event") == "waits_for_nodes"
    )
    assert (event["lost"], event["wanted"], event["seconds"]) == (list(NODES), 4, 120.0)
    assert event["unheld"] == [[0, 0], [0, 1], [0, 2], [0, 3]]


def test_with_no_other_newcomer_for_a_while_those_begin_who_are_there(lead: Lead) -> None:
    async def story(cluster: Cluster) -> None:
        await lose_all(cluster)
        cluster.join("node6")
        cluster.lose("node6")
        cluster.join("node7", "node8")
        plan = await cluster.plan(1)
        assert plan.pipelines[0].stages == ("node7", "node7", "node8", "node8")
        cluster.finish("node7", "node8")

    cluster = lead(story, Deadlines(gathering_seconds=0.2), nodes=(), restores=True)
    assert "2 of 4 nodes are there, and for 0.2 s no other has come" in of_waiting(cluster)[1]


def test_where_nobody_comes_in_time_the_stage_without_a_holder_is_the_end(lead: Lead) -> None:
    with pytest.raises(NoHolder, match="stage 0 has no live holder"):
        lead(lose_all, Deadlines(joining_seconds=0.5), nodes=(), restores=True)


def test_the_next_coordinator_waits_on_and_does_not_say_it_again(
    lead: Lead, tmp_path: Path
) -> None:
    first = Cluster(tmp_path, Deadlines(), nodes=(), restores=True)

    async def until_all_are_lost() -> None:
        leading = asyncio.create_task(first.coordinator.run())
        await lose_all(first)
        leading.cancel()

    async def story(cluster: Cluster) -> None:
        assert cluster.table.get("plan/1") is None
        cluster.join(*LATER)
        assert (await cluster.plan(1)).nodes == LATER
        cluster.finish(*LATER)

    asyncio.run(until_all_are_lost())
    cluster = lead(story, nodes=(), restores=True, memory=first.memory)
    assert sum("waits up to" in line for line in cluster.said) == 1


def test_where_lost_nodes_are_started_again_they_are_waited_for(lead: Lead) -> None:
    async def story(cluster: Cluster) -> None:
        await lose_all(cluster)
        again = tuple(f"{node}.2" for node in NODES)
        cluster.links |= {node: AgentLink(node, 101, Writer()) for node in again}  # type: ignore[arg-type]
        cluster.join(*again)
        assert (await cluster.plan(1)).nodes == again
        cluster.finish(*again)

    line, _ = of_waiting(lead(story, respawn_seconds=7.0, restores=True))
    assert line.endswith("; each lost one is started again 7 s after its loss")


def test_a_job_that_waits_for_nodes_has_nothing_to_save_and_ends_as_asked(lead: Lead) -> None:
    async def story(cluster: Cluster) -> None:
        await lose_all(cluster)
        ask_to_stop(cluster, saves=True)

    with pytest.raises(JobStopped, match=r"stopped after step 1 of 9 \(a test\)"):
        lead(story, nodes=(), restores=True)


def test_all_nodes_lost_together_are_the_end(lead: Lead) -> None:
    async def story(cluster: Cluster) -> None:
        cluster.join(*NODES)
        for node in NODES:
            cluster.lose(node)

    with pytest.raises(NoHolder, match="stage 0 has no live holder"):
        lead(story)


def test_an_agent_that_does_not_say_hello_is_named(lead: Lead) -> None:
    async def story(cluster: Cluster) -> None:
        cluster.join("node0", "node2", "node3")

    with pytest.raises(JobFailed, match=r"node1 did not start within 0\.1 s"):
        lead(story, Deadlines(joining_seconds=0.1))


def test_a_name_is_taken_once(lead: Lead) -> None:
    async def story(cluster: Cluster) -> None:
        cluster.join(*NODES)
        for name in ("node0", "node4"):
            link = AgentLink(name, 1, Writer())  # type: ignore[arg-type]
            with pytest.raises(ValueError, match=name):
                cluster.coordinator.members.joined(link)
        cluster.finish(*NODES)

    lead(story)


def test_a_noticed_node_hands_over_and_ends_when_a_step_has_passed_without_it(lead: Lead) -> None:
    async def story(cluster: Cluster) -> None:
        await hand_over(cluster)
        assert cluster.table.get("released/node2") is None
        cluster.confirm(3, 1)
        assert await cluster.table.wait(["released/node2"], 5) == ()
        ended = {"op": "exited", "worker": "node2", "status": 0}
        cluster.coordinator.members.heard(cluster.links["node2"], ended)
        assert b"leave" in cluster.links["node2"].writer.told[-1]  # type: ignore[attr-defined]
        cluster.confirm(4, 1)
        await cluster.until(lambda: any("drained node2 (taken)" in line for line in cluster.said))
        cluster.finish("node0", "node1", "node3")

    cluster = lead(story)
    assert (cluster.coordinator.members.lost, cluster.table.count("plan/")) == ({}, 2)


def test_a_notice_waits_for_the_end_of_an_evaluation(lead: Lead) -> None:
    async def story(cluster: Cluster) -> None:
        cluster.join(*NODES)
        await cluster.plan(0)
        for step in (1, 2):
            cluster.confirm(step, 0)
        cluster.table.set("noticed/node2", Notice("taken", 30.0).to_json().encode())
        await cluster.until(lambda: cluster.said_iterations() == 2)
        for _ in range(100):
            await asyncio.sleep(0.001)
        assert cluster.table.get("ending/0") is None
        outcome = Evaluated(2, Kind.INTERVAL, 0, 0.5, {"lm loss": (1.0).hex()})
        cluster.table.set("evaluated/2/interval", outcome.to_json().encode())
        assert await cluster.table.wait(["ending/0"], 5) == ()
        for node in NODES:
            cluster.record(0, node, 2, True, True)
        assert (await cluster.plan(1)).let_go == ("node2",)
        cluster.finish(*NODES)

    cluster = lead(story, eval_interval=2)
    assert any("validation loss at iteration 2 |" in line for line in cluster.said)


async def hand_over(cluster: Cluster) -> None:
    """Let node2 hand over in step 2, the first of epoch 1."""
    cluster.join(*NODES)
    await cluster.plan(0)
    cluster.confirm(1, 0)
    cluster.table.set("noticed/node2", Notice("taken", 30.0).to_json().encode())
    assert await cluster.table.wait(["ending/0"], 5) == ()
    announced = json.loads(cluster.table.get("ending/0") or b"")
    assert (announced["lost"], announced["leaving"]) == ([], ["node2"])
    for node in NODES:
        cluster.record(0, node, 1, True, True)
    plan = await cluster.plan(1)
    assert plan.change is not None
    assert (plan.change.step, plan.let_go, plan.lost) == (2, ("node2",), ())
    cluster.confirm(2, 1)
    assert await cluster.table.wait(["going/node2"], 5) == ()


def test_a_node_that_has_handed_over_and_dies_while_it_is_needed_ends_the_epoch(
    lead: Lead,
) -> None:
    """Somebody may wait for it in the last commit that it took part in."""

    async def story(cluster: Cluster) -> None:
        await hand_over(cluster)
        cluster.lose("node2")
        assert await cluster.table.wait(["ending/1"], 5) == ()
        cluster.record(1, "node0", 2, True, True)
        for node in ("node1", "node3"):
            cluster.record(1, node, 2, True, False)
        plan = await cluster.plan(2)
        assert plan.decision is not None and plan.decision.applied
        assert (plan.lost, plan.reason) == (("node2",), "no stage was lost")
        cluster.confirm(3, 2)
        await cluster.until(lambda: cluster.said_iterations() == 3)
        assert cluster.table.get("ending/2") is None
        cluster.finish("node0", "node1", "node3")

    lead(story)


def test_another_loss_finds_the_handing_over_done_by_the_records_of_those_who_go_on(
    lead: Lead,
) -> None:
    """Nobody has told the store that step 2 has passed, and node2 still waits in its commit."""

    async def story(cluster: Cluster) -> None:
        cluster.join(*NODES)
        await cluster.plan(0)
        cluster.confirm(1, 0)
        cluster.table.set("noticed/node2", Notice("taken").to_json().encode())
        await cluster.table.wait(["ending/0"], 5)
        for node in NODES:
            cluster.record(0, node, 1, True, True)
        await cluster.plan(1)
        cluster.lose("node0")
        await cluster.table.wait(["ending/1"], 5)
        for node in ("node1", "node3"):
            cluster.record(1, node, 3, True, False)
        cluster.record(1, "node2", 2, True, False)
        plan = await cluster.plan(2)
        assert plan.decision is not None
        assert (plan.decision.step, plan.decision.applied, plan.lost) == (3, False, ("node0",))
        assert plan.pipelines[0].stages == ("node3", "node1", "node1", "node3")
        # It has gone with the epoch: nobody waits in that any more.
        assert await cluster.table.wait(["released/node2"], 5) == ()
        cluster.finish("node1", "node3")

    assert list(lead(story).coordinator.members.lost) == ["node0"]
