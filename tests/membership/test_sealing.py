"""Sealed frames: what the other side said comes through, once and in order, and nothing else."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_bamboo.membership.frames import FRAME_LIMIT_BYTES
from megatron_bamboo.membership.keys import Credential, Secret
from megatron_bamboo.membership.sealing import (
    HEAD_BYTES,
    MAC_BYTES,
    BrokenSeal,
    Direction,
    Nonces,
    Session,
)

SECRET = Secret.of("a secret that is as long as it must be")
AGENT = SECRET.node("node5", "77").agent()
NONCES = Nonces(b"c" * 32, b"s" * 32)
BODY = b'{"op":"get","key":"epoch"}'


def client(credential: Credential = AGENT, nonces: Nonces = NONCES) -> Session:
    return Session(credential, nonces, Direction.TO_SERVER)


def server(credential: Credential = AGENT, nonces: Nonces = NONCES) -> Session:
    return Session(credential, nonces, Direction.TO_CLIENT)


def opened(session: Session, frame: bytes) -> bytes:
    """As a stream is read: the head, then as much as it says."""
    head, rest = frame[:HEAD_BYTES], frame[HEAD_BYTES:]
    count = session.num_to_come(head)
    if len(rest) != count:
        raise BrokenSeal("the stream ends, or goes on with something else")
    return session.open(head, rest)


@given(st.lists(st.tuples(st.booleans(), st.binary(max_size=300)), max_size=20))
def test_what_both_sides_say_comes_through_in_order(said: list[tuple[bool, bytes]]) -> None:
    one, other = client(), server()
    for by_client, body in said:
        speaker, listener = (one, other) if by_client else (other, one)
        assert opened(listener, speaker.seal(body)) == body


@given(st.binary(max_size=60), st.data())
def test_a_flipped_bit_at_any_position_breaks_the_seal(body: bytes, data: st.DataObject) -> None:
    frame = bytearray(client().seal(body))
    bit = data.draw(st.integers(0, 8 * len(frame) - 1))
    frame[bit // 8] ^= 1 << bit % 8
    listener = server()
    with pytest.raises(BrokenSeal):
        opened(listener, bytes(frame))
    # It has not counted, and neither would the right one be refused.
    assert opened(listener, client().seal(body)) == body


def test_every_single_bit_of_a_frame_counts() -> None:
    frame = client().seal(BODY)
    for bit in range(8 * len(frame)):
        changed = bytearray(frame)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(BrokenSeal):
            opened(server(), bytes(changed))


@given(st.integers(0, len(BODY) + MAC_BYTES - 1))
def test_a_truncated_frame_is_none(length: int) -> None:
    frame = client().seal(BODY)
    with pytest.raises(BrokenSeal):
        server().open(frame[:HEAD_BYTES], frame[HEAD_BYTES:][:length])


@given(st.lists(st.integers(0, 3), max_size=12))
def test_each_frame_counts_once_and_in_its_turn(arriving: list[int]) -> None:
    speaker, listener = client(), server()
    frames = [speaker.seal(bytes([number])) for number in range(4)]
    heard = 0
    for number in arriving:
        if number == heard:
            assert opened(listener, frames[number]) == bytes([number])
            heard += 1
        else:
            with pytest.raises(BrokenSeal, match="out of turn"):
                opened(listener, frames[number])


@pytest.mark.parametrize(
    "listen",
    [
        lambda: client(),  # its own words, sent back
        lambda: server(SECRET.node("node6", "77").agent()),
        lambda: server(SECRET.node("node5", "78").agent()),
        lambda: server(SECRET.node("node5", "77").worker("node5")),
        lambda: server(SECRET.tool()),
        lambda: server(Secret.of("x" * 40).node("node5", "77").agent()),
        lambda: server(Credential(AGENT.role, SECRET.key)),
        lambda: server(Credential(SECRET.tool().role, AGENT.key)),
        lambda: server(nonces=Nonces(NONCES.client, b"t" * 32)),
        lambda: server(nonces=Nonces(b"d" * 32, NONCES.server)),
        lambda: server(nonces=Nonces(NONCES.server, NONCES.client)),
    ],
)
def test_only_this_connection_of_this_role_opens_it(listen: Callable[[], Session]) -> None:
    with pytest.raises(BrokenSeal):
        opened(listen(), client().seal(BODY))


@given(st.binary(min_size=HEAD_BYTES, max_size=HEAD_BYTES), st.binary(max_size=200))
def test_random_bytes_are_no_frame(head: bytes, rest: bytes) -> None:
    with pytest.raises(BrokenSeal):
        server().num_to_come(head)
        server().open(head, rest)


def test_a_length_beyond_the_limit_is_refused_by_the_head_alone() -> None:
    head = (FRAME_LIMIT_BYTES + 1).to_bytes(4, "big") + client().seal(b"")[4:HEAD_BYTES]
    with pytest.raises(BrokenSeal, match="exceeds"):
        server().num_to_come(head)
    with pytest.raises(BrokenSeal, match="exceeds"):
        server().num_to_come(b"\xff" * HEAD_BYTES)
