"""The coordinator where no live node holds a stage: it waits for nodes, begins again, or ends."""

import asyncio
import json
from pathlib import Path

import pytest
from led_cluster import LATER, NODES, Cluster, Lead, Writer

from megatron_bamboo.agent.coordinator import JobStopped
from megatron_bamboo.agent.job import Deadlines
from megatron_bamboo.membership.store_server import AgentLink
from megatron_bamboo.planner.plan import Checkpoint
from megatron_bamboo.planner.taking_over import NoHolder


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
        cluster.ask_to_stop(saves=True)

    with pytest.raises(JobStopped, match=r"stopped after step 1 of 9 \(a test\)"):
        lead(story, nodes=(), restores=True)


def test_all_nodes_lost_together_are_the_end(lead: Lead) -> None:
    async def story(cluster: Cluster) -> None:
        cluster.join(*NODES)
        for node in NODES:
            cluster.lose(node)

    with pytest.raises(NoHolder, match="stage 0 has no live holder"):
        lead(story)
