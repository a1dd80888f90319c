"""Keys of the control plane: each good for one role, and none leads to another."""

import hashlib
import hmac
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_bamboo.membership.keys import Kind, NodeIdentity, Role, Secret, derive

SECRET = Secret.of("a secret that is as long as it must be")
AGENT = Role(Kind.AGENT, "node5", "77")


def test_derivation_is_hmac_of_parts_with_their_lengths() -> None:
    """Against RFC 2104 written out: an inner and an outer hash."""
    key, text = b"k" * 32, b"\0\0\0\x04node\0\0\0\x01x"
    inner = hashlib.sha256(bytes(b ^ 0x36 for b in key.ljust(64, b"\0")) + text).digest()
    outer = hashlib.sha256(bytes(b ^ 0x5C for b in key.ljust(64, b"\0")) + inner).digest()
    assert derive(key, b"node", b"x") == outer == hmac.digest(key, text, "sha256")


@given(st.lists(st.binary(max_size=5), max_size=4), st.lists(st.binary(max_size=5), max_size=4))
def test_other_parts_give_another_key(first: list[bytes], second: list[bytes]) -> None:
    assert (derive(SECRET.key, *first) == derive(SECRET.key, *second)) == (first == second)


@pytest.mark.parametrize(
    "other",
    [
        Role(Kind.AGENT, "node6", "77"),
        Role(Kind.AGENT, "node5.2", "77"),
        Role(Kind.AGENT, "node5", "78"),
        Role(Kind.WORKER, "node5", "77"),
        Role(Kind.WORKER, "node5:1", "77"),
        Role(Kind.TOOL),
    ],
)
def test_each_role_has_a_key_of_its_own(other: Role) -> None:
    assert SECRET.key_of(other) != SECRET.key_of(AGENT)
    assert SECRET.key_of(other) != SECRET.key


def test_a_node_has_the_keys_of_its_own_parts_and_no_others() -> None:
    identity = SECRET.node("node5", "77")
    assert SECRET.key_of(AGENT) == identity.agent().key
    assert SECRET.key_of(Role(Kind.WORKER, "node5:1", "77")) == identity.worker("node5:1").key
    assert SECRET.tool().key == SECRET.key_of(Role(Kind.TOOL))
    with pytest.raises(AssertionError):
        identity.worker("node6:1")
    posing = replace(identity, node="node6")
    assert posing.agent().key != SECRET.key_of(Role(Kind.AGENT, "node6", "77"))


def test_an_identity_passes_through_the_environment_and_is_never_shown() -> None:
    identity = SECRET.node("node5.2", "7:7")
    assert NodeIdentity.from_text("node5.2", identity.to_text()) == identity
    shown = f"{SECRET} {identity} {identity.agent()}"
    assert not any(key.hex() in shown or repr(key) in shown for key in (SECRET.key, identity.key))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"kind": "agent", "name": "node5"},
        {"kind": "agent", "name": "node5", "incarnation": ""},
        {"kind": "agent", "name": "node5", "incarnation": 7},
        {"kind": "worker", "name": "", "incarnation": "77"},
        {"kind": "tool", "name": "node5", "incarnation": "77"},
        {"kind": "leader", "name": "node5", "incarnation": "77"},
        {"kind": "agent", "name": "n" * 201, "incarnation": "77"},
        {"kind": ["agent"], "name": {}, "incarnation": None},
    ],
)
def test_nobody_can_be_that(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        Role.parse(fields)


def test_a_short_secret_is_none() -> None:
    with pytest.raises(ValueError, match="32 characters"):
        Secret.of("x" * 31)
