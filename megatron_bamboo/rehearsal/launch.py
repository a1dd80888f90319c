"""Runs a training by ``bamboo run`` under faults, as its user would, and gathers what it left.

The launching process and all that it starts carry a mark in their environment, by which whatever
is left behind is found.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

from megatron_bamboo.agent.job import Injection, JobShape
from megatron_bamboo.agent.outcome import Status
from megatron_bamboo.errors import UserError
from megatron_bamboo.rehearsal.fault import How
from megatron_bamboo.rehearsal.record import Events, RunRecord, new_events

MARK = "BAMBOO_REHEARSAL"
OUTPUT_FILE = "output.log"
LOOK_SECONDS = 0.2
END_SECONDS = 10.0
SLEEP_LEASES = 2.0
"""A stopped node is woken after so many leases."""
_STOPPED_WHOLE = (How.STOP, How.STOP_AGENT)


@dataclass(frozen=True, slots=True)
class Training:
    """What is rehearsed."""

    options: tuple[str, ...]
    """Those of ``bamboo run`` but for the job folder and the faults."""
    command: tuple[str, ...]
    """The script and its flags."""
    deadline_seconds: float
    """A run that takes longer hangs."""

    def without_replicas(self) -> tuple[str, ...]:
        """The command of the same training with nothing against losses."""
        return (*self.command, "--bamboo-redundancy", "none", "--bamboo-mirror-gradients", "0")

    def run(self, folder: Path, injections: Sequence[Injection] = ()) -> RunRecord:
        """Train once; the job folder is ``folder/job``.

        Raises:
            UserError: the training itself was refused.
        """
        inject = [word for one in injections for word in ("--inject", str(one))]
        return self._run(folder, (*self.options, *inject), self.command)

    def run_undisturbed(self, folder: Path) -> RunRecord:
        """Train once without faults and replicas."""
        return self._run(folder, self.options, self.without_replicas())

    def _run(self, folder: Path, options: Sequence[str], command: Sequence[str]) -> RunRecord:
        folder.mkdir(parents=True)
        job_dir, output = folder / "job", folder / OUTPUT_FILE
        words = [*("-m", "megatron_bamboo", "run"), *options, "--job-dir", str(job_dir), *command]
        with output.open("w") as file:
            status = self._supervise(words, folder, job_dir, file)
        lines = output.read_text(errors="replace").splitlines()
        if status == Status.USER_ERROR:
            raise UserError("\n".join(lines[-3:]))
        # A fault whose moment never came is no failure of the run.
        finished = status in (Status.FINISHED, Status.INJECTION_NOT_REACHED)
        return RunRecord(
            job_dir,
            JobShape.read(job_dir),
            Events.read(job_dir),
            Status.FINISHED if finished else status,
            lines,
            tuple(_marked(folder)),
        )

    def _supervise(self, words: Sequence[str], folder: Path, job_dir: Path, output: IO[str]) -> int:
        """Start the launching process, wake what was stopped, and end what hangs; its status."""
        process = subprocess.Popen(
            [sys.executable, *words],
            env=os.environ | {MARK: str(folder)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        until = time.monotonic() + self.deadline_seconds
        waker = Waker(job_dir)
        try:
            while (status := process.poll()) is None:
                if time.monotonic() > until:
                    output.write(f"it hung: ended after {self.deadline_seconds:g} s\n")
                    break
                waker.look()
                time.sleep(LOOK_SECONDS)
        finally:
            # Its nodes end with it, by the kernel.
            process.kill()
            process.wait(END_SECONDS)
        return Status.FAILED if status is None else status


class Waker:
    """Wakes stopped nodes when their job has long gone on: they must see that they are lost."""

    def __init__(self, job_dir: Path) -> None:
        self._job_dir = job_dir
        self._places: dict[Path, int] = {}
        self._asleep: list[tuple[float, int]] = []

    def look(self) -> None:
        """Look for what was stopped, and wake what has slept for long enough."""
        now = time.monotonic()
        for event in new_events(self._job_dir / "events", self._places, "fault"):
            if event["how"] in _STOPPED_WHOLE:
                lease = JobShape.read(self._job_dir).lease_seconds
                self._asleep.append((event["time"] + SLEEP_LEASES * lease, event["group"]))
        for due in [due for due in self._asleep if due[0] <= now]:
            self._asleep.remove(due)
            with contextlib.suppress(ProcessLookupError):  # it was ended, stopped or not
                os.killpg(due[1], signal.SIGCONT)


def _marked(folder: Path) -> Iterator[str]:
    """The processes that still carry a run's mark, after some time to end in."""
    until = time.monotonic() + END_SECONDS
    while (found := list(_find(str(folder)))) and time.monotonic() < until:
        time.sleep(LOOK_SECONDS)
    yield from found


def _find(mark: str) -> Iterator[str]:
    for process in psutil.process_iter(["pid", "name"]):
        environment: Mapping[str, str] = {}
        with contextlib.suppress(psutil.Error):  # gone, or another user's
            environment = process.environ()
        if environment.get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
            yield f"{process.info['name']} ({process.info['pid']})"
