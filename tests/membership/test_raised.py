"""Whose error it is: a node's, or the script's own."""

from collections.abc import Mapping

import pytest
from server_thread import ServerThread, credential

from megatron_bamboo.membership.place import START, Place
from megatron_bamboo.membership.raised import Raised, all_raised_alike, script_error, tell_raised
from megatron_bamboo.membership.store_client import StoreClient

PIPELINES = (("node0", "node1", "node2"), ("node3", "node4", "node5"))


def bug(action: str, step: int = 3, kind: str = "KeyError") -> Raised:
    return Raised(kind, "a bug", Place(step, action))


@pytest.mark.parametrize(
    ("raised", "nodes"),
    [
        ({}, None),
        ({"node1": bug("1.0F0")}, None),
        # The shadow raises in the victim's stage what the victim raised.
        ({"node1": bug("1.0F0"), "node0": bug("1.0B2")}, ("node1", "node0")),
        ({"node1": bug("1.0F0"), "node0": bug("0.0F0")}, None),
        ({"node1": bug("1.0F0"), "node0": bug("1.0F0", step=4)}, None),
        ({"node1": bug("1.0F0"), "node0": bug("1.0F0", kind="OSError")}, None),
        # The same stage of two pipelines is two nodes that may both be bad.
        ({"node1": bug("1.0F0"), "node4": bug("1.0F0")}, None),
        # The loop is of no stage, and an evaluation is.
        ({"node0": bug("the loop"), "node2": bug("the loop")}, ("node0", "node2")),
        (
            {"node1": bug("1.0F0 in the evaluation"), "node2": bug("2.0F0 in the evaluation")},
            None,
        ),
        (
            {"node1": bug("1.0F0 in the evaluation"), "node0": bug("1.0F2 in the evaluation")},
            ("node1", "node0"),
        ),
        # Nobody of a pipeline is left.
        (
            {"node5": bug("2.0F0"), "node4": bug(START), "node3": bug("0COMMIT", kind="OSError")},
            ("node5", "node4", "node3"),
        ),
        ({"node0": bug(START, 0), "node2": bug(START, 0)}, ("node0", "node2")),
    ],
)
def test_script_error(raised: Mapping[str, Raised], nodes: tuple[str, ...] | None) -> None:
    assert script_error(PIPELINES, raised) == nodes


def test_a_stage_and_its_replica_may_be_lost_by_one_error() -> None:
    raised = {"node0": bug("0.0F1"), "node2": bug("2.0F0"), "node1": bug("1.0F1", step=4)}
    assert all_raised_alike(("node0", "node2"), raised)
    assert not all_raised_alike(("node0", "node1"), raised)
    assert not all_raised_alike(("node0", "node3"), raised)
    assert not all_raised_alike(("node0",), raised)


@pytest.mark.parametrize("message", ["", "first line\nsecond"])
def test_an_error_is_told_to_the_store(
    server: ServerThread, client: StoreClient, message: str
) -> None:
    raised = Raised.of(RuntimeError(message), Place(2, "1.0F0"))
    tell_raised(server.address, credential("node1"), raised)
    told = Raised.from_json(client.get("raised/node1") or b"")
    assert told == raised
    said = "RuntimeError: first line" if message else "RuntimeError"
    assert str(told) == f"{said} (in 1.0F0 of step 2)"


def test_a_store_that_is_gone_keeps_no_worker_from_ending() -> None:
    server = ServerThread()
    server.stop()
    tell_raised(
        server.address,
        credential("node1"),
        Raised.of(RuntimeError("a bug"), Place(2, "1.0F0")),
        0.2,
    )
