"""A job without training: the product's coordinator in its own process, and its nodes in a few.

What the coordinator does is the real thing; its nodes are those of ``simulated_nodes.py``.
"""

import contextlib
import multiprocessing
import os
import signal
import sqlite3
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

from simulated_nodes import VECTOR, NodesSettings, SimulatedNodes

from megatron_bamboo.agent.job import Deadlines, JobShape, JobSpec
from megatron_bamboo.agent.lead import lead_job
from megatron_bamboo.agent.process import fork, notify_of_parents_death
from megatron_bamboo.membership.address import ADDRESS_FILE, Address, Signpost
from megatron_bamboo.membership.decision import StepReport
from megatron_bamboo.membership.journal import JOURNAL_FILE
from megatron_bamboo.membership.keys import Secret
from megatron_bamboo.membership.store_client import StoreClient
from megatron_bamboo.planner.arrangement import equal_pipelines
from megatron_bamboo.planner.plan import Plan

STAGES, MICROBATCHES = 10, 16
NUM_PROCESSES = 4
STEP_SECONDS = 1.0
WAIT_SECONDS = 120.0
RECORD_SECONDS = 60.0
LOOK_SECONDS = 0.005


class Cluster:
    """The coordinator's process and those of the nodes; close it when done."""

    def __init__(self, job_dir: Path, num_agents: int, lease_seconds: float) -> None:
        (job_dir / "logs").mkdir(parents=True)
        self.nodes = [f"node{number}" for number in range(num_agents)]
        secret = Secret.of(os.urandom(32).hex())
        spec = _spec(self.nodes, job_dir, lease_seconds)
        self._coordinator = fork(lambda: lead_job(spec, secret))
        address = str(_await_address(job_dir))
        self._step = multiprocessing.Value("q", 0)
        self._pipes: dict[str, Connection] = {}
        self._processes: list[ForkProcess] = []
        for number in range(NUM_PROCESSES):
            names = self.nodes[number::NUM_PROCESSES]
            identities = tuple(secret.node(name, os.urandom(8).hex()) for name in names)
            settings = NodesSettings(identities, address, job_dir, lease_seconds, MICROBATCHES)
            self._pipes |= dict.fromkeys(names, self._start_nodes(settings))
        self.store = StoreClient(address, WAIT_SECONDS, secret.tool())
        self.publications = Publications(job_dir / JOURNAL_FILE)

    def await_start(self) -> None:
        """Wait until the first plan is out and all workers follow it."""
        self.store.wait(["epoch"])
        until = time.monotonic() + WAIT_SECONDS
        while (ready := self.store.count("ready/")) < len(self.nodes):
            if time.monotonic() > until:
                raise TimeoutError(f"{ready} of {len(self.nodes)} workers are ready")
            time.sleep(0.1)

    def pass_step(self) -> None:
        """Let all workers pass one more step, and report it for them."""
        with self._step.get_lock():
            self._step.value += 1
            step = self._step.value
        sums = tuple(number.hex() for number in VECTOR)
        loss, lr, norm = (2.0).hex(), 1e-4, (1.0).hex()
        report = StepReport(step, self.epoch(), loss, lr, norm, step, STEP_SECONDS, sums)
        self.store.compare_set(f"passed/{step}", None, report.to_json().encode())

    def order(self, command: str, nodes: Sequence[str]) -> dict[str, float]:
        """Let nodes ``die`` or be ``silent`` at once; by node when it was heard of last."""
        told: dict[int, tuple[Connection, list[str]]] = {}
        for node in nodes:
            pipe = self._pipes[node]
            told.setdefault(pipe.fileno(), (pipe, []))[1].append(node)
        for pipe, names in told.values():
            pipe.send((command, names))
        heard: dict[str, float] = {}
        for pipe, names in told.values():
            if not pipe.poll(WAIT_SECONDS):
                raise TimeoutError(f"{', '.join(names)} do not obey")
            heard |= pipe.recv()
        return heard

    def epoch(self) -> int:
        """The newest one."""
        return int(self.store.get("epoch") or b"0")

    def plan(self, epoch: int) -> Plan:
        """The one of an epoch."""
        value = self.store.get(f"plan/{epoch}")
        assert value is not None, f"epoch {epoch} has no plan"
        return Plan.from_json(value)

    def await_plan_without(self, nodes: Sequence[str], epoch: int) -> tuple[float, int]:
        """When a client saw the first plan after an epoch's that none of some nodes is in; its
        epoch."""
        until = time.monotonic() + WAIT_SECONDS
        while time.monotonic() < until:
            value = self.store.wait_change("epoch", str(epoch).encode())
            seen, epoch = time.monotonic(), int(value or b"0")
            if not set(nodes) & set(self.plan(epoch).nodes):
                return seen, epoch
        raise TimeoutError(f"no plan without {', '.join(nodes)}")

    def await_healing(self, epoch: int) -> None:
        """Pass steps until every stage has two holders again, after the losses of an epoch."""
        until = time.monotonic() + WAIT_SECONDS
        while time.monotonic() < until:
            plan = self.plan(self.epoch())
            is_made = self.store.get(f"said/changed/{plan.epoch}") is not None
            if plan.epoch > epoch and plan.change is not None and is_made:
                return
            self.pass_step()
            time.sleep(STEP_SECONDS)
        raise TimeoutError(f"nothing was healed after epoch {epoch}")

    def memory_mib(self) -> float:
        """The coordinator's resident memory."""
        pages = int(Path(f"/proc/{self._coordinator}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    def processor_seconds(self) -> float:
        """What the coordinator has used."""
        fields = Path(f"/proc/{self._coordinator}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        """End all processes."""
        self.publications.close()
        self.store.close()
        for process in self._processes:
            process.kill()
            process.join(WAIT_SECONDS)
        os.kill(self._coordinator, signal.SIGKILL)
        os.waitpid(self._coordinator, 0)

    def _start_nodes(self, settings: NodesSettings) -> Connection:
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        process = context.Process(target=_run, args=(settings, theirs, self._step), daemon=True)
        process.start()
        self._processes.append(process)
        return ours


class Publications:
    """When each plan was there for all to see, as one that looks at the store's file sees it."""

    def __init__(self, store: Path) -> None:
        self._uri = f"file:{store}?mode=ro"
        self._seen: dict[int, float] = {}
        self._must_end = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def of(self, epoch: int) -> float:
        """When the plan of an epoch was published, which a client has seen."""
        until = time.monotonic() + WAIT_SECONDS
        while epoch not in self._seen:
            if time.monotonic() > until:
                raise TimeoutError(f"the plan of epoch {epoch} is not in the store's file")
            time.sleep(LOOK_SECONDS)
        return self._seen[epoch]

    def close(self) -> None:
        """Look no more."""
        self._must_end.set()
        self._thread.join()

    def _look(self) -> None:
        query = "SELECT key FROM keys WHERE key LIKE 'plan/%'"
        with contextlib.closing(sqlite3.connect(self._uri, uri=True)) as store:
            while not self._must_end.wait(LOOK_SECONDS):
                # It may just be made, or locked for a moment: the next look sees as much.
                with contextlib.suppress(sqlite3.OperationalError):
                    for (key,) in store.execute(query):
                        epoch = int(key.removeprefix("plan/"))
                        self._seen.setdefault(epoch, time.monotonic())


def _await_address(job_dir: Path) -> Address:
    """Where the coordinator listens; nodes that are told so need not look at a file for it."""
    signpost = Signpost(str((job_dir / ADDRESS_FILE).absolute()))
    until = time.monotonic() + WAIT_SECONDS
    while (address := signpost.find()) is None:
        if time.monotonic() > until:
            raise TimeoutError(f"no coordinator has come within {WAIT_SECONDS:g} s")
        time.sleep(0.01)
    return address


def _spec(nodes: Sequence[str], job_dir: Path, lease_seconds: float) -> JobSpec:
    num_pipelines = len(nodes) // STAGES
    shape = JobShape(
        equal_pipelines(STAGES, num_pipelines, MICROBATCHES),
        "lazy",
        train_iters=10**6,
        global_batch_size=MICROBATCHES * num_pipelines,
        lease_seconds=lease_seconds,
    )
    # However busy this machine is, no live node is fenced by accident.
    deadlines = Deadlines(record_seconds=RECORD_SECONDS, startup_seconds=WAIT_SECONDS)
    return JobSpec(tuple(nodes), shape, job_dir, deadlines=deadlines)


def _run(settings: NodesSettings, pipe: Connection, step: Any) -> None:
    notify_of_parents_death(signal.SIGKILL)
    SimulatedNodes(settings, pipe, step).run()
