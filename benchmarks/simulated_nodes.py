"""Nodes that do not train: the control plane's own objects of many nodes, in one process.

Each node has what an agent has, its link to the coordinator with beats at the pace of its lease,
and what a worker has of the store: a client with a connection for each of its two threads, the
ledger of commits, and the thread that follows the epochs and leaves records. Steps pass when the
benchmark says so. Groups are not made, and nothing is computed.
"""

import os
import random
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from megatron_bamboo.agent.leases import beat_seconds
from megatron_bamboo.agent.link import CoordinatorLink, unheard_seconds
from megatron_bamboo.execution.epochs import EpochWatch, Handlers, StepProgress
from megatron_bamboo.execution.errors import EpochEnded
from megatron_bamboo.execution.ledger import CommitLedger
from megatron_bamboo.membership.assignment import Assignment
from megatron_bamboo.membership.keys import NodeIdentity
from megatron_bamboo.membership.store_client import StoreClient
from megatron_bamboo.observe.events import EventLog
from megatron_bamboo.planner.plan import Plan
from megatron_bamboo.schedule.actions import Action
from megatron_bamboo.schedule.takeover import Progress

LOOK_SECONDS = 0.25
SLICE_SECONDS = 0.02
STORE_SECONDS = 120.0
IDLE_SECONDS = 0.5
# What a commit hands over: as many sums of squares as a model of 98 units has.
VECTOR = tuple(1.0 / unit for unit in range(1, 99))
_plan_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class NodesSettings:
    """What the nodes of one process are told."""

    identities: tuple[NodeIdentity, ...]
    store: str
    job_dir: Path
    lease_seconds: float
    num_microbatches: int


@lru_cache(maxsize=4)
def _parse(published: bytes) -> Plan:
    return Plan.from_json(published)


def _read_plan(published: bytes) -> Plan:
    """Once for all nodes here: each would have a processor of its own for it."""
    with _plan_lock:
        return _parse(published)


