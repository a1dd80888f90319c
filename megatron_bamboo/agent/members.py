"""Who lives: what the coordinator knows of nodes from its connections to their agents.

It is in the store before it is acted upon, so that the next coordinator knows it too. Agents say
again whatever they have to say whenever they are connected anew, so what is known already counts
for nothing.
"""

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from typing import Any

from megatron_bamboo.agent.job import LEASE_SECONDS
from megatron_bamboo.agent.leases import Leases
from megatron_bamboo.agent.long_waits import LongWaits
from megatron_bamboo.membership.leaving import (
    ASKED,
    DRAINED,
    HEARD,
    NOTICED,
    RELEASED,
    REMARK,
    Notice,
)
from megatron_bamboo.membership.lives import last_life
from megatron_bamboo.membership.raised import Raised
from megatron_bamboo.membership.store_server import AgentLink
from megatron_bamboo.membership.table import Table
from megatron_bamboo.membership.waits import Wait
from megatron_bamboo.membership.workers import workers_of
from megatron_bamboo.observe.events import Emitter

FINISH = {"op": "finish"}
"""What an agent is told whose workers are to end after their step."""


def leave(stays: bool) -> dict[str, Any]:
    """What an agent is told whose node has left the job in good order.

    Args:
        stays: its machine is not to be taken, so that it may join again.
    """
    return {"op": "leave", "stays": stays}


