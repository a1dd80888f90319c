"""Lost nodes are started again under new names, those that never came under their own."""

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
        self.newest: dict[str, Handle] = {}

    def start(self, node: str) -> "Handle":
        self.done.append(f"start {node}")
        self.newest[node] = Handle(node, self.done)
        return self.newest[node]


class Handle:
    pid = 0

    def __init__(self, node: str, done: list[str]) -> None:
        self._node = node
        self._done = done
        self.ended = False

    def has_ended(self) -> bool:
        return self.ended

    def kill(self) -> None:
        self._done.append(f"kill {self._node}")

    def wait(self) -> None:
        self._done.append(f"wait {self._node}")


def joined(node: str) -> list[dict[str, object]]:
    return [{"event": {"event": "agent_joined", "node": node}}]


def epoch_ends(*nodes: str) -> list[dict[str, object]]:
    """What is said when a coordinator acts upon losses, or upon none."""
    return [{"event": {"event": "ending", "lost": list(nodes)}}]


def passed() -> list[dict[str, object]]:
    return [{"line": "iteration 5", "loss": {"step": 5}}]


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
    nodes = LocalNodes(handles.start, 2.0, 3, clock)
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
    nodes = LocalNodes(handles.start, None, 3, clock)
    nodes.start("node0")
    nodes.start("node1")
    nodes.hear(lost("node0"))
    handles.newest["node1"].ended = True
    for _ in range(2):
        nodes.respawn()
        clock.seconds += 1e6
    assert handles.done == ["start node0", "start node1"]


@pytest.mark.parametrize(("respawn_seconds", "stays"), [(None, False), (None, True), (2.0, False)])
def test_a_node_that_has_left_is_started_again_where_it_is_to_stay_or_is_taken_for_a_while(
    handles: Handles, respawn_seconds: float | None, stays: bool
) -> None:
    clock = Clock()
    nodes = LocalNodes(handles.start, respawn_seconds, 3, clock)
    nodes.start("node0")
    nodes.hear(joined("node0"))
    nodes.hear([{"event": {"event": "drained", "node": "node0", "cause": "a", "stays": stays}}])
    nodes.respawn()
    again = ["kill node0", "wait node0", "start node0.2"]
    assert handles.done[1:] == (again if stays else [])
    clock.seconds += 2.0
    nodes.respawn()
    assert handles.done[1:] == (again if stays or respawn_seconds else [])


class Machine:
    """Nodes with three failures at most, and a clock that goes on by two respawn times a look."""

    def __init__(self, handles: Handles) -> None:
        self.clock = Clock()
        self.handles = handles
        self.nodes = LocalNodes(handles.start, 2.0, 3, self.clock)
        self.nodes.start("node0")

    def fail(self, node: str) -> None:
        """A node ends, and is started again if it is."""
        self.handles.newest[node].ended = True
        for _ in range(2):
            self.nodes.respawn()
            self.clock.seconds += 4.0
        del self.handles.done[:]


@pytest.fixture
def machine(handles: Handles) -> Machine:
    return Machine(handles)


def test_a_node_that_ends_before_it_has_joined_is_started_again(machine: Machine) -> None:
    machine.handles.newest["node0"].ended = True
    machine.nodes.respawn()
    assert machine.handles.done == ["start node0"]
    machine.clock.seconds += 2.0
    machine.nodes.respawn()
    assert machine.handles.done[1:] == ["kill node0", "wait node0", "start node0"]
    machine.clock.seconds += 2.0
    machine.nodes.respawn()
    assert len(machine.handles.done) == 4


def test_who_has_joined_is_lost_only_when_it_is_said(machine: Machine) -> None:
    machine.handles.newest["node0"].ended = True
    machine.nodes.respawn()
    machine.nodes.hear(joined("node0"))  # it had; its words were not read yet
    machine.clock.seconds += 2.0
    machine.nodes.respawn()
    assert machine.handles.done == ["start node0"]
    machine.nodes.hear(lost("node0"))
    machine.clock.seconds += 2.0
    machine.nodes.respawn()
    assert machine.handles.done[1:] == ["kill node0", "wait node0", "start node0.2"]


def test_starts_that_fail_count_as_losses_do(machine: Machine) -> None:
    machine.nodes.hear(epoch_ends("node7"))
    machine.nodes.hear(epoch_ends())
    for _ in range(2):
        machine.fail("node0")
        assert machine.nodes.failure is None
    machine.handles.newest["node0"].ended = True
    machine.nodes.respawn()
    assert machine.nodes.failure == (
        "nodes were lost, or ended before they had joined, more than 3 times since an iteration "
        "passed, at last node0"
    )
    machine.clock.seconds += 100.0
    machine.nodes.respawn()
    assert machine.handles.done == []


def test_a_step_that_passes_ends_the_count(machine: Machine) -> None:
    for _ in range(5):
        machine.fail("node0")
        machine.nodes.hear(passed())
    assert machine.nodes.failure is None


def test_what_would_run_something_else_is_not_started_again(handles: Handles) -> None:
    clock, said, differences = Clock(), list[str](), [None, "script train.py: it is another"]
    nodes = LocalNodes(handles.start, 1.0, 3, clock, lambda: differences[0], said.append)
    for node in ("node0", "node1"):
        nodes.start(node)
        nodes.hear(lost(node))
        clock.seconds += 1.5
        nodes.respawn()
        differences.reverse()
    ended = [f"{what} node{number}" for number in (0, 1) for what in ("start", "kill", "wait")]
    assert handles.done == [*ended[:3], "start node0.2", *ended[3:]]
    assert said == ["node1 is not started again: script train.py: it is another"]
