"""The coordinator as a job begins and ends: who is named, who takes part, and what is saved."""

import json

import pytest
from led_cluster import NODES, Cluster, Lead, Writer

from megatron_bamboo.agent.coordinator import JobFailed, JobStopped
from megatron_bamboo.agent.job import Deadlines
from megatron_bamboo.agent.members import FINISH
from megatron_bamboo.membership.store_server import AgentLink


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


def test_a_job_that_is_to_save_and_end_asks_its_nodes_and_moves_nothing_more(lead: Lead) -> None:
    async def story(cluster: Cluster) -> None:
        cluster.join(*NODES)
        await cluster.plan(0)
        cluster.confirm(1, 0)
        cluster.lose("node2")
        await cluster.table.wait(["ending/0"], 5)
        cluster.ask_to_stop(saves=True)
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
        cluster.ask_to_stop(saves)

    with pytest.raises(JobStopped, match=r"stopped after step 0 of 9 \(a test\)"):
        lead(story)
