"""The coordinator and nodes whose machines are to be taken: they hand over, and end."""

import asyncio
import json

from led_cluster import NODES, Cluster, Lead

from megatron_bamboo.evaluation.due import Kind
from megatron_bamboo.evaluation.outcome import Evaluated
from megatron_bamboo.membership.leaving import Notice


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
