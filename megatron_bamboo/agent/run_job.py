"""Run a job on this machine: its store, its coordinator and its nodes, and leave nothing behind.

A library call, so that a test may run many jobs with workers forked from one process that has
imported torch once; ``bamboo run`` is this with a command line (``agent/run.py``).
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from megatron_bamboo.agent.agent import AgentSettings, StartNode
from megatron_bamboo.agent.coordinator import Coordinator, JobFailed
from megatron_bamboo.agent.environment import worker_environment
from megatron_bamboo.agent.job import Injection, JobSpec, check_reachable, check_victims
from megatron_bamboo.agent.process import NodeHandle, adopted_orphans, blocked_interrupts
from megatron_bamboo.agent.report import Reporter
from megatron_bamboo.membership.store_server import StoreServer
from megatron_bamboo.membership.table import Table
from megatron_bamboo.membership.workers import node_of, worker_name
from megatron_bamboo.observe.events import EventLog, read_events
from megatron_bamboo.planner.plan import NoHolder


class Status(IntEnum):
    """How a job ended, as an exit status."""

    FINISHED = 0
    FAILED = 1
    USER_ERROR = 2
    NO_HOLDER = 3
    INJECTION_NOT_REACHED = 4
    INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job ended, with one line for its user where it did not just finish."""

    status: Status
    message: str = ""
    lost: tuple[tuple[str, str], ...] = ()
    """The nodes lost on the way, each with the sign that it was lost."""


def run_job(
    spec: JobSpec,
    start_node: StartNode,
    say: Callable[[str], None],
    advance: Callable[[int], None] = lambda _: None,
) -> Outcome:
    """Run a prepared job to its end; call it from a thread that lives until then.

    ``say`` takes the job's lines and ``advance`` the number of each step that passed. Whatever
    happens, KeyboardInterrupt included, no process of the job is left when this is over.
    """
    check_victims(spec.injections, (*spec.nodes, *spec.standbys))
    for injection in spec.injections:
        check_reachable(injection, spec.shape)
    shape = spec.shape
    if shape.start_step >= shape.train_iters:
        say(f"nothing to train: {shape.loaded_from} holds step {shape.start_step} already")
        return Outcome(Status.FINISHED)
    (spec.job_dir / "logs").mkdir(parents=True, exist_ok=True)
    events = EventLog(spec.job_dir / "events", "coordinator")
    table = Table()
    coordinator = Coordinator(spec, table, events, Reporter(spec.job_dir, spec.shape, say, advance))
    server = StoreServer(table, coordinator.members, spec.host)
    nodes: list[NodeHandle] = []
    with adopted_orphans():
        try:
            # All are forked before the first connection is accepted: none inherits another's.
            for node in (*spec.nodes, *spec.standbys):
                nodes.append(start_node(_settings(spec, node, server.address)))
            outcome = asyncio.run(_lead(coordinator, server))
        finally:
            with blocked_interrupts():
                _end(nodes)
                server.close()
                events.close()
    return _with_injections(outcome, spec)


async def _lead(coordinator: Coordinator, server: StoreServer) -> Outcome:
    async with server:
        try:
            await coordinator.run()
            status, message = Status.FINISHED, ""
        except NoHolder as error:
            status = Status.NO_HOLDER
            errors = coordinator.errors_of(error.holders)
            message = "; ".join([str(error), *errors, coordinator.restart_hint()])
        except JobFailed as error:
            status, message = Status.FAILED, str(error)
        except OSError as error:
            status, message = Status.FAILED, f"the job folder cannot be written: {error}"
        finally:
            coordinator.members.stop()
    return Outcome(status, message, tuple(coordinator.members.lost.items()))


def _settings(spec: JobSpec, node: str, address: str) -> AgentSettings:
    size = spec.shape.tensor_size
    workers = {
        worker_name(node, t, size): worker_environment(spec, node, t, address) for t in range(size)
    }
    return AgentSettings(node, address, spec.job_dir, workers, spec.shape.lease_seconds)


def _end(nodes: Sequence[NodeHandle]) -> None:
    for node in nodes:
        node.kill()
    for node in nodes:
        node.wait()


def _with_injections(outcome: Outcome, spec: JobSpec) -> Outcome:
    if outcome.status is not Status.FINISHED or not spec.injections:
        return outcome
    missed = unreached_injections(spec.job_dir, spec.injections)
    if not missed:
        return outcome
    names = ", ".join(map(str, missed))
    message = f"the job finished, but never came to --inject {names}: nothing was tested there"
    return Outcome(Status.INJECTION_NOT_REACHED, message, outcome.lost)


def unreached_injections(job_dir: Path, injections: Sequence[Injection]) -> list[Injection]:
    """The faults that never struck."""
    struck = {
        (node_of(event["source"]), event["fault"])
        for event in read_events(job_dir / "events")
        if event["event"] == "fault"
    }
    return [i for i in injections if (i.node, str(i.fault)) not in struck]
