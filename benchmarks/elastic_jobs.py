"""Jobs of the product whose nodes come and go when a benchmark says so.

A coordinator and nodes that join it, as on machines of their own: each is forked from a server that
has imported everything, so that a node is there a second after it was called. As a launcher would,
this starts a node again that was let go and stays.
"""

import contextlib
import json
import os
import secrets
import signal
import time
from collections.abc import Callable, Sequence
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

from timed_jobs import Log

from megatron_bamboo.agent.agent import AgentSettings, forked_worker, run_agent
from megatron_bamboo.agent.job import COORDINATOR, Deadlines, Injection, JobShape, JobSpec
from megatron_bamboo.agent.outcome import Outcome
from megatron_bamboo.agent.process import notify_of_parents_death
from megatron_bamboo.agent.run_job import run_job
from megatron_bamboo.membership.address import ADDRESS_FILE
from megatron_bamboo.membership.lives import first_life, next_life
from megatron_bamboo.membership.secret_file import find_secret

START_SECONDS = 900.0
# Nodes are lost by SIGKILL here, which closes their connections: a busy machine must lose no other.
PATIENT = ("--bamboo-lease", "30", "--distributed-timeout-minutes", "5")
DEADLINES = Deadlines(60.0, 600.0, 600.0, 600.0, 600.0)
POLL_SECONDS = 0.05
SAID_FILE = "said.txt"

BeforeTraining = Callable[[], None]


def nothing() -> None:
    """What a worker does before its training, if nothing is asked for."""


class ElasticJob:
    """A job under way in ``folder/job``; nodes that were let go are started again in ``wait``.

    Args:
        before: what each worker does before it trains; a function that can be pickled.
        speaker: the node that speaks for the script; one of the first.
    """

    def __init__(
        self,
        context: ForkServerContext,
        folder: Path,
        num_nodes: int,
        flags: Sequence[str],
        before: BeforeTraining = nothing,
        speaker: str = "node0",
    ) -> None:
        self.job_dir = folder / "job"
        self.nodes: dict[str, ForkServerProcess] = {}
        """All that were ever started."""
        self._context = context
        self._flags = (*flags, *PATIENT)
        self._before = before
        self._speaker = speaker
        self._num_restarted = 0
        self._removed: set[str] = set()
        self._coordinator = context.Process(target=_lead, args=(folder, num_nodes, self._flags))
        self._coordinator.start()
        self.wait(lambda: (self.job_dir / ADDRESS_FILE).exists(), START_SECONDS)

    def add(self, node: str, *faults: str) -> None:
        """Start a node, with faults that strike it, like ``iter7:#3``."""
        arguments = (self.job_dir, node, self._flags, faults, self._before, self._speaker)
        process = self._context.Process(target=_be_node, args=arguments)
        process.start()
        self.nodes[node] = process

    def remove(self, node: str) -> None:
        """Take a node's machine away, with all that runs on it, in whichever life."""
        for name, process in self.nodes.items():
            if first_life(name) == node:
                _kill(process)
        self._removed.add(node)

    def drain(self, node: str) -> None:
        """Tell a node that its machine is to be taken."""
        pid = self.nodes[node].pid
        assert pid is not None
        os.kill(pid, signal.SIGTERM)

    def events(self, kind: str) -> list[dict[str, Any]]:
        """What the coordinator has said of one kind, so far."""
        path = self.job_dir / "events" / f"{COORDINATOR}.jsonl"
        lines = path.read_bytes().split(b"\n")[:-1] if path.is_file() else []
        return [event for event in map(json.loads, lines) if event["event"] == kind]

    @property
    def step(self) -> int:
        """The newest step that has passed."""
        path = self.job_dir / "losses.jsonl"
        lines = path.read_bytes().split(b"\n")[:-1] if path.is_file() else []
        return int(json.loads(lines[-1])["step"]) if lines else 0

    @property
    def has_ended(self) -> bool:
        """Whether the job is over, in whatever way."""
        return not self._coordinator.is_alive()

    def wait(self, condition: Callable[[], Any], seconds: float) -> None:
        """Wait until something is so, or the job is over.

        Raises:
            TimeoutError: it takes longer; the job is ended.
        """
        until = time.monotonic() + seconds
        while not (self.has_ended or condition()):
            self._start_again()
            if time.monotonic() > until:
                self.kill()
                raise TimeoutError(f"ended after {seconds:.0f} s\n{self.last_words()}")
            time.sleep(POLL_SECONDS)

    def finish(self, seconds: float) -> Log:
        """Wait for the end; what the job has logged.

        Raises:
            RuntimeError: it ended in another way than with its last step.
        """
        self.wait(lambda: False, seconds)
        self.kill()
        outcome = Outcome.read(self.job_dir)
        if outcome is None or outcome.status:
            raise RuntimeError(f"the job ended so: {outcome}\n{self.last_words()}")
        return Log(self.job_dir)

    def kill(self) -> None:
        """End whatever runs of it."""
        for process in (*self.nodes.values(), self._coordinator):
            _kill(process)
            process.join()

    def last_words(self) -> str:
        """The ends of its logs."""
        logs = [self.job_dir / SAID_FILE, *sorted(self.job_dir.glob("logs/*.log"))]
        texts = [(log.name, log.read_text(errors="replace")) for log in logs if log.is_file()]
        return "\n".join(f"--- {name}\n{text[-1500:]}" for name, text in texts)

    def _start_again(self) -> None:
        """Start those in their next life that were let go though their machines stay."""
        stay = [event["node"] for event in self.events("drained") if event["stays"]]
        for node in stay[self._num_restarted :]:
            self._num_restarted += 1
            if first_life(node) not in self._removed:
                self.add(next_life(node))


def _lead(folder: Path, num_nodes: int, flags: tuple[str, ...]) -> None:
    """Be the job's launching process."""
    from product_job import prepare_product

    notify_of_parents_death(signal.SIGKILL)
    job_dir = folder / "job"
    shape = prepare_product(flags, num_nodes, job_dir)
    spec = JobSpec((), shape, job_dir, deadlines=DEADLINES)
    with (job_dir / SAID_FILE).open("w", buffering=1) as said:
        run_job(spec, None, lambda line: _write(said, line))


def _write(said: Any, line: str) -> None:
    said.write(line + "\n")


def _be_node(
    job_dir: Path,
    node: str,
    flags: tuple[str, ...],
    faults: tuple[str, ...],
    before: BeforeTraining,
    speaker: str,
) -> None:
    """Be a node, from its start to its end."""
    from product_job import train

    def work() -> int:
        before()
        return train(flags)

    notify_of_parents_death(signal.SIGKILL)
    injections = tuple(Injection.parse(f"{node}@{fault}") for fault in faults)
    shape = JobShape.read(job_dir)
    spec = JobSpec((), shape, job_dir, injections, DEADLINES, speaker=speaker)
    identity = find_secret(job_dir).node(node, secrets.token_hex(8))
    run_agent(AgentSettings.of(spec, identity), forked_worker(work))


def _kill(process: ForkServerProcess) -> None:
    """End a process, and its group where it leads one."""
    if process.pid is None or not process.is_alive():
        return
    process.kill()
    # Not yet where it has only begun.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
