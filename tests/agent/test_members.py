"""Which nodes live, have finished or are lost, by what their agents say."""

from pathlib import Path

import pytest
from led_cluster import Writer

from megatron_bamboo.agent.leases import FIRST_WORD
from megatron_bamboo.agent.members import Members
from megatron_bamboo.membership.leaving import ASKED, NOTICED, Notice
from megatron_bamboo.membership.store_server import AgentLink
from megatron_bamboo.membership.table import Table
from megatron_bamboo.observe.events import EventLog

WORKERS = ("node0:0", "node0:1")


class Node:
    """One node of two workers, as its coordinator hears of it."""

    def __init__(self, folder: Path) -> None:
        self.table = Table()
        self.members = Members(["node0"], self.table, EventLog(folder, "coordinator"), 2)
        self.link = AgentLink("node0", 100, Writer())  # type: ignore[arg-type]
        self.members.joined(self.link)

    def done(self, *workers: str) -> None:
        for worker in workers:
            self.table.set(f"done/{worker}", b"1")

    def exited(self, worker: str, status: int = 0) -> None:
        self.members.heard(self.link, {"op": "exited", "worker": worker, "status": status})


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


@pytest.mark.parametrize("first", WORKERS)
def test_a_node_has_finished_when_its_last_worker_has_ended(node: Node, first: str) -> None:
    (last,) = set(WORKERS) - {first}
    node.done(*WORKERS)
    node.exited(first)
    assert node.members.finished == set()
    node.exited(last)
    assert (node.members.finished, node.members.lost) == ({"node0"}, {})


def test_a_worker_that_is_done_may_end_before_another_is(node: Node) -> None:
    node.done("node0:0")
    node.exited("node0:0")
    assert (node.members.finished, node.members.lost) == (set(), {})
    node.done("node0:1")
    node.exited("node0:1")
    assert node.members.finished == {"node0"}


def test_a_worker_that_ends_before_it_is_done_takes_its_node_along(node: Node) -> None:
    node.done("node0:0")
    node.exited("node0:0")
    node.exited("node0:1", status=-9)
    assert node.members.lost == {"node0": "its worker was ended by signal 9"}


def test_a_node_whose_connection_ends_when_all_is_done_has_finished(node: Node) -> None:
    node.done(*WORKERS)
    node.members.closed(node.link)
    assert (node.members.finished, node.members.lost) == ({"node0"}, {})


def test_a_lost_node_is_told_why_and_refused(node: Node) -> None:
    node.members.fence("node0", "it hangs")
    assert node.members.lost == {"node0": "it hangs"}
    assert node.table.fenced == {"node0"}
    assert b"it hangs" in node.link.writer.told[-1]  # type: ignore[attr-defined]
    told = len(node.link.writer.told)  # type: ignore[attr-defined]
    node.members.heard(node.link, {"op": "alive", "word": FIRST_WORD, "places": {}, "waits": []})
    assert len(node.link.writer.told) == told  # type: ignore[attr-defined]


def test_a_hang_is_a_loss_that_says_where(node: Node) -> None:
    node.members.heard(node.link, {"op": "hung", "cause": "its worker was stuck"})
    assert node.members.lost == {"node0": "its worker was stuck"}


def test_a_node_that_says_that_it_is_there_gets_another_word(node: Node) -> None:
    node.members.heard(node.link, {"op": "alive", "word": FIRST_WORD, "places": {}, "waits": []})
    assert b"heard" in node.link.writer.told[-1]  # type: ignore[attr-defined]


