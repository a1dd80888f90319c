"""The launcher's care for the nodes: it starts them, and a lost one again if it is asked to.

A node is lost when the coordinator says so, and then for good; one that was drained has left as
finally. Some time later its machine is there again, or at once if it was not taken after all:
whatever still runs of the node is ended, and it is started as another one
(``membership/lives.py``), which waits as a standby like any other. One that ended before it had
joined was never known to anybody, so it is started again as itself.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from megatron_bamboo.agent.process import NodeHandle, blocked_interrupts
from megatron_bamboo.membership.lives import next_life


class Nodes(Protocol):
    """A job's nodes, as far as its launcher has to do with them."""

    failure: str | None
    """Why nothing is started any more, if that is so: the job has no hope."""

    def start(self, node: str) -> None:
        """Start a node that does not run."""

    def hear(self, facts: Iterable[Mapping[str, Any]]) -> None:
        """Take what a coordinator has said."""

    def respawn(self) -> None:
        """Start those again whose time has come."""

    def end(self) -> None:
        """End all nodes."""


class NodesElsewhere:
    """Nodes that others start, and start again: Slurm, or people."""

    failure: str | None = None

    def start(self, node: str) -> None:
        """Others do."""

    def hear(self, facts: Iterable[Mapping[str, Any]]) -> None:
        """Others see it."""

    def respawn(self) -> None:
        """Others do."""

    def end(self) -> None:
        """They end when the job has an outcome."""


class LocalNodes:
    """The nodes of a job on this machine.

    Args:
        start: starts the node of a name.
        respawn_seconds: so long after it was lost, or has left, a node is started again; None for
            never.
        max_failures: losses and failed starts without a step between them, before nothing is
            started again.
        differs: says why one that is started now would run something else than the job does; None
            if it would not.
        say: takes a line for the job's user.
    """

    def __init__(
        self,
        start: Callable[[str], NodeHandle],
        respawn_seconds: float | None,
        max_failures: int,
        now: Callable[[], float] = time.monotonic,
        differs: Callable[[], str | None] = lambda: None,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._start = start
        self._differs = differs
        self._say = say
        self._respawn_seconds = respawn_seconds
        self._max_failures = max_failures
        self._now = now
        self._handles: dict[str, NodeHandle] = {}
        self._due: dict[str, float] = {}
        self._joined: set[str] = set()
        self._num_failures = 0
        self.failure: str | None = None
        """Why nothing is started any more, if that is so: the job has no hope."""

    def start(self, node: str) -> None:
        """Start a node that does not run."""
        with blocked_interrupts():
            self._handles[node] = self._start(node)

    def hear(self, facts: Iterable[Mapping[str, Any]]) -> None:
        """Take what a coordinator has said: losses, nodes that have left, and steps that pass."""
        for fact in facts:
            # That of the training: a step has passed, for the first time.
            if "loss" in fact and "again" not in fact["loss"]:
                self._num_failures = 0
            match fact.get("event"):
                case {"event": "agent_joined", "node": node}:
                    self._joined.add(node)
                    self._due.pop(node, None)
                case {"event": "loss" | "drained", "node": node, **more}:
                    self._joined.add(node)
                    self._start_later(node, 0.0 if more.get("stays") else self._respawn_seconds)
                case {"event": "ending", "lost": [_, *_]}:
                    self._num_failures += 1

    def respawn(self) -> None:
        """Start those again whose time has come; to be called several times a second."""
        if self._respawn_seconds is not None:
            self._look_for_failed_starts(self._respawn_seconds)
        if self.failure is not None:
            return
        for node in [node for node, due in self._due.items() if due <= self._now()]:
            del self._due[node]
            self._end(node)
            if (difference := self._differs()) is None:
                self.start(next_life(node) if node in self._joined else node)
            else:
                self._say(f"{node} is not started again: {difference}")

    def end(self) -> None:
        """End all nodes."""
        for handle in self._handles.values():
            handle.kill()
        for node in list(self._handles):
            self._end(node)

    def _start_later(self, node: str, seconds: float | None) -> None:
        """Let a node be started again after so long; None for never."""
        if seconds is not None:
            self._due[node] = self._now() + seconds

    def _look_for_failed_starts(self, respawn_seconds: float) -> None:
        """Those that have ended and not joined count as failures, as losses do."""
        for node in sorted(self._handles.keys() - self._joined - self._due.keys()):
            if not self._handles[node].has_ended():
                continue
            self._start_later(node, respawn_seconds)
            self._num_failures += 1
            if self._num_failures > self._max_failures:
                self.failure = (
                    "nodes were lost, or ended before they had joined, more than "
                    f"{self._max_failures} times since an iteration passed, at last {node}"
                )

    def _end(self, node: str) -> None:
        """End what still runs of a node; it may have been stopped, or its network silent."""
        with blocked_interrupts():
            handle = self._handles.pop(node)
            handle.kill()
            handle.wait()
