"""The launcher's care for the nodes: it starts them, and a lost one again if it is asked to.

A node is lost when the coordinator says so, and then for good; one that was drained has left as
finally. Some time later its machine is there again, or at once if it was not taken after all:
whatever still runs of the node is ended, and it is started as another one
(``membership/lives.py``), which waits as a standby like any other.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from megatron_bamboo.agent.process import NodeHandle, blocked_interrupts
from megatron_bamboo.membership.lives import next_life


class LocalNodes:
    """The nodes of a job on this machine.

    Args:
        start: starts the node of a name.
        respawn_seconds: so long after it was lost, or has left, a node is started again; None for
            never.
    """

    def __init__(
        self,
        start: Callable[[str], NodeHandle],
        respawn_seconds: float | None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._start = start
        self._respawn_seconds = respawn_seconds
        self._now = now
        self._handles: dict[str, NodeHandle] = {}
        self._due: dict[str, float] = {}

    def start(self, node: str) -> None:
        """Start a node that has not been started yet."""
        with blocked_interrupts():
            self._handles[node] = self._start(node)

    def hear(self, facts: Iterable[Mapping[str, Any]]) -> None:
        """Take what a coordinator has said: losses, and nodes that have left."""
        for event in (fact.get("event") for fact in facts):
            match event:
                case {"event": "drained", "node": node, "stays": True}:
                    self._due[node] = self._now()
                case {"event": "loss" | "drained", "node": node} if self._respawn_seconds:
                    self._due[node] = self._now() + self._respawn_seconds

    def respawn(self) -> None:
        """Start those again whose time has come; to be called several times a second."""
        for node in [node for node, due in self._due.items() if due <= self._now()]:
            del self._due[node]
            self._end(node)
            self.start(next_life(node))

    def end(self) -> None:
        """End all nodes."""
        for handle in self._handles.values():
            handle.kill()
        for node in list(self._handles):
            self._end(node)

    def _end(self, node: str) -> None:
        """End what still runs of a node; it may have been stopped, or its network silent."""
        with blocked_interrupts():
            handle = self._handles.pop(node)
            handle.kill()
            handle.wait()
