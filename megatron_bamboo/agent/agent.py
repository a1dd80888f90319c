"""The agent of one node: starts its workers, watches them, and ends them.

It imports no torch, so that it starts at once and never hangs in a collective. It keeps one
connection to the coordinator. There its end means that the node is lost; here, that a coordinator
is: the workers go on, and the agent looks for the next one until it learns that the job is over.
The agent leads the node's process group, so that a
lost machine can be had by one SIGKILL to the group. Its workers die with it, by the kernel, and
whatever they have started by its guard.
"""

import os
import signal
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, Self

from megatron_bamboo.agent.environment import SIGNS_VARIABLE, worker_environment
from megatron_bamboo.agent.guard import start_guard
from megatron_bamboo.agent.hangs import HangJudge
from megatron_bamboo.agent.job import JobSpec
from megatron_bamboo.agent.link import CoordinatorLink, NodeEnd, unheard_seconds
from megatron_bamboo.agent.process import (
    ForkedNode,
    ForkedProcess,
    NodeHandle,
    WorkerHandle,
    fork,
    hear_sigterm,
    spawn,
)
from megatron_bamboo.agent.watch import NodeWatch, WatchedWorker
from megatron_bamboo.cloud.watch import NO_SOURCE, NoticeWatch, source_of
from megatron_bamboo.membership.address import ADDRESS_FILE
from megatron_bamboo.membership.keys import NodeIdentity
from megatron_bamboo.membership.signs import SignPage
from megatron_bamboo.membership.workers import worker_name
from megatron_bamboo.observe.events import EventLog
from megatron_bamboo.rehearsal.networks import join_hub

STAYS_STATUS = 73
"""Of an agent whose node has left the job, and whose machine may join it again."""


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """What an agent is told when it is started."""

    identity: NodeIdentity
    store: str
    """Where the coordinator is found, and the store."""
    job_dir: Path
    worker_environments: Mapping[str, Mapping[str, str]]
    """By worker's name."""
    lease_seconds: float
    patience_seconds: float
    """How long to look for a coordinator that answers."""
    notices: str = NO_SOURCE
    """Who says that its machine is to be taken (``cloud/watch.py``)."""
    network: int | None = None
    """The number of the network of its own that it makes at its start, joined to that of who has
    started it; None for none."""

    @classmethod
    def of(cls, spec: JobSpec, identity: NodeIdentity, network: int | None = None) -> Self:
        """For a node of this job."""
        size, store = spec.shape.tensor_size, str((spec.job_dir / ADDRESS_FILE).absolute())
        workers = {
            worker_name(identity.node, t, size): worker_environment(spec, identity, t, store)
            for t in range(size)
        }
        lease, patience = spec.shape.lease_seconds, spec.deadlines.store_seconds
        return cls(identity, store, spec.job_dir, workers, lease, patience, spec.notices, network)

    @property
    def node(self) -> str:
        """The node's name."""
        return self.identity.node

    @property
    def log(self) -> Path:
        """Where what its processes print goes."""
        return self.job_dir / "logs" / f"{self.node}.log"


StartWorker = Callable[[Mapping[str, str]], WorkerHandle]
StartNode = Callable[[AgentSettings], NodeHandle]


def spawned_worker(command: Sequence[str]) -> StartWorker:
    """Workers that are started as a program of their own."""
    return lambda environment: spawn(command, environment, keeps_sigterm=True)


def forked_worker(main: Callable[[], int]) -> StartWorker:
    """Workers that are forked from the agent and run ``main``; the agent must have been forked
    from a parent that imported what they need."""

    def start(environment: Mapping[str, str]) -> WorkerHandle:
        def enter() -> int:
            os.environ.clear()
            os.environ.update(environment)
            return main()

        return ForkedProcess(fork(enter, keeps_sigterm=True))

    return start


def forked_node(start_worker: StartWorker) -> StartNode:
    """Nodes whose agent is forked from this process."""
    return lambda settings: ForkedNode(
        fork(lambda: run_agent(settings, start_worker), keeps_sigterm=True)
    )


def run_agent(settings: AgentSettings, start_worker: StartWorker) -> NoReturn:
    """Be the agent of a node until its job is over; takes the whole node along at the end.

    It ends with status 0 where its node has left in good order or the job is over, and with
    ``STAYS_STATUS`` where its machine may join again. Who forks it keeps SIGTERM for it.
    """
    os.setsid()
    _redirect_output(settings.log)
    if settings.network is not None:
        join_hub(settings.network, os.getppid())
    start_guard()
    notices = NoticeWatch(source_of(settings.notices, settings.node))
    # A machine that is to be taken is told so with this signal by Slurm, and by others.
    hear_sigterm(lambda: notices.signalled("SIGTERM"))
    events = EventLog(settings.job_dir / "events", settings.node)
    try:
        end = _run_node(settings, start_worker, events, notices)
        if end is not NodeEnd.LOST:
            # Its guard ends what is left.
            os._exit(STAYS_STATUS if end is NodeEnd.STAYS else 0)
    # Shown in the node's log, before the signal below ends this process.
    except BaseException:
        traceback.print_exc()
    finally:
        # Whatever the worker has started goes with it, and so does this process.
        os.killpg(os.getpgrp(), signal.SIGKILL)
    raise AssertionError("a killed process ran on")


def _run_node(
    settings: AgentSettings, start_worker: StartWorker, events: EventLog, notices: NoticeWatch
) -> NodeEnd:
    """Watch a node's workers until its part in the job ends; how it does."""
    link = CoordinatorLink(
        settings.identity,
        settings.store,
        settings.job_dir,
        settings.patience_seconds,
        events,
        unheard_seconds(settings.lease_seconds),
    )
    if not link.await_welcome(lambda: notices.is_signalled):
        return link.end
    workers = {}
    for name, environment in settings.worker_environments.items():
        page = SignPage.make(name)
        worker = start_worker({**environment, SIGNS_VARIABLE: page.path})
        workers[name] = WatchedWorker(worker, page, HangJudge(settings.lease_seconds))
        events.emit("worker_started", worker=name, pid=worker.pid, agent=os.getpid())
        link.report({"op": "started", "worker": name, "pid": worker.pid})
    notices.start()
    NodeWatch(link, workers, events, settings.lease_seconds, notices).run()
    if link.end is NodeEnd.LEFT:
        notices.acknowledge()
    return link.end


def _redirect_output(log: Path) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(null, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
