"""The agent of one node: starts its workers, watches them, and ends them.

It imports no torch, so that it starts at once and never hangs in a collective. It keeps one
connection to the coordinator. The end of that connection means the same on both sides: there, that
the node is lost; here, that the job is over. The agent leads the node's process group, so that a
lost machine can be had by one SIGKILL to the group. Its workers die with it, by the kernel, and
whatever they have started by its guard.
"""

import os
import selectors
import signal
import socket
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from megatron_bamboo.agent.guard import start_guard
from megatron_bamboo.agent.process import (
    ForkedNode,
    ForkedProcess,
    NodeHandle,
    WorkerHandle,
    fork,
    spawn,
)
from megatron_bamboo.membership.frames import encode_frame, receive_frame
from megatron_bamboo.observe.events import EventLog

# The coordinator listens before it starts agents, but answers only when all are started.
HELLO_SECONDS = 60.0
# A frame that has begun to arrive is whole within this time.
FRAME_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """What an agent is told when it is started."""

    node: str
    store_address: str
    job_dir: Path
    worker_environments: Mapping[str, Mapping[str, str]]
    """By worker's name."""


StartWorker = Callable[[Mapping[str, str]], WorkerHandle]
StartNode = Callable[[AgentSettings], NodeHandle]


def spawned_worker(command: Sequence[str]) -> StartWorker:
    """Workers that are started as a program of their own."""
    return lambda environment: spawn(command, environment)


def forked_worker(main: Callable[[], int]) -> StartWorker:
    """Workers that are forked from the agent and run ``main``; the agent must have been forked
    from a parent that imported what they need."""

    def start(environment: Mapping[str, str]) -> WorkerHandle:
        def enter() -> int:
            os.environ.clear()
            os.environ.update(environment)
            return main()

        return ForkedProcess(fork(enter))

    return start


def forked_node(start_worker: StartWorker) -> StartNode:
    """Nodes whose agent is forked from this process."""
    return lambda settings: ForkedNode(fork(lambda: run_agent(settings, start_worker)))


def run_agent(settings: AgentSettings, start_worker: StartWorker) -> NoReturn:
    """Be the agent of a node until its job is over; takes the whole node along at the end."""
    os.setsid()
    _redirect_output(settings.job_dir / "logs" / f"{settings.node}.log")
    start_guard()
    events = EventLog(settings.job_dir / "events", settings.node)
    try:
        link = _say_hello(settings)
        workers = {}
        for name, environment in settings.worker_environments.items():
            workers[name] = worker = start_worker(environment)
            events.emit("worker_started", worker=name, pid=worker.pid, agent=os.getpid())
            _send(link, {"op": "started", "worker": name, "pid": worker.pid})
        _watch(link, workers, events)
    # Shown in the node's log, before the signal below ends this process.
    except BaseException:
        traceback.print_exc()
    finally:
        # Whatever the worker has started goes with it, and so does this process.
        os.killpg(os.getpgrp(), signal.SIGKILL)
    raise AssertionError("a killed process ran on")


def _redirect_output(log: Path) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(null, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)


def _say_hello(settings: AgentSettings) -> socket.socket:
    host, _, port = settings.store_address.rpartition(":")
    until = time.monotonic() + HELLO_SECONDS
    link = socket.create_connection((host, int(port)), timeout=HELLO_SECONDS)
    _send(link, {"op": "hello", "node": settings.node, "pid": os.getpid()})
    receive_frame(link, until)
    return link


def _watch(link: socket.socket, workers: Mapping[str, WorkerHandle], events: EventLog) -> None:
    """Report each worker's end; return when the coordinator says stop or is gone.

    This wait has no deadline of its own: the coordinator's process ending ends it.
    """
    with selectors.DefaultSelector() as selector:
        selector.register(link, selectors.EVENT_READ, data="")
        for name, worker in workers.items():
            selector.register(os.pidfd_open(worker.pid), selectors.EVENT_READ, data=name)
        while True:
            for key, _ in selector.select():
                if key.data:
                    selector.unregister(key.fileobj)
                    _report_end(link, key.data, workers[key.data], events)
                elif _is_over(link, events):
                    return


def _report_end(link: socket.socket, name: str, worker: WorkerHandle, events: EventLog) -> None:
    status = worker.poll()
    events.emit("worker_exited", worker=name, pid=worker.pid, status=status)
    _send(link, {"op": "exited", "worker": name, "status": status})


def _is_over(link: socket.socket, events: EventLog) -> bool:
    try:
        message = receive_frame(link, time.monotonic() + FRAME_SECONDS)
    except OSError:
        events.emit("coordinator_gone")
        return True
    return message.get("op") == "stop"


def _send(link: socket.socket, message: Mapping[str, Any]) -> None:
    link.settimeout(FRAME_SECONDS)
    link.sendall(encode_frame(message))
