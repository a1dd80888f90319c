"""The coordinator against a table in memory: whom it asks, what it publishes, how long it waits."""

import asyncio
import json
import time
from pathlib import Path

import pytest
from led_cluster import NODES, VECTOR, Cluster, Lead, Memory, Writer

from megatron_bamboo.agent import calls, headway
from megatron_bamboo.agent.coordinator import Coordinator
from megatron_bamboo.agent.job import Deadlines, JobShape, JobSpec
from megatron_bamboo.agent.long_waits import LongWaits
from megatron_bamboo.agent.report import Reporter
from megatron_bamboo.agent.telling import Announcer
from megatron_bamboo.membership.decision import FENCED_VALUE, Record
from megatron_bamboo.membership.store_server import AgentLink
from megatron_bamboo.membership.table import Table
from megatron_bamboo.membership.waits import Sent
from megatron_bamboo.planner.arrangement import equal_pipelines


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


class Away(Memory):
    """Keeps nothing for a while, as a store in etcd does that nobody reaches."""

    is_away = False

    async def kept(self) -> None:
        while self.is_away:
            await asyncio.sleep(0.001)


def test_records_are_waited_for_from_when_workers_can_know_of_it(lead: Lead) -> None:
    """No live node is fenced since the store was away."""
    store = Away()

    async def story(cluster: Cluster) -> None:
        cluster.join(*NODES)
        await cluster.plan(0)
        store.is_away = True
        cluster.lose("node2")
        assert await cluster.table.wait(["ending/0"], 5) == ()
        await asyncio.sleep(0.5)
        assert list(cluster.coordinator.members.lost) == ["node2"]
        store.is_away = False
        for node in ("node0", "node1", "node3"):
            cluster.record(0, node, 1, False, False)
        assert (await cluster.plan(1)).lost == ("node2",)
        cluster.finish("node0", "node1", "node3")

    lead(story, Deadlines(record_seconds=0.1), memory=store)


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
