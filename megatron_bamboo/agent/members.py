"""Who lives: what the coordinator knows of nodes from its connections to their agents."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_bamboo.agent.job import LEASE_SECONDS
from megatron_bamboo.agent.leases import Leases
from megatron_bamboo.membership.raised import Raised
from megatron_bamboo.membership.store_server import AgentLink
from megatron_bamboo.membership.table import Table
from megatron_bamboo.membership.workers import workers_of
from megatron_bamboo.observe.events import EventLog


class Members:
    """The nodes of a job, standbys too; each joins once and then is lost once, or finishes.

    ``news`` is set at every change. A worker that has written ``done/<worker>`` has nothing left
    to lose, however it ends after that; the loss of any other worker is the loss of its node.
    """

    def __init__(
        self,
        nodes: Sequence[str],
        table: Table,
        events: EventLog,
        tensor_size: int = 1,
        lease_seconds: float = LEASE_SECONDS,
        standbys: Sequence[str] = (),
    ) -> None:
        self._nodes = tuple(nodes)
        self._standbys = tuple(standbys)
        self._tensor_size = tensor_size
        self._table = table
        self._events = events
        self._links: dict[str, AgentLink] = {}
        self._leases = Leases(lease_seconds)
        self._places: dict[str, str] = {}
        self._exited: set[str] = set()
        self.lost: dict[str, str] = {}
        """Each lost node with the sign that it is lost."""
        self.raised: dict[str, Raised] = {}
        """By node the error that its worker told, in the order in which they ended."""
        self.finished: set[str] = set()
        self.news = asyncio.Event()
        self._is_over = False

    def missing(self) -> list[str]:
        """The nodes that have not joined."""
        return [node for node in self._nodes if node not in self._links]

    def groups(self) -> dict[str, int]:
        """By node its process group: one SIGKILL to it and the node is gone."""
        return {node: link.pid for node, link in sorted(self._links.items())}

    def waiting_standbys(self) -> tuple[str, ...]:
        """The live standbys that have joined."""
        return tuple(n for n in self._standbys if n in self._links and n not in self.lost)

    def is_ready(self, node: str) -> bool:
        """Whether all workers of a node hold what they will begin with."""
        ready = (self._table.get(f"ready/{worker}") for worker in self.workers_of(node))
        return all(value is not None for value in ready)

    def is_done(self, node: str) -> bool:
        """Whether all workers of a node have finished the whole training."""
        return all(map(self.is_worker_done, self.workers_of(node)))

    def is_worker_done(self, worker: str) -> bool:
        """Whether one worker has finished the whole training."""
        return self._table.get(f"done/{worker}") is not None

    def workers_of(self, *nodes: str) -> tuple[str, ...]:
        """The names of the workers of some nodes."""
        return workers_of(nodes, self._tensor_size)

    def fence(self, node: str, cause: str) -> None:
        """Take a node for lost and end it, though it may still run."""
        self._ended(node, cause)

    def fence_silent(self) -> None:
        """Take the nodes for lost whose lease is over; to be called several times a second."""
        for node, seconds in self._leases.silent().items():
            last = f", last in {place}" if (place := self._places.get(node)) else ""
            self.fence(node, f"nothing was heard of it for {seconds:.1f} s{last}")

    def stop(self) -> None:
        """End all nodes; how they end counts for nothing any more."""
        self._is_over = True
        for link in self._links.values():
            link.send({"op": "stop"})

    def joined(self, link: AgentLink) -> None:
        """An agent said hello."""
        if link.node in self._links or link.node not in (*self._nodes, *self._standbys):
            raise ValueError(f"no node named {link.node} is expected")
        self._links[link.node] = link
        self._leases.grant(link.node)
        self._events.emit("agent_joined", node=link.node, pid=link.pid)
        self.news.set()

    def heard(self, link: AgentLink, message: Mapping[str, Any]) -> None:
        """An agent said that it is there, or reported its worker's start, hang or end."""
        match message:
            case {"op": "started", "worker": worker, "pid": pid}:
                self._events.emit("worker_started", node=link.node, worker=worker, pid=pid)
            case {"op": "hung", "cause": str(cause)}:
                self._ended(link.node, cause)
            case {"op": "alive", "word": str(word), "places": dict(places)}:
                self._places[link.node] = "; ".join(str(place) for place in places.values())
                if (answer := self._leases.renew(link.node, word)) is not None:
                    link.send({"op": "heard", "word": answer})
            case {"op": "exited", "worker": str(worker), "status": int(status)}:
                self._worker_exited(link.node, worker, status)

    def closed(self, link: AgentLink) -> None:
        """An agent's connection has ended: its node is gone."""
        self._ended(link.node, "its connection closed")

    def _worker_exited(self, node: str, worker: str, status: int) -> None:
        """A node ends with the last of its workers, or with the first that was not done."""
        self._exited.add(worker)
        if self.is_worker_done(worker) and not self._exited.issuperset(self.workers_of(node)):
            self._events.emit("worker_finished", node=node, worker=worker)
        elif (told := self._table.get(f"raised/{worker}")) is not None:
            self.raised.setdefault(node, Raised.from_json(told))
            self._ended(node, f"its worker raised {self.raised[node]}")
        elif status < 0:
            self._ended(node, f"its worker was ended by signal {-status}")
        elif status == 0:
            self._ended(node, "its worker ended with status 0 before the training was over")
        else:
            self._ended(node, f"its worker ended with status {status}")

    def _ended(self, node: str, cause: str) -> None:
        if self._is_over or node in self.finished or node in self.lost:
            return
        self._leases.end(node)
        if self.is_done(node):
            self.finished.add(node)
            self._events.emit("finished", node=node, cause=cause)
        else:
            self.lost[node] = cause
            self._events.emit("loss", node=node, cause=cause)
            # Whatever still runs there, or will when it is awake again, is refused and ended.
            self._table.fenced.add(node)
            self._links[node].send({"op": "stop", "cause": cause})
        self.news.set()
