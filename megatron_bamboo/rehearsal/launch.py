"""Runs a training by ``bamboo run`` under faults, as its user would, and gathers what it left.

The launching process and all that it starts carry a mark in their environment, by which whatever
is left behind is found.
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

from megatron_bamboo.agent.job import JobShape
from megatron_bamboo.agent.outcome import Status
from megatron_bamboo.agent.process import spawn
from megatron_bamboo.errors import UserError
from megatron_bamboo.rehearsal.bystander import Bystander
from megatron_bamboo.rehearsal.draw import Drawn
from megatron_bamboo.rehearsal.record import Events, RunRecord

MARK = "BAMBOO_REHEARSAL"
OUTPUT_FILE = "output.log"
LOOK_SECONDS = 0.2
# What is judged is how losses are survived: a job that goes back to a checkpoint has lost steps.
STOPS = ("--bamboo-on-no-holder", "stop")
END_SECONDS = 10.0


class Unwanted(Exception):
    """The campaign ends, and the run with it."""


@dataclass(frozen=True, slots=True)
class Training:
    """What is rehearsed."""

    options: tuple[str, ...]
    """Those of ``bamboo run`` but for the job folder, spare nodes and faults."""
    spare: tuple[str, ...]
    """Its options about spare nodes."""
    command: tuple[str, ...]
    """The script and its flags."""
    deadline_seconds: float
    """A run that takes longer hangs."""
    must_end: threading.Event
    """Set when nobody wants to know any more."""

    def without_replicas(self) -> tuple[str, ...]:
        """The command of the same training with nothing against losses."""
        nothing = ("--bamboo-redundancy", "none", "--bamboo-mirror-gradients", "0")
        return (*self.command, *nothing, "--bamboo-verify-replicas", "0", *STOPS)

    def run(self, folder: Path, drawn: Drawn) -> RunRecord:
        """Train once under faults; the job folder is ``folder/job``.

        Raises:
            UserError: the training itself was refused.
        """
        return self._run(folder, self.words(drawn), drawn.stops)

    def words(self, drawn: Drawn) -> tuple[str, ...]:
        """What ``bamboo run`` is told, but for the job folder."""
        inject = (word for one in drawn.injected for word in ("--inject", one))
        return (*self.options, *self.spare, *inject, *self.command, *STOPS)

    def run_undisturbed(self, folder: Path) -> RunRecord:
        """Train once without faults and replicas."""
        return self._run(folder, (*self.options, *self.without_replicas()))

    def _run(self, folder: Path, words: Sequence[str], stops: Sequence[int] = ()) -> RunRecord:
        folder.mkdir(parents=True)
        job_dir, output = folder / "job", folder / OUTPUT_FILE
        command = ("-m", "megatron_bamboo", "run", "--job-dir", str(job_dir), *words)
        with output.open("w") as file:
            bystander = Bystander(job_dir, stops)
            status = self._supervise(command, folder, bystander, file)
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
            bystander.plans,
        )

    def _supervise(
        self, words: Sequence[str], folder: Path, bystander: Bystander, output: IO[str]
    ) -> int:
        """Start the launching process, look on, and end it where it hangs; its status."""
        environment = os.environ | {MARK: str(folder)}
        process = spawn([sys.executable, *words], environment, new_session=True, output=output)
        until = time.monotonic() + self.deadline_seconds
        try:
            while (status := process.poll()) is None:
                if self.must_end.is_set():
                    raise Unwanted
                if time.monotonic() > until:
                    output.write(f"it hung: ended after {self.deadline_seconds:g} s\n")
                    break
                bystander.look()
                time.sleep(LOOK_SECONDS)
        finally:
            # Its nodes end with it, by the kernel.
            process.kill()
            process.wait(END_SECONDS)
        return Status.FAILED if status is None else status


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
