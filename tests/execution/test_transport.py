"""Channels between two workers over real groups, and what a loss ends."""

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch
from local_peers import Beside, make_groups

from megatron_bamboo.execution.errors import DeadlineExceeded, EpochEnded, PeerLost
from megatron_bamboo.execution.groups import Group
from megatron_bamboo.execution.mailbox import Mailbox, Message
from megatron_bamboo.execution.transport import (
    Expected,
    TensorShape,
    Transport,
    tag_of,
)
from megatron_bamboo.membership.waits import Sent
from megatron_bamboo.schedule.actions import Action, Op
from megatron_bamboo.schedule.schedule import MAX_CHUNKS, MAX_MICROBATCHES, MAX_STAGES

SHAPE = TensorShape((4,), torch.float32, torch.device("cpu"))
BYTES = 16
SOON = 0.1


def message(text: str, step: int = 3) -> Message:
    return Message(step, Action.parse(text))


def tensor(value: float) -> torch.Tensor:
    return torch.full(SHAPE.size, value, dtype=SHAPE.dtype)


def expected(sender: str, *texts: str, step: int = 3) -> list[Expected]:
    return [Expected(message(text, step), sender, SHAPE) for text in texts]


def taken(transport: Transport, text: str, step: int = 3, seconds: float = 10) -> float:
    """The value of a message, once it is here."""
    wanted = message(text, step)
    return float(transport.mailbox.take(wanted, seconds, lambda: False, "its sender")[0])


class Workers:
    """The transports of some workers, and the groups between them, made on demand."""

    def __init__(self, *names: str) -> None:
        self.may_meet = threading.Event()
        self._lock = threading.Lock()
        self._groups: dict[tuple[str, ...], dict[str, Group]] = {}
        self.of = {name: Transport(Mailbox(), self._maker(name)) for name in names}

    def connect(self, meet: bool = True) -> None:
        if meet:
            self.may_meet.set()
        for name, transport in self.of.items():
            transport.connect(self.of.keys() - {name})

    def close(self) -> None:
        self.may_meet.set()
        for transport in self.of.values():
            transport.drop(self.of)

    def _maker(self, me: str) -> Callable[[str], Group]:
        def make(peer: str) -> Group:
            assert self.may_meet.wait(20)
            members = tuple(sorted((me, peer)))
            with self._lock:
                if members not in self._groups:
                    self._groups[members] = dict(make_groups(*members))
            return self._groups[members][me]

        return make


@pytest.fixture
def workers() -> Iterator[Workers]:
    some = Workers("a", "b", "c")
    yield some
    some.close()


def test_a_message_arrives_where_it_is_expected(workers: Workers) -> None:
    workers.connect()
    a, b = workers.of["a"], workers.of["b"]
    b.expect(expected("a", "1.0RECV_F0"))
    a.send("b", message("1.0RECV_F0"), tensor(7))
    assert taken(b, "1.0RECV_F0") == 7
    assert a.traffic()["b"] == (BYTES, 0)
    assert b.traffic()["a"] == (0, BYTES)


def test_messages_of_one_kind_may_overtake_those_of_another(workers: Workers) -> None:
    workers.connect()
    a, b = workers.of["a"], workers.of["b"]
    b.expect(expected("a", "1.0RECV_F0", "1.0RECV_B0", "1.0RECV_F1", "2RECV_REFRESH", "1TIE"))
    a.send("b", message("2RECV_REFRESH"), tensor(1))
    assert taken(b, "2RECV_REFRESH") == 1
    a.send("b", message("1.0RECV_B0"), tensor(2))
    assert taken(b, "1.0RECV_B0") == 2
    a.send("b", message("1TIE"), tensor(3))
    assert taken(b, "1TIE") == 3
    assert message("1.0RECV_F0").receive not in b.mailbox.arrived(3)
    a.send("b", message("1.0RECV_F0"), tensor(4))
    a.send("b", message("1.0RECV_F1"), tensor(5))
    assert (taken(b, "1.0RECV_F0"), taken(b, "1.0RECV_F1")) == (4, 5)