def test_a_lost_node_that_is_started_again_waits_as_a_standby(node: Node) -> None:
    again = AgentLink("node0.2", 101, Writer())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"no node named node0\.2 is expected"):
        node.members.joined(again)
    node.members.fence("node0", "it hangs")
    assert node.members.returned() == node.members.waiting_standbys() == ()
    node.members.joined(again)
    assert node.members.returned() == node.members.waiting_standbys() == ("node0.2",)
    assert node.members.groups()["node0.2"] == 101
    # What is refused to its first life is not refused to it, nor the other way round.
    assert node.table.fenced == {"node0"}
    with pytest.raises(ValueError, match="it hangs"):
        node.members.joined(AgentLink("node0", 102, Writer()))  # type: ignore[arg-type]
    node.members.fence("node0.2", "it hangs too")
    assert node.members.waiting_standbys() == ()


def test_a_node_that_was_released_leaves_when_its_last_worker_has_ended(node: Node) -> None:
    noticed(node, 1)
    assert node.members.is_leaving("node0")
    node.members.release("node0")
    for worker in WORKERS:
        assert node.members.drained == {}
        node.exited(worker)
    assert (node.members.drained, node.members.lost) == ({"node0": "taken"}, {})
    assert b"leave" in node.link.writer.told[-1]  # type: ignore[attr-defined]
    # Its agent may say hello to another coordinator, or come back in another life.
    with pytest.raises(ValueError, match="has left the job"):
        node.members.joined(node.link)
    node.members.joined(AgentLink("node0.2", 101, Writer()))  # type: ignore[arg-type]
    assert node.members.waiting_standbys() == ("node0.2",)


def test_a_node_that_is_only_noticed_is_lost_like_any_other(node: Node) -> None:
    noticed(node, 1)
    node.exited("node0:0")
    assert node.members.drained == {}
    assert node.members.lost.keys() == {"node0"}


def noticed(node: Node, number: int, is_over: bool = False) -> None:
    text = Notice("taken", is_over=is_over).to_json()
    node.members.heard(node.link, {"op": "notice", "notice": text, "number": number})


def test_a_notice_that_is_over_is_none(node: Node) -> None:
    for is_over in (False, True):
        noticed(node, 1 + is_over, is_over)
        assert node.members.is_leaving("node0") != is_over


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"cause": 1, "seconds": 2}', '{"cause": "a"}'])
def test_what_is_no_notice_is_refused(node: Node, text: str) -> None:
    with pytest.raises(ValueError):
        node.members.heard(node.link, {"op": "notice", "notice": text, "number": 1})
    assert not node.members.is_leaving("node0")


def asked(node: Node, is_over: bool = False) -> None:
    """As ``bamboo drain`` does."""
    for prefix in (ASKED, NOTICED):
        node.table.set(f"{prefix}node0", Notice("bamboo drain", is_over=is_over).to_json().encode())


@pytest.mark.parametrize("is_asked_first", [True, False])
def test_a_notice_that_proves_false_takes_back_no_users_wish(
    node: Node, is_asked_first: bool
) -> None:
    steps = [lambda: asked(node), lambda: noticed(node, 1)]
    for step in steps if is_asked_first else reversed(steps):
        step()
    noticed(node, 2, is_over=True)
    assert node.members.is_leaving("node0")
    asked(node, is_over=True)
    assert not node.members.is_leaving("node0")


def test_a_notice_that_is_said_again_at_a_new_connection_changes_nothing(node: Node) -> None:
    """Else what the user has wished since would be gone whenever a coordinator is followed."""
    noticed(node, 1)
    asked(node, is_over=True)
    noticed(node, 1)
    assert not node.members.is_leaving("node0")
    noticed(node, 2)
    assert node.members.is_leaving("node0")
    noticed(node, 3, is_over=True)
    asked(node)
    noticed(node, 3, is_over=True)
    assert node.members.is_leaving("node0")


def test_newcomers_are_those_after_the_first_so_many(node: Node) -> None:
    assert node.members.newcomers(0) == ("node0",)
    assert node.members.newcomers(1) == ()
    node.members.fence("node0", "it hangs")
    node.members.joined(AgentLink("node0.2", 101, Writer()))  # type: ignore[arg-type]
    assert node.members.newcomers(1) == ("node0.2",)
