"""A coordinator against a table in memory, with nodes that do what a test says."""

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron_bamboo.agent.coordinator import Coordinator
from megatron_bamboo.agent.job import Deadlines, JobShape, JobSpec
from megatron_bamboo.agent.report import Reporter
from megatron_bamboo.agent.telling import Announcer
from megatron_bamboo.membership.decision import Record, StepReport
from megatron_bamboo.membership.stopping import STOP_KEY, StopWish
from megatron_bamboo.membership.store_server import AgentLink
from megatron_bamboo.membership.table import Change, Nowhere, Said, Table
from megatron_bamboo.membership.waits import Sent, Wait, Waiting
from megatron_bamboo.planner.arrangement import equal_pipelines
from megatron_bamboo.planner.plan import Plan

NODES = tuple(f"node{number}" for number in range(4))
LATER = ("node6", "node7", "node8", "node9")
"""Nodes of which an open job hears when they join."""
VECTOR = ((2.5).hex(),)


class Writer:
    """Stands in for an agent's connection; keeps what the agent is told."""

    def __init__(self) -> None:
        self.told: list[bytes] = []

    def is_closing(self) -> bool:
        return False

    def write(self, frame: bytes) -> None:
        self.told.append(frame)


class Memory(Nowhere):
    """Keeps in memory what was changed and said."""

    def __init__(self) -> None:
        self.changes: list[Change] = []

    def load(self) -> list[Change]:
        return list(self.changes)

    def keep(self, changes: Sequence[Change]) -> None:
        self.changes += changes

    @property
    def facts(self) -> list[dict[str, Any]]:
        return [json.loads(c.text) for c in self.changes if isinstance(c, Said)]


class Cluster:
    """A coordinator, and nodes that do what a test says."""

    def __init__(
        self,
        tmp_path: Path,
        deadlines: Deadlines,
        standbys: Sequence[str] = (),
        nodes: Sequence[str] = NODES,
        respawn_seconds: float | None = None,
        memory: Memory | None = None,
        **more: Any,
    ) -> None:
        shape = JobShape(
            equal_pipelines(4, 1, 2), "lazy", train_iters=9, global_batch_size=2, **more
        )
        self.memory = Memory() if memory is None else memory
        self.table = Table(self.memory)
        spec = JobSpec(
            tuple(nodes),
            shape,
            tmp_path,
            deadlines=deadlines,
            standbys=tuple(standbys),
            respawn_seconds=respawn_seconds,
        )
        reporter, events = Reporter(self.table, shape), Announcer(self.table, "coordinator")
        self.coordinator = Coordinator(spec, self.table, events, reporter)
        self.links = {
            node: AgentLink(node, 100, Writer())  # type: ignore[arg-type]
            for node in (*NODES, *standbys, *LATER)
        }

    @property
    def said(self) -> list[str]:
        return [fact["line"] for fact in self.memory.facts if "line" in fact]

    def join(self, *nodes: str) -> None:
        for node in nodes:
            self.coordinator.members.joined(self.links[node])
            self.table.set(f"ready/{node}", b"1")

    def lose(self, node: str) -> None:
        self.coordinator.members.closed(self.links[node])

    def finish(self, *nodes: str) -> None:
        for node in nodes:
            self.table.set(f"done/{node}", b"1")
            ended = {"op": "exited", "worker": node, "status": 0}
            self.coordinator.members.heard(self.links[node], ended)

    def record(self, epoch: int, node: str, step: int, entered: bool, passed: bool) -> None:
        record = Record(node, step, entered, passed, VECTOR if passed else None)
        value = record.to_json().encode()
        key = f"record/{epoch}/{node}"
        assert self.table.compare_set(key, None, value) == value

    def confirm(self, step: int, epoch: int) -> None:
        report = StepReport(step, epoch, (1.0).hex(), 0.1, None, 2 * step, 0.1, VECTOR)
        self.table.set(f"passed/{step}", report.to_json().encode())

    def wait(self, node: str, action: str, awaits: str, *sent: Sent) -> None:
        """A node says that it is there, and for whom it has waited for 20 s."""
        wait = Wait(node, 1, 2, action, Waiting((awaits,), sent), 20.0, 10.0)
        alive = {"op": "alive", "word": "", "places": {}, "waits": [wait.to_fields()]}
        self.coordinator.members.heard(self.links[node], json.loads(json.dumps(alive)))

    def ask_to_stop(self, saves: bool) -> None:
        self.table.set(STOP_KEY, StopWish(saves, "a test").to_json().encode())

    def said_iterations(self) -> int:
        return sum("] iteration " in line for line in self.said)

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await asyncio.sleep(0.001)

    async def plan(self, epoch: int) -> Plan:
        assert await self.table.wait([f"plan/{epoch}"], 5) == ()
        assert self.table.get("epoch") == str(epoch).encode()
        value = self.table.get(f"plan/{epoch}")
        assert value is not None
        return Plan.from_json(value)


Lead = Callable[..., Cluster]