def test_what_is_sent_before_the_group_exists_is_sent_then(workers: Workers) -> None:
    workers.connect(meet=False)
    a, b = workers.of["a"], workers.of["b"]
    a.send("b", message("1.0RECV_F0"), tensor(1))
    a.send("b", message("1.0RECV_F1"), tensor(2))
    b.expect(expected("a", "1.0RECV_F0", "1.0RECV_F1"))
    assert a.traffic()["b"] == (0, 0)
    assert a.sent() == (Sent("b", 3, "1.0RECV_F0", 2),)  # it is not a's to do anything more
    workers.may_meet.set()
    assert (taken(b, "1.0RECV_F0"), taken(b, "1.0RECV_F1")) == (1, 2)


def test_what_is_expected_twice_is_received_once(workers: Workers) -> None:
    workers.connect()
    a, b = workers.of["a"], workers.of["b"]
    b.expect(expected("a", "1.0RECV_F0"))
    b.expect(expected("a", "1.0RECV_F0", "1.0RECV_F1"))  # a copy would be waited for first
    a.send("b", message("1.0RECV_F0"), tensor(1))
    a.send("b", message("1.0RECV_F1"), tensor(2))
    assert taken(b, "1.0RECV_F1") == 2


def num_streams() -> int:
    return sum(thread.name == "stream" for thread in threading.enumerate())


@pytest.mark.parametrize("goes_on", [True, False])
def test_what_came_once_keeps_no_thread(workers: Workers, goes_on: bool) -> None:
    """As the messages of a takeover or of a change, also from who sends nothing else."""
    workers.connect()
    a, b = workers.of["a"], workers.of["b"]

    def run_step(step: int, *texts: str) -> None:
        b.expect(expected("a", *texts, step=step))
        for text in texts:
            a.send("b", message(text, step), tensor(step))
            assert taken(b, text, step) == step
        a.finish_step(step)
        b.finish_step(step)

    own = ("1.0RECV_F0",) if goes_on else ()
    run_step(1, *own)
    before = num_streams()
    run_step(2, *own, "2RECV_STATE", "0.0RECV_F0", "1.0RECV_MIRROR0")
    # A mirror has one at its sender, too.
    assert num_streams() == before + 4
    step, until = 3, time.monotonic() + 20
    while num_streams() != before and time.monotonic() < until:
        run_step(step, *own)
        step += 1
        time.sleep(0.01)
    assert num_streams() == before
    run_step(step, *own, "2RECV_STATE")


def test_a_message_that_is_late_keeps_its_thread(workers: Workers) -> None:
    workers.connect()
    a, b = workers.of["a"], workers.of["b"]
    b.expect(expected("a", "2RECV_STATE", step=1))
    for step in range(1, 5):
        b.expect(expected("a", "1.0RECV_F0", step=step))
        a.send("b", message("1.0RECV_F0", step), tensor(step))
        assert taken(b, "1.0RECV_F0", step) == step
        b.finish_step(step)
    a.send("b", message("2RECV_STATE", 1), tensor(9))
    assert taken(b, "2RECV_STATE", 1) == 9


def test_nothing_is_taken_from_a_dropped_peer(workers: Workers) -> None:
    workers.connect()
    a, b, c = (workers.of[name] for name in "abc")
    b.expect(expected("a", "1.0RECV_F0", "1.0RECV_F1"))
    a.send("b", message("1.0RECV_F0"), tensor(1))
    assert taken(b, "1.0RECV_F0") == 1
    b.drop(["a"])
    arrived = b.mailbox.arrived(3)
    a.send("b", message("1.0RECV_F1"), tensor(2))
    with pytest.raises(DeadlineExceeded):
        taken(b, "1.0RECV_F1", seconds=SOON)
    assert b.mailbox.arrived(3) == arrived == {message("1.0RECV_F0").receive}
    b.send("a", message("0.0RECV_B0"), tensor(3))  # into the void
    assert b.traffic()["a"] == (0, BYTES)
    b.expect(expected("c", "2RECV_REFRESH"))
    c.send("b", message("2RECV_REFRESH"), tensor(4))
    assert taken(b, "2RECV_REFRESH") == 4


def test_a_lost_peer_is_not_connected_again(workers: Workers) -> None:
    workers.connect()
    b = workers.of["b"]
    b.drop(["a"])
    b.connect(["a", "c"])
    b.send("a", message("0.0RECV_B0"), tensor(1))
    assert b.traffic()["a"] == (0, 0)


