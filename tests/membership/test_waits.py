"""What a worker has sent, told in few words; waits as they travel."""

import json

from hypothesis import given
from hypothesis import strategies as st

from megatron_bamboo.membership.waits import Sent, SentLog, Wait, Waiting
from megatron_bamboo.schedule.actions import Action, Op

RECEIVES = st.one_of(
    st.builds(
        Action,
        st.integers(0, 2),
        st.integers(0, 1),
        st.sampled_from([Op.RECV_F, Op.RECV_B]),
        st.integers(0, 5),
    ),
    st.builds(Action, st.integers(0, 2), st.none(), st.sampled_from([Op.TIE]), st.none()),
)
MESSAGES = st.lists(st.tuples(st.sampled_from(["node1", "node2"]), RECEIVES))


@given(MESSAGES, MESSAGES)
def test_what_was_sent_in_the_newest_step_is_known_and_nothing_else(
    before: list[tuple[str, Action]], now: list[tuple[str, Action]]
) -> None:
    log = SentLog()
    for step, messages in ((4, before), (5, now), (4, before if now else [])):
        for peer, receive in messages:
            log.note(peer, step, receive)
    newest = 5 if now else 4
    for peer in ("node1", "node2"):
        for receive in {receive for _, receive in before + now}:
            known = any(sent.includes(peer, newest, receive) for sent in log.sent())
            assert known == ((peer, receive) in (now or before))
            assert not any(sent.includes(peer, 3, receive) for sent in log.sent())


def test_messages_that_follow_each_other_are_told_together() -> None:
    log = SentLog()
    for microbatch in (0, 1, 2, 5):
        log.note("node1", 7, Action(1, 0, Op.RECV_F, microbatch))
    assert log.sent() == (Sent("node1", 7, "1.0RECV_F0", 3), Sent("node1", 7, "1.0RECV_F5", 1))


def test_a_wait_survives_its_way() -> None:
    sent = (Sent("node1", 7, "1.0RECV_F0", 3),)
    wait = Wait("node0", 12, 7, "0.0RECV_B0", Waiting(("node1", "node2"), sent), 3.5, 10.0)
    assert Wait.from_fields(json.loads(json.dumps(wait.to_fields()))) == wait