class Members:
    """The nodes of a job, standbys too; each joins once and then is lost once, is drained, or
    finishes.

    A lost one that is started again joins under another name, and waits as a standby.

    Of an open job no names are known before: the first ``num_open`` that join run it, and all
    others are standbys.

    ``news`` is set at every change. A worker that has written ``done/<worker>`` has nothing left
    to lose, however it ends after that; the loss of any other worker is the loss of its node.
    """

    def __init__(
        self,
        nodes: Sequence[str],
        table: Table,
        events: Emitter,
        tensor_size: int = 1,
        lease_seconds: float = LEASE_SECONDS,
        standbys: Sequence[str] = (),
        num_open: int = 0,
    ) -> None:
        self._nodes = tuple(nodes)
        self._num_open = num_open
        self._standbys = tuple(standbys)
        self._tensor_size = tensor_size
        self._table = table
        self._events = events
        self._links: dict[str, AgentLink] = {}
        self._leases = Leases(lease_seconds)
        self._places: dict[str, str] = {}
        self.waits = LongWaits(lease_seconds)
        """For whom the workers of live nodes wait, and for long."""
        self._agents = {node: json.loads(text) for node, text in self._known("agent/").items()}
        self._exited = set(self._known("exited/"))
        self.lost = {node: cause.decode() for node, cause in self._known("lost/").items()}
        """Each lost node with the sign that it is lost."""
        self.raised = {n: Raised.from_json(text) for n, text in self._known("raised-by/").items()}
        """By node the error that its worker told, in the order in which they ended."""
        self.drained = {n: cause.decode() for n, cause in self._known(DRAINED).items()}
        """By node that has left without a loss, why it was to leave."""
        self.finished = set(self._known("finished/"))
        self.news = asyncio.Event()
        self._is_over = False
        self._is_ending = False
        self._table.fenced.update(self.lost)
        # An earlier coordinator knew them: they have the time of a lease to come back.
        for node in self._agents.keys() - self.lost.keys() - self.finished - self.drained.keys():
            self._leases.grant(node)

    def _known(self, prefix: str) -> dict[str, bytes]:
        """What the store holds under a prefix, in the order in which it was written."""
        items = self._table.items(prefix).items()
        return {key.removeprefix(prefix): value for key, value in items}

    @property
    def is_open(self) -> bool:
        """Whether no names were known before."""
        return self._num_open > 0

    def missing(self) -> str:
        """The nodes that have not joined, in words; nothing if all have."""
        if self._num_open:
            num_missing = self._num_open - len(self._present())
            return f"{num_missing} of {self._num_open} nodes" if num_missing > 0 else ""
        return ", ".join(node for node in self._nodes if node not in self._agents)

    def there(self, nodes: Sequence[str] | None = None) -> str:
        """Who has come to an open job, in words; by default those who have."""
        present = self._present() if nodes is None else nodes
        names = f": {', '.join(present)}" if present else ""
        return f"{len(present)} of {self._num_open} nodes are there{names}"

    def first_nodes(self) -> tuple[str, ...]:
        """Those that begin, in the order of their ranks; once none is missing."""
        if not self._num_open:
            return self._nodes
        return tuple(sorted(self._present()[: self._num_open], key=_numbers_as_such))

    def _present(self) -> list[str]:
        """Those that have joined and not gone, in that order."""
        gone = self.lost.keys() | self.drained.keys()
        return [node for node in self._agents if node not in gone]

    def has_joined(self, node: str) -> bool:
        """Whether a node has ever said hello."""
        return node in self._agents

    def groups(self) -> dict[str, int]:
        """By node that is there its process group: one SIGKILL to it and the node is gone."""
        present = sorted(self._present(), key=_numbers_as_such)
        return {node: self._agents[node]["pid"] for node in present}

    def newcomers(self, number: int) -> tuple[str, ...]:
        """Those that have joined after the first so many, with those that are gone since."""
        return tuple(islice(self._agents, number, None))

    def waiting_standbys(self) -> tuple[str, ...]:
        """The live standbys that have joined, those last that were lost before; in an open job all
        live nodes, as each may wait for a place."""
        present, returned = dict.fromkeys(self._present()), dict.fromkeys(self.returned())
        standbys = present if self._num_open else self._standbys
        waiting = (*(node for node in standbys if node not in returned), *returned)
        return tuple(node for node in waiting if node in present)

    def is_leaving(self, node: str) -> bool:
        """Whether a node is to leave, as far as is known."""
        notice = self._table.get(f"{NOTICED}{node}")
        return notice is not None and not Notice.from_json(notice).is_over

    def returned(self) -> tuple[str, ...]:
        """The nodes that were lost, or drained, and have joined again, under these names."""
        return tuple(node for node in self._agents if last_life(node) is not None)

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

    def release(self, node: str) -> None:
        """Let a node end that has handed over all that it held; its workers wait for this."""
        self._table.set(f"{RELEASED}{node}", b"1")

    def dismiss(self, node: str) -> None:
        """End a node that holds nothing, and is to leave."""
        self.release(node)
        self._ended(node, "it holds nothing")

    def fence_silent(self) -> None:
        """Take the nodes for lost whose lease is over; to be called several times a second."""
        for node, seconds in self._leases.silent().items():
            last = f"; before, it was in {place}" if (place := self._places.get(node)) else ""
            self.fence(node, f"nothing was heard of it for {seconds:.1f} s{last}")

    def ask_to_end(self) -> None:
        """Ask all nodes to end after a step, which their workers agree upon; may be said again."""
        if not self._is_ending:
            self._is_ending = True
            for link in self._links.values():
                link.send(FINISH)

    def stop(self) -> None:
        """End all nodes; how they end counts for nothing any more."""
        self._is_over = True
        for link in self._links.values():
            link.send({"op": "stop"})

    def joined(self, link: AgentLink) -> None:
        """An agent said hello, for the first time or again."""
        node, known = link.node, self._agents.get(link.node)
        agent = {"pid": link.pid, "incarnation": link.incarnation}
        if node in self.drained:
            link.send(leave(self._last_word(node).is_over))
            raise ValueError(f"{node} has left the job")
        if (refusal := self._refusal(node, agent)) is not None:
            link.send({"op": "stop", "cause": refusal})
            raise ValueError(f"{node} is refused: {refusal}")
        with self._table.together():
            self._table.set(f"agent/{node}", json.dumps(agent).encode())
            self._events.emit("agent_back" if known else "agent_joined", node=node, pid=link.pid)
        self._agents[node] = agent
        self._links[node] = link
        if self._is_ending:
            link.send(FINISH)
        if node not in self.finished:
            self._leases.grant(node)
        self.news.set()

    def _refusal(self, node: str, agent: Mapping[str, Any]) -> str | None:
        """Why an agent has no place here; None if it has."""
        if node in self.lost:
            return self.lost[node]
        gone = self.lost.keys() | self.drained.keys()
        is_expected = node in (*self._nodes, *self._standbys) or (
            self._num_open > 0 and last_life(node) is None
        )
        if not is_expected and last_life(node) not in gone:
            return f"no node named {node} is expected"
        if self._agents.get(node) not in (None, agent):
            return f"{node} is another process already"
        return None

    def heard(self, link: AgentLink, message: Mapping[str, Any]) -> None:
        """An agent said that it is there, that its node is to leave or stays after all, or
        reported its worker's start, hang or end."""
        match message:
            case {"op": "started", "worker": worker, "pid": pid}:
                self._worker_started(link.node, str(worker), int(pid))
            case {"op": "hung", "cause": str(cause)}:
                self._ended(link.node, cause)
            case {"op": "alive", "word": str(word), "places": dict(places), "waits": list(waits)}:
                self._places[link.node] = "; ".join(str(place) for place in places.values())
                self.waits.hear(link.node, [Wait.from_fields(wait) for wait in waits])
                if (answer := self._leases.renew(link.node, word)) is not None:
                    link.send({"op": "heard", "word": answer})
            case {"op": "notice", "notice": str(text), "number": int(number)}:
                self._noticed(link.node, Notice.from_json(text), number)
            case {"op": "remark", "text": str(text)}:
                self._table.set(f"{REMARK}{link.node}", text.encode())
            case {"op": "exited", "worker": str(worker), "status": int(status)}:
                self._worker_exited(link.node, worker, status)

    def closed(self, link: AgentLink) -> None:
        """An agent's connection has ended: its node is gone, unless it has made another one."""
        if self._links.get(link.node) is link:
            del self._links[link.node]
            self._ended(link.node, "its connection closed")

    def _noticed(self, node: str, notice: Notice, number: int) -> None:
        """An agent says its newest notice at every connection again; then it is no news."""
        if self._table.get(f"{HEARD}{node}") == str(number).encode():
            return
        asked = self._table.get(f"{ASKED}{node}")
        wish = None if asked is None else Notice.from_json(asked)
        stands = notice
        if notice.is_over and wish is not None and not wish.is_over:
            stands = wish
        with self._table.together():
            self._table.set(f"{HEARD}{node}", str(number).encode())
            self._table.set(f"{NOTICED}{node}", stands.to_json().encode())
            self._events.emit("notice", node=node, **asdict(notice))

    def _worker_started(self, node: str, worker: str, pid: int) -> None:
        if self._table.get(f"started/{worker}") is None:
            with self._table.together():
                self._table.set(f"started/{worker}", str(pid).encode())
                self._events.emit("worker_started", node=node, worker=worker, pid=pid)

    def _worker_exited(self, node: str, worker: str, status: int) -> None:
        """A node ends with the last of its workers, or with the first that was not done."""
        if worker in self._exited:
            return
        self._exited.add(worker)
        cause = self._cause_of_exit(node, worker, status)
        if cause is not None:
            self._ended(node, cause)
        with self._table.together():
            self._table.set(f"exited/{worker}", str(status).encode())
            if cause is None:
                self._events.emit("worker_finished", node=node, worker=worker)

    def _cause_of_exit(self, node: str, worker: str, status: int) -> str | None:
        """What a node ends of with this worker; None if it goes on."""
        may_end = self.is_worker_done(worker) or (self._is_released(node) and status == 0)
        if may_end and not self._exited.issuperset(self.workers_of(node)):
            return None
        if (told := self._table.get(f"raised/{worker}")) is not None:
            if node not in self.raised:
                self._table.set(f"raised-by/{node}", told)
                self.raised[node] = Raised.from_json(told)
            return f"its worker raised {self.raised[node]}"
        if status < 0:
            return f"its worker was ended by signal {-status}"
        if status == 0:
            return "its worker ended with status 0 before the training was over"
        return f"its worker ended with status {status}"

    def _is_released(self, node: str) -> bool:
        return self._table.get(f"{RELEASED}{node}") is not None

    def _drained(self, node: str) -> None:
        """A node that was released has ended, however."""
        notice = self._last_word(node)
        with self._table.together():
            self._table.set(f"{DRAINED}{node}", notice.cause.encode())
            self._events.emit("drained", node=node, cause=notice.cause, stays=notice.is_over)
        self._leases.end(node)
        self.waits.forget(node)
        self.drained[node] = notice.cause
        if (link := self._links.get(node)) is not None:
            link.send(leave(notice.is_over))
        self.news.set()

    def _last_word(self, node: str) -> Notice:
        """Why a node has left, or that it need not have."""
        value = self._table.get(f"{NOTICED}{node}")
        return Notice("nobody wants it") if value is None else Notice.from_json(value)

    def _ended(self, node: str, cause: str) -> None:
        known = (*self.finished, *self.lost, *self.drained)
        if self._is_over or node in known:
            return
        if self._is_released(node):
            self._drained(node)
            return
        is_done = self.is_done(node)
        with self._table.together():
            self._table.set(f"{'finished' if is_done else 'lost'}/{node}", cause.encode())
            self._events.emit("finished" if is_done else "loss", node=node, cause=cause)
        self._leases.end(node)
        self.waits.forget(node)
        if is_done:
            self.finished.add(node)
        else:
            self.lost[node] = cause
            # Whatever still runs there, or will when it is awake again, is refused and ended.
            self._table.fenced.add(node)
            if (link := self._links.get(node)) is not None:
                link.send({"op": "stop", "cause": cause})
        self.news.set()


def _numbers_as_such(name: str) -> tuple[tuple[int, str], ...]:
    """By this node2 comes before node10."""
    parts = re.findall(r"\d+|\D+", name)
    return tuple((int(part), "") if part.isdecimal() else (-1, part) for part in parts)