def test_what_a_lost_peer_was_to_send_comes_from_another(workers: Workers) -> None:
    workers.connect()
    a, b, c = (workers.of[name] for name in "abc")
    texts = ("1.0RECV_F0", "1.0RECV_F1")
    b.expect(expected("a", *texts))
    a.send("b", message("1.0RECV_F0"), tensor(1))
    assert taken(b, "1.0RECV_F0") == 1
    b.drop(["a"])
    b.expect(expected("c", *texts))
    for value, text in enumerate(texts, start=10):
        c.send("b", message(text), tensor(value))
    assert taken(b, "1.0RECV_F1") == 11
    assert taken(b, "1.0RECV_F0") == 1, "the first copy stays"


def test_a_broken_channel_is_only_a_sign(workers: Workers) -> None:
    workers.connect()
    a, b, c = (workers.of[name] for name in "abc")
    b.expect([*expected("a", "1.0RECV_F0", "1.0RECV_F1"), *expected("c", "2RECV_REFRESH")])
    a.send("b", message("1.0RECV_F0"), tensor(1))
    assert taken(b, "1.0RECV_F0") == 1
    a.drop(["b"])
    time.sleep(SOON)
    b.send("a", message("0.0RECV_B0"), tensor(2))
    assert b.traffic()["a"] == (0, BYTES)
    c.send("b", message("2RECV_REFRESH"), tensor(3))
    assert taken(b, "2RECV_REFRESH") == 3


def test_a_group_that_is_never_made_breaks_only_its_channel(workers: Workers) -> None:
    def make(peer: str) -> Group:
        raise PeerLost((peer,), "making", None)

    transport = Transport(Mailbox(), make)
    transport.connect(["a"])
    transport.send("a", message("1.0RECV_F0"), tensor(1))
    Beside(transport.drop, ["a"]).join()
    assert transport.traffic() == {"a": (0, 0)}


def test_a_finished_step_is_forgotten_and_the_next_is_not(workers: Workers) -> None:
    workers.connect()
    a, b = workers.of["a"], workers.of["b"]
    for step in (3, 4):
        b.expect(expected("a", "1.0RECV_F0", step=step))
        a.send("b", message("1.0RECV_F0", step), tensor(step))
    assert (taken(b, "1.0RECV_F0", 3), taken(b, "1.0RECV_F0", 4)) == (3, 4)
    a.finish_step(3)
    b.finish_step(3)
    assert not b.mailbox.arrived(3)
    assert taken(b, "1.0RECV_F0", 4, seconds=0) == 4


def test_a_second_copy_that_nobody_waits_for_does_not_block_the_next_step(
    workers: Workers,
) -> None:
    """After a loss the sender's step can end before the receiver's channel takes the copy."""
    workers.connect()
    a, b, c = (workers.of[name] for name in "abc")
    b.expect(expected("c", "1.0RECV_F0"))
    c.send("b", message("1.0RECV_F0"), tensor(1))
    assert taken(b, "1.0RECV_F0") == 1
    a.drop(["c"])
    b.drop(["c"])
    for transport, peer in ((a, "b"), (b, "a")):
        transport.connect([peer])  # as the next plan says
    a.send("b", message("1.0RECV_F0"), tensor(1))
    time.sleep(SOON)
    a.finish_step(3)
    b.expect([*expected("a", "1.0RECV_F0"), *expected("a", "1.0RECV_F0", step=4)])
    a.send("b", message("1.0RECV_F0", 4), tensor(4))
    assert taken(b, "1.0RECV_F0", 4, seconds=5) == 4


def test_mirrors_are_let_go_once_they_have_arrived(workers: Workers) -> None:
    """They are as large as all gradients: a sender that kept each until the commit had many."""
    workers.connect()
    a, b = workers.of["a"], workers.of["b"]
    texts = [f"1.0RECV_MIRROR{m}" for m in range(3)]
    b.expect(expected("a", *texts, "1.0RECV_F0"))
    sent = []
    for value, text in enumerate(texts):
        mirror = tensor(value)
        sent.append(weakref.ref(mirror))
        a.send("b", message(text), mirror)
    del mirror
    assert taken(b, texts[-1]) == 2
    until = time.monotonic() + 20
    while any(reference() is not None for reference in sent):
        assert time.monotonic() < until, "the sender keeps them"
        time.sleep(0.01)
    a.send("b", message("1.0RECV_F0"), tensor(7))
    assert taken(b, "1.0RECV_F0") == 7
    assert {m.receive for m in map(message, texts[1:])} <= b.mailbox.arrived(3)


