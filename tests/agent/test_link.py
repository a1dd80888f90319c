"""An agent's connection to one coordinator after the other."""

import select
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from server_thread import INCARNATION, SECRET, ServerThread
from wiretap import FlipOnce, Wiretap

from megatron_bamboo.agent.link import CoordinatorLink, NodeEnd
from megatron_bamboo.agent.outcome import Outcome, Status
from megatron_bamboo.membership.address import ADDRESS_FILE, Address
from megatron_bamboo.membership.keys import Secret
from megatron_bamboo.membership.store_server import AgentLink
from megatron_bamboo.observe.events import EventLog

WAIT_SECONDS = 10.0
STARTED = {"op": "started", "worker": "node0", "pid": 8}
EXITED = {"op": "exited", "worker": "node0", "status": 1}
Lead = Callable[[], "Coordinator"]


class Coordinator:
    """Keeps what one agent says to it."""

    def __init__(self, folder: Path, generation: int) -> None:
        self.links: list[AgentLink] = []
        self.told: list[Mapping[str, Any]] = []
        self.thread = ServerThread(self)
        self.closings = 0
        write_address(folder, self.thread.address, generation)

    def joined(self, link: AgentLink) -> None:
        self.links.append(link)

    def heard(self, link: AgentLink, message: Mapping[str, Any]) -> None:
        self.told.append(message)

    def closed(self, link: AgentLink) -> None:
        self.closings += link is self.links[-1]


def write_address(folder: Path, address: str, generation: int) -> None:
    port = int(address.rpartition(":")[2])
    Address("127.0.0.1", port, generation).write(folder / ADDRESS_FILE)


@pytest.fixture
def lead(tmp_path: Path) -> Iterator[Lead]:
    """Start another coordinator; those before it still listen."""
    started: list[Coordinator] = []

    def start() -> Coordinator:
        started.append(Coordinator(tmp_path, len(started) + 1))
        return started[-1]

    yield start
    for coordinator in started:
        if not coordinator.thread.is_stopped:
            coordinator.thread.stop()


@pytest.fixture
def link(tmp_path: Path) -> CoordinatorLink:
    return make_link(tmp_path, patience_seconds=60.0)


def make_link(
    folder: Path, patience_seconds: float, unheard_seconds: float = 60.0
) -> CoordinatorLink:
    events = EventLog(folder / "events", "node0")
    identity, store = SECRET.node("node0", INCARNATION), str(folder / ADDRESS_FILE)
    return CoordinatorLink(identity, store, folder, patience_seconds, events, unheard_seconds)


def tend(link: CoordinatorLink, condition: Callable[[], bool]) -> bool:
    """Do as an agent does until a condition holds; whether the link said that it is to end."""
    until = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < until
        if link.is_over():
            return True
        if link.fileno is not None:
            poll = select.poll()
            poll.register(link.fileno, select.POLLIN)
            if poll.poll(20) and link.hear_stop():
                return True
    return False


@pytest.mark.parametrize("ends", [False, True])
def test_all_that_was_reported_is_said_to_the_next_one_too(
    lead: Lead, link: CoordinatorLink, ends: bool
) -> None:
    """The first one's connection ends, or it only says nothing any more."""
    first = lead()
    assert link.await_welcome()
    link.report(STARTED)
    assert not tend(link, lambda: first.told == [STARTED])
    if ends:
        first.thread.stop()
        assert not tend(link, lambda: link.fileno is None)
        link.report(EXITED)
    second = lead()
    said = [STARTED, EXITED] if ends else [STARTED]
    assert not tend(link, lambda: second.told == said)
    assert first.links[0].incarnation == second.links[0].incarnation == INCARNATION


def test_what_is_reported_again_and_again_is_said_to_the_next_one_once(
    lead: Lead, link: CoordinatorLink
) -> None:
    """A cloud's server that comes and goes for weeks must fill no memory."""
    away = {"op": "remark", "text": "no notices from aws for a while"}
    notices = [{"op": "notice", "notice": text} for text in ("taken", "over", "taken")]
    for fact in (STARTED, away, away, *notices, away):
        link.report(fact)
    first = lead()
    assert link.await_welcome()
    assert not tend(link, lambda: first.told == [STARTED, away, notices[-1]])


def test_a_coordinator_that_says_late_where_it_listens_is_not_left_for_itself(
    lead: Lead, link: CoordinatorLink, tmp_path: Path
) -> None:
    """At the port of the one before: who had come to it already would else be lost."""
    second = lead()
    assert link.await_welcome()
    write_address(tmp_path, second.thread.address, generation=2)
    assert not link.is_over()
    assert link.fileno is not None
    link.report(STARTED)
    assert not tend(link, lambda: second.told == [STARTED])
    assert (len(second.links), second.closings) == (1, 0)


def test_the_end_is_a_word_or_a_file(lead: Lead, link: CoordinatorLink, tmp_path: Path) -> None:
    first = lead()
    assert link.await_welcome()
    first.thread.call(first.links[0].send, {"op": "stop", "cause": "it hangs"})
    assert tend(link, lambda: False)
    first.thread.stop()
    other = make_link(tmp_path, patience_seconds=60.0)
    Outcome(Status.FINISHED).write(tmp_path)
    assert not other.await_welcome()


def test_who_is_to_leave_waits_for_no_welcome(tmp_path: Path) -> None:
    link = make_link(tmp_path, patience_seconds=60.0)
    assert not link.await_welcome(iter([False, True]).__next__)
    assert link.end is NodeEnd.LEFT


def test_patience_ends(tmp_path: Path) -> None:
    began = time.monotonic()
    assert not make_link(tmp_path, patience_seconds=0.3).await_welcome()
    assert 0.3 <= time.monotonic() - began < WAIT_SECONDS


def test_a_coordinator_that_is_not_heard_gets_another_connection_beside_the_old_one(
    lead: Lead, tmp_path: Path
) -> None:
    """To it the end of the old one would be the node's."""
    coordinator = lead()
    link = make_link(tmp_path, 60.0, unheard_seconds=0.3)
    assert link.await_welcome()
    link.report(STARTED)
    assert not tend(link, lambda: coordinator.told == [STARTED, STARTED])
    assert (len(coordinator.links), coordinator.closings) == (2, 0)


@pytest.mark.parametrize("way", ["to_server", "to_client"])
def test_a_flipped_bit_on_the_way_is_not_the_nodes_end(
    lead: Lead, link: CoordinatorLink, tmp_path: Path, way: str
) -> None:
    """The node has made another connection before anything else becomes of it."""
    coordinator = lead()
    wiretap = Wiretap(coordinator.thread.address)
    write_address(tmp_path, wiretap.address, 1)
    assert link.await_welcome()
    setattr(wiretap, way, FlipOnce(0, 8 * 30))
    link.report(STARTED)
    coordinator.thread.call(coordinator.links[0].send, {"op": "heard", "word": "7"})
    assert not tend(
        link, lambda: len(coordinator.links) == 2 and coordinator.told[-1:] == [STARTED]
    )
    assert coordinator.closings == 0
    wiretap.close()


def test_a_stranger_at_the_coordinators_port_is_named_and_not_followed(
    lead: Lead, link: CoordinatorLink, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    until = time.monotonic() + 0.5
    stranger = ServerThread(secret=Secret.of("the secret of another job, which is as long"))
    write_address(tmp_path, stranger.address, 1)
    assert not tend(link, lambda: time.monotonic() > until)
    lead()
    assert link.await_welcome()
    stranger.stop()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{stranger.address} is no coordinator of this job: it does not prove")