class SimulatedNode:
    """One node; its agent's part belongs to whoever calls, its worker's to threads of its own."""

    def __init__(self, identity: NodeIdentity, settings: NodesSettings, events: EventLog) -> None:
        self.name = identity.node
        self._settings = settings
        self._credential = identity.worker(self.name)
        store, job_dir = settings.store, settings.job_dir
        unheard = unheard_seconds(settings.lease_seconds)
        self.link = CoordinatorLink(identity, store, job_dir, STORE_SECONDS, events, unheard)
        self._beat_seconds = beat_seconds(settings.lease_seconds)
        self._next_beat = time.monotonic() + random.uniform(0.0, self._beat_seconds)
        self.last_beat = 0.0
        self._client: StoreClient | None = None
        self._watch: EpochWatch | None = None
        self._ledger = CommitLedger(self.name)
        self._step = 0
        self._wake = threading.Event()
        self._is_gone = False

    def start(self, welcomed: Callable[["SimulatedNode"], None]) -> None:
        """Join, and be the worker's main thread; in a thread of its own."""
        threading.Thread(target=self._run, args=[welcomed], daemon=True).start()

    def beat(self) -> None:
        """Say that this node is there, if it is time to."""
        now = time.monotonic()
        if now >= self._next_beat:
            self._next_beat = now + self._beat_seconds
            self.last_beat = now
            self.link.beat({self.name: f"step {self._step + 1}, 0.0F0"})

    def commit(self, step: int) -> None:
        """Pass the commit of a step, unless the epoch was left."""
        if self._watch is None or self._step >= step:
            return
        try:
            self._ledger.commit(step, lambda: VECTOR, lambda: None)
            self._step = step
        except EpochEnded:
            pass  # the next plan decides; a later step finds this node in it

    def fall_silent(self) -> None:
        """Say nothing any more; all connections stay."""
        self._is_gone = True
        if self._watch is not None:
            self._watch.close()
        self._wake.set()

    def die(self) -> None:
        """Close all connections, as the kernel does for a process that is killed."""
        self.fall_silent()
        if self._client is not None:
            self._client.close()
        if (descriptor := self.link.fileno) is not None:
            with socket.socket(fileno=os.dup(descriptor)) as connection:
                connection.shutdown(socket.SHUT_RDWR)

    def _run(self, welcomed: Callable[["SimulatedNode"], None]) -> None:
        if not self.link.await_welcome():
            return
        self.link.report({"op": "started", "worker": self.name, "pid": os.getpid()})
        welcomed(self)
        self._client = StoreClient(self._settings.store, STORE_SECONDS, self._credential)
        plan = Assignment(self._client, self.name, _read_plan).plan()
        handlers = Handlers(
            leave_groups=lambda epoch, lost: None,
            progress=self._progress,
            read_plan=_read_plan,
            wake=self._wake.set,
            prepare=lambda plan: None,
            failed=lambda error: None,
        )
        watch = EpochWatch(self._client, self.name, 1, plan, self._ledger, handlers)
        watch.start()
        self._watch = watch
        self._client.set(f"ready/{self.name}", b"1")
        while not self._is_gone:
            self._wake.wait(IDLE_SECONDS)
            self._wake.clear()
            while watch.has_pending() and not self._is_gone:
                self._follow(watch, watch.take_pending())

    def _follow(self, watch: EpochWatch, plan: Plan) -> None:
        """Act by a plan; where a pipeline was hit its survivors read each other's progress."""
        self._ledger.follow(plan.epoch)
        pipeline = plan.pipelines[plan.pipeline_of(self.name)]
        if set(plan.lost) & set(pipeline.ranks):
            for peer in sorted(set(pipeline.stages) - {self.name}):
                watch.progress_of(plan.epoch - 1, peer, STORE_SECONDS)

    def _progress(self) -> StepProgress:
        """That of a worker in the middle of a step."""
        half = range(self._settings.num_microbatches // 2)
        done = frozenset(Action.parse(f"0.0F{m}") for m in half)
        received = frozenset(Action.parse(f"1.0RECV_F{m}") for m in half)
        return StepProgress(self._step + 1, Progress(done, received))


class SimulatedNodes:
    """All nodes of one process.

    Args:
        step: the newest step that all are to pass, which the benchmark counts up.
    """

    def __init__(self, settings: NodesSettings, pipe: Connection, step: Any) -> None:
        self._pipe = pipe
        self._step = step
        events = EventLog(settings.job_dir / "events", f"simulated-{os.getpid()}")
        nodes = [SimulatedNode(identity, settings, events) for identity in settings.identities]
        self._nodes = {node.name: node for node in nodes}
        self._joined: list[SimulatedNode] = []
        self._next_look = time.monotonic()

    def run(self) -> NoReturn:
        """Serve until this process is ended."""
        for node in self._nodes.values():
            node.start(self._joined.append)
        while True:
            nodes = list(self._joined)
            self._hear(nodes)
            if time.monotonic() >= self._next_look:
                self._next_look = time.monotonic() + LOOK_SECONDS
                ended = [node.name for node in nodes if node.link.is_over()]
                assert not ended, f"{ended} were told that the job is over"
            for node in nodes:
                node.beat()
                node.commit(self._step.value)
            if self._pipe.poll():
                self._pipe.send(self._obey(*self._pipe.recv()))

    def _hear(self, nodes: Sequence[SimulatedNode]) -> None:
        poll, by_descriptor = select.poll(), {}
        for node in nodes:
            if (descriptor := node.link.fileno) is not None:
                by_descriptor[descriptor] = node
                poll.register(descriptor, select.POLLIN)
        for descriptor, _ in poll.poll(1000 * SLICE_SECONDS):
            node = by_descriptor[descriptor]
            assert not node.link.hear_stop(), f"{node.name} was told to stop"

    def _obey(self, command: str, names: Sequence[str]) -> dict[str, float]:
        """Let some nodes die or fall silent; by node when it was heard of last."""
        heard = {}
        for name in names:
            node = self._nodes[name]
            self._joined.remove(node)
            if command == "die":
                node.die()
                heard[name] = time.monotonic()
            else:
                node.fall_silent()
                heard[name] = node.last_beat
        return heard
