"""A process that has imported torch and Megatron-core once, and forks whole jobs.

Importing takes seconds of processor time for each worker, forking takes milliseconds. Everything
but the import is the product's own path: the script's prepare phase, ``run_job``, agents and
workers, each a process of its own. The server itself never runs a backward pass and never opens a
process group, since their threads would not survive a fork.

Its argument is the folder for the jobs' data. It reads one ``JobRequest`` a line and answers with
one line when the job's launching process has started and one when it has ended. When the tests go
away its input ends, and all jobs with it.
"""

import importlib
import json
import os
import selectors
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import psutil
from job_request import JobRequest, JobResult
from namespaces import HUB, address, enter
from tiny_gpt import SCRIPT, prepare_text

from megatron_bamboo.agent.agent import (
    AgentSettings,
    StartNode,
    StartWorker,
    forked_node,
    forked_worker,
    run_agent,
)
from megatron_bamboo.agent.environment import WorkerEnvironment, prepare_environment
from megatron_bamboo.agent.forking import preload, run_script
from megatron_bamboo.agent.interfaces import LOOPBACK
from megatron_bamboo.agent.job import Deadlines, JobShape, JobSpec, parse_injections
from megatron_bamboo.agent.outcome import Outcome, Status
from megatron_bamboo.agent.process import ForkedNode, adopted_orphans, fork
from megatron_bamboo.agent.run_job import run_job
from megatron_bamboo.membership.lives import first_life
from megatron_bamboo.membership.stores import begin_store
from megatron_bamboo.observe.events import EventLog, read_events

# Far above what a job takes even on a busy machine: no live worker is ever fenced by accident.
DEADLINES = Deadlines(startup_seconds=60.0, store_seconds=50.0)
REAP_SECONDS = 0.5


def import_all() -> None:
    """Import what workers need; no gradient is computed and no group is made."""
    preload(str(SCRIPT))
    # Those that a run imports only when it comes to need them.
    for name in ("encodings.idna", "numpy.ctypeslib"):
        importlib.import_module(name)


def prepare_data(data: Path) -> None:
    """Make the text files of all jobs, in a process of its own."""
    data.mkdir(parents=True)

    def prepare() -> int:
        _redirect_output(data / "prepare.log")
        prepare_text(data)
        return 0

    status = os.waitpid(fork(prepare), 0)[1]
    if status != 0:
        raise RuntimeError((data / "prepare.log").read_text())


def serve() -> None:
    """Fork a job for each line of input until it ends."""
    jobs: dict[int, str] = {}
    unread = b""
    with adopted_orphans(), selectors.DefaultSelector() as selector:
        selector.register(0, selectors.EVENT_READ)
        while True:
            # From time to time, since orphans of a killed job end when they like.
            for key, _ in selector.select(REAP_SECONDS):
                if key.fd != 0:
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    continue
                if not (chunk := os.read(0, 1 << 16)):
                    return
                *lines, unread = (unread + chunk).split(b"\n")
                for line in lines:
                    pid = _start(JobRequest.from_json(line))
                    jobs[pid] = JobRequest.from_json(line).folder
                    selector.register(os.pidfd_open(pid), selectors.EVENT_READ)
            _reap(jobs)


def _start(request: JobRequest) -> int:
    pid = fork(lambda: lead(request))
    _answer({"folder": request.folder, "event": "started", "pid": pid})
    return pid


def _reap(jobs: dict[int, str]) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        if pid in jobs:
            code = os.waitstatus_to_exitcode(status)
            _answer({"folder": jobs.pop(pid), "event": "ended", "pid": pid, "status": code})


def _answer(values: dict[str, object]) -> None:
    os.write(1, json.dumps(values).encode() + b"\n")


def lead(request: JobRequest) -> int:
    """Be the launching process of one job, as ``bamboo run`` is; leave its result in a file."""
    folder = Path(request.folder)
    _redirect_output(folder / "launcher.log")
    request.job_dir.mkdir()
    lines: list[str] = []
    try:
        outcome = _prepare_and_run(request, lines)
    except KeyboardInterrupt:
        outcome = Outcome(Status.INTERRUPTED)
    JobResult(
        outcome.status, outcome.message, outcome.lost, lines, _left_behind(request.job_dir)
    ).write(folder)
    return 0


def _prepare_and_run(request: JobRequest, lines: list[str]) -> Outcome:
    prepared = fork(lambda: _prepare(request))
    status = os.waitstatus_to_exitcode(os.waitpid(prepared, 0)[1])
    if status != 0:
        return Outcome(Status(status), "refused while preparing")
    names = [f"node{n}" for n in range(request.num_nodes + request.num_standbys)]
    nodes, standbys = tuple(names[: request.num_nodes]), tuple(names[request.num_nodes :])
    injections, faults = parse_injections(request.injections)
    shape = JobShape.read(request.job_dir)
    begin_store(request.job_dir, request.store)
    spec = JobSpec(
        nodes,
        shape,
        request.job_dir,
        injections,
        replace(DEADLINES, stall_seconds=request.stall_seconds),
        interface=shape.interface or LOOPBACK,
        standbys=standbys,
        write_faults=faults,
        respawn_seconds=request.respawn_seconds,
        notices=request.notices,
    )
    start_worker = forked_worker(lambda: _work(request))
    if not request.namespaces:
        return run_job(spec, forked_node(start_worker), lines.append)
    enter(request.namespaces, HUB)
    spec = replace(spec, host=address(HUB))
    return run_job(spec, _node_in_namespace(request.namespaces, start_worker), lines.append)


def _node_in_namespace(prefix: str, start_worker: StartWorker) -> StartNode:
    """Nodes each of which lives, in all of its lives, in the namespace of its name."""

    def run(settings: AgentSettings) -> NoReturn:
        enter(prefix, first_life(settings.node))
        run_agent(settings, start_worker)

    return lambda settings: ForkedNode(fork(lambda: run(settings)))


def _prepare(request: JobRequest) -> int:
    os.environ.update(
        prepare_environment(request.job_dir, request.num_nodes, request.workers_per_node)
    )
    return run_script((request.script, *request.flags))


def _work(request: JobRequest) -> int:
    """Be a worker; note which process it was, at its start and at its end."""
    notes = EventLog(Path(request.folder) / "processes", WorkerEnvironment.read().worker)
    notes.emit("started", **_identity())
    status = run_script((request.script, *request.flags))
    notes.emit("ended", **_identity())
    return status


def _identity() -> dict[str, float]:
    """What tells this process from every other, also from a later one with its number."""
    stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return {"pid": os.getpid(), "start_ticks": int(stat[19])}


def _left_behind(job_dir: Path) -> list[str]:
    """Descendants, and whatever runs in the process group of one of the job's nodes."""
    events = read_events(job_dir / "events") if (job_dir / "events").is_dir() else []
    groups = {event["pid"] for event in events if event["event"] == "agent_joined"}
    found = {process.pid for process in psutil.Process().children(recursive=True)}
    for pid in psutil.pids():
        try:
            if os.getpgid(pid) in groups:
                found.add(pid)
        except ProcessLookupError:
            continue
    return [f"{pid} at {time.monotonic():.3f}" for pid in sorted(found)]


def _redirect_output(log: Path) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (output, 1), (output, 2)):
        os.dup2(source, target)


if __name__ == "__main__":
    import_all()
    prepare_data(Path(sys.argv[1]))
    serve()
