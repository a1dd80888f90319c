"""Lost nodes are started again under new names, others are not."""

import pytest

from megatron_bamboo.agent.nodes import LocalNodes


class Clock:
    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


class Handles:
    """Notes what is done to nodes, in order."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def start(self, node: str) -> "Handle":
        self.done.append(f"start {node}")
        return Handle(node, self.done)


class Handle:
    pid = 0

    def __init__(self, node: str, done: list[str]) -> None:
        self._node = node
        self._done = done

    def kill(self) -> None:
        self._done.append(f"kill {self._node}")

    def wait(self) -> None:
        self._done.append(f"wait {self._node}")


def lost(node: str) -> list[dict[str, object]]:
    """What is said of a loss, among other things."""
    return [
        {"line": "something"},
        {"event": {"event": "agent_joined", "node": "node9"}},
        {"event": {"event": "loss", "node": node, "cause": "its connection closed"}},
    ]


@pytest.fixture
def handles() -> Handles:
    return Handles()


def test_a_lost_node_is_ended_and_started_again_when_its_time_has_come(handles: Handles) -> None:
    clock = Clock()
    nodes = LocalNodes(handles.start, 2.0, clock)
    nodes.start("node0")
    nodes.start("node1")
    nodes.hear(lost("node1"))
    clock.seconds += 1.9
    nodes.respawn()
    assert handles.done == ["start node0", "start node1"]
    clock.seconds += 0.1
    for _ in range(2):
        nodes.respawn()
    assert handles.done[2:] == ["kill node1", "wait node1", "start node1.2"]
    nodes.hear(lost("node1.2"))
    clock.seconds += 2.0
    nodes.respawn()
    assert handles.done[5:] == ["kill node1.2", "wait node1.2", "start node1.3"]
    del handles.done[:]
    nodes.end()
    assert set(handles.done) == {f"{do} {node}" for do in ("kill", "wait") for node in
                                 ("node0", "node1.3")}  # fmt: skip


def test_without_being_asked_nothing_is_started_again(handles: Handles) -> None:
    clock = Clock()
    nodes = LocalNodes(handles.start, None, clock)
    nodes.start("node0")
    nodes.hear(lost("node0"))
    clock.seconds += 1e6
    nodes.respawn()
    assert handles.done == ["start node0"]


@pytest.mark.parametrize(("respawn_seconds", "stays"), [(None, False), (None, True), (2.0, False)])
def test_a_node_that_has_left_is_started_again_where_it_is_to_stay_or_is_taken_for_a_while(
    handles: Handles, respawn_seconds: float | None, stays: bool
) -> None:
    clock = Clock()
    nodes = LocalNodes(handles.start, respawn_seconds, clock)
    nodes.start("node0")
    nodes.hear([{"event": {"event": "drained", "node": "node0", "cause": "a", "stays": stays}}])
    nodes.respawn()
    again = ["kill node0", "wait node0", "start node0.2"]
    assert handles.done[1:] == (again if stays else [])
    clock.seconds += 2.0
    nodes.respawn()
    assert handles.done[1:] == (again if stays or respawn_seconds else [])
