"""Messages by what they are: waited for, taken, kept and dropped."""

import threading
import time
from collections.abc import Callable

import pytest
import torch

from megatron_bamboo.execution.errors import DeadlineExceeded, EpochEnded
from megatron_bamboo.execution.mailbox import Mailbox, Message
from megatron_bamboo.schedule.actions import Action

SOON = 0.05
FIRST = Message(3, Action.parse("1.0RECV_F0"))
SECOND = Message(3, Action.parse("1.0RECV_F1"))
NEXT_STEP = Message(4, Action.parse("1.0RECV_F0"))


def stay() -> bool:
    return False


def later(function: Callable[[], None]) -> None:
    timer = threading.Timer(SOON, function)
    timer.daemon = True
    timer.start()


def test_a_message_can_be_taken_more_than_once() -> None:
    mailbox, tensor = Mailbox(), torch.ones(2)
    mailbox.put(FIRST, tensor)
    assert mailbox.take(FIRST, 0.0, stay, "node0") is tensor
    assert mailbox.take(FIRST, 0.0, stay, "node0") is tensor


def test_who_waits_gets_the_message_that_it_waits_for() -> None:
    mailbox, tensor = Mailbox(), torch.ones(2)

    def put_both() -> None:
        mailbox.put(SECOND, torch.zeros(2))
        mailbox.put(FIRST, tensor)

    later(put_both)
    assert mailbox.take(FIRST, 10, stay, "node0") is tensor


def test_the_first_of_two_copies_stays() -> None:
    mailbox, tensor = Mailbox(), torch.ones(2)
    mailbox.put(FIRST, tensor)
    mailbox.put(FIRST, torch.zeros(2))
    assert mailbox.take(FIRST, 0.0, stay, "node0") is tensor


def test_messages_of_different_steps_are_different() -> None:
    mailbox = Mailbox()
    mailbox.put(FIRST, torch.ones(2))
    with pytest.raises(DeadlineExceeded):
        mailbox.take(NEXT_STEP, 0.0, stay, "node0")


def test_the_deadline_names_the_message_and_its_sender() -> None:
    begin = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=r"1\.0RECV_F0 of step 3 .* from node7"):
        Mailbox().take(FIRST, SOON, stay, "node7")
    assert time.monotonic() - begin >= SOON


def test_other_messages_do_not_put_off_the_deadline() -> None:
    mailbox = Mailbox()
    for number in range(20):
        threading.Timer(number * SOON / 4, mailbox.wake).start()
    begin = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        mailbox.take(FIRST, SOON, stay, "node0")
    assert time.monotonic() - begin < 20 * SOON


def test_who_waits_leaves_when_it_is_woken_and_must() -> None:
    mailbox, ended = Mailbox(), threading.Event()

    def end() -> None:
        ended.set()
        mailbox.wake()

    later(end)
    with pytest.raises(EpochEnded):
        mailbox.take(FIRST, 10, ended.is_set, "node0")


def test_what_is_here_is_taken_although_the_epoch_ended() -> None:
    mailbox = Mailbox()
    mailbox.put(FIRST, torch.ones(2))
    assert mailbox.take(FIRST, 0.0, lambda: True, "node0") is not None


def test_arrived_are_the_receives_of_one_step() -> None:
    mailbox = Mailbox()
    for message in (FIRST, SECOND, NEXT_STEP):
        mailbox.put(message, torch.ones(2))
    mailbox.take(FIRST, 0.0, stay, "node0")
    assert mailbox.arrived(3) == {FIRST.receive, SECOND.receive}
    assert mailbox.arrived(4) == {NEXT_STEP.receive}
    assert mailbox.arrived(5) == frozenset()


def test_of_the_mirrors_of_a_chunk_the_newest_two_are_kept() -> None:
    mailbox = Mailbox()
    kept = [Message(3, Action.parse(f"1.0RECV_MIRROR{m}")) for m in (0, 1, 10, 2)]
    others = [Message(3, Action.parse("1.1RECV_MIRROR0")), Message(4, kept[0].receive), FIRST]
    for message in (*others, *kept):
        mailbox.put(message, torch.ones(2))
    assert mailbox.arrived(3) == {m.receive for m in (others[0], FIRST, kept[2], kept[3])}
    assert mailbox.arrived(4) == {kept[0].receive}


def test_a_mirror_that_was_published_stays_whatever_comes_after_it() -> None:
    mailbox = Mailbox()
    mirrors = [Message(3, Action.parse(f"1.0RECV_MIRROR{m}")) for m in range(6)]
    for mirror in mirrors[:3]:
        mailbox.put(mirror, torch.ones(2))
    published = mailbox.arrived(3)
    assert published == {m.receive for m in mirrors[1:3]}
    for mirror in mirrors[3:]:
        mailbox.put(mirror, torch.ones(2))
    assert mailbox.arrived(3) == published | {m.receive for m in mirrors[4:]}


def test_forgetting_a_step_keeps_the_steps_after_it() -> None:
    mailbox = Mailbox()
    for message in (Message(2, FIRST.receive), FIRST, NEXT_STEP):
        mailbox.put(message, torch.ones(2))
    mailbox.forget_until(3)
    assert not mailbox.arrived(2) and not mailbox.arrived(3)
    assert mailbox.arrived(4) == {NEXT_STEP.receive}