def test_a_mirror_that_its_receiver_never_takes_ends_with_the_channel(workers: Workers) -> None:
    workers.connect()
    a, b = workers.of["a"], workers.of["b"]
    a.send("b", message("1.0RECV_MIRROR0"), tensor(1))
    b.expect(expected("a", "1.0RECV_F0"))
    a.send("b", message("1.0RECV_F0"), tensor(2))
    assert taken(b, "1.0RECV_F0") == 2
    b.drop(["a"])
    Beside(a.drop, ["b"]).join()


@pytest.mark.parametrize("text", ["1.0RECV_MIRROR0", "1.0RECV_F0"])
def test_a_dropped_channel_is_let_go_at_once(workers: Workers, text: str) -> None:
    """Without the collector of cycles, which may not come for minutes: its group has threads."""
    workers.connect()
    a, b = workers.of["a"], workers.of["b"]
    b.expect(expected("a", text))
    a.send("b", message(text), tensor(1))
    assert taken(b, text) == 1
    b.mailbox.clear()
    channels = [weakref.ref(a._channels["b"]), weakref.ref(b._channels["a"])]
    gc.collect()
    gc.disable()
    try:
        a.drop(["b"])
        b.drop(["a"])
        until = time.monotonic() + 20
        while any(channel() is not None for channel in channels) and time.monotonic() < until:
            time.sleep(0.01)
        assert [channel() for channel in channels] == [None, None]
    finally:
        gc.enable()


def test_tags_tell_all_messages_apart_that_can_meet() -> None:
    receives = [
        Action(s, c, op, m)
        for s in (0, 1, MAX_STAGES - 1)
        for c in (0, 1, MAX_CHUNKS - 1)
        for op in (Op.RECV_F, Op.RECV_B, Op.RECV_MIRROR)
        for m in (0, 1, MAX_MICROBATCHES - 1)
    ]
    receives += [Action(s, None, op, None) for s in (0, 255) for op in (Op.TIE, Op.RECV_REFRESH)]
    for first in (0, 1, 6, 7):
        tags = [tag_of(Message(first + step, receive)) for step in (0, 1) for receive in receives]
        assert len(set(tags)) == len(tags)
        assert min(tags) >= 0 and max(tags) < 2**31


@pytest.mark.parametrize(
    ("stage", "chunk", "microbatch"),
    [(MAX_STAGES, 0, 0), (0, MAX_CHUNKS, 0), (0, 0, MAX_MICROBATCHES)],
)
def test_what_has_no_tag_of_its_own_is_refused(stage: int, chunk: int, microbatch: int) -> None:
    with pytest.raises(AssertionError):
        tag_of(Message(1, Action(stage, chunk, Op.RECV_F, microbatch)))


def test_a_flush_returns_when_all_has_arrived_also_what_waits_for_its_channel(
    workers: Workers,
) -> None:
    workers.connect(meet=False)
    a, b = workers.of["a"], workers.of["b"]
    b.expect(expected("a", "1.0RECV_F0", "1.0RECV_F1"))
    a.send("b", message("1.0RECV_F0"), tensor(1))
    flushing = Beside(a.flush, timedelta(seconds=20))
    time.sleep(SOON)
    assert flushing.is_under_way()
    workers.may_meet.set()
    flushing.join()
    a.send("b", message("1.0RECV_F1"), tensor(2))
    a.flush(timedelta(seconds=20))
    assert (taken(b, "1.0RECV_F0", seconds=5), taken(b, "1.0RECV_F1", seconds=5)) == (1, 2)
    a.flush(timedelta(seconds=20))  # nothing is left


def test_a_channel_whose_peer_is_gone_wakes_who_waits_for_it(workers: Workers) -> None:
    workers.connect()
    a, b = workers.of["a"], workers.of["b"]
    b.expect(expected("a", "1.0RECV_F0", "1.0RECV_F1"))
    a.send("b", message("1.0RECV_F0"), tensor(1))
    assert taken(b, "1.0RECV_F0") == 1
    assert not b.has_broken()
    waiting = Beside(b.mailbox.take, message("1.0RECV_F1"), 20, b.has_broken, "a")
    a.drop(["b"])
    with pytest.raises(EpochEnded):
        waiting.join(10)
    with pytest.raises(ConnectionError, match="no link to a"):
        b.flush(timedelta(seconds=20))
