"""Runs scenarios: one fork server, one set of data, and each undisturbed run once."""

import itertools
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from evidence import Expected, complaints, ended_too_soon
from forked_jobs import JOB_SECONDS, FinishedJob, ForkServer, RunningJob
from job_request import STALL_SECONDS
from moments import Moment
from moving import MovingMoment
from namespaces import INTERFACE
from tiny_gpt import Shape, request

# Far more than a step takes even on a busy machine.
SECONDS_PER_STEP = 0.6
# They take seconds even on a quiet machine.
STEPS_THAT_LAST = 60


class ScenarioRunner:
    """Everything under one folder; close it when done."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._data = folder / "data"
        self._server = ForkServer(self._data)
        self._undisturbed: dict[Shape, Path] = {}
        self._numbers = itertools.count(1)

    def close(self) -> None:
        """End the server and whatever still runs."""
        self._server.close()

    def start(
        self,
        shape: Shape,
        redundancy: str,
        *injections: str,
        more_flags: Sequence[str] = (),
        namespaces: str = "",
        num_standbys: int = 0,
        respawn_seconds: float | None = None,
        notices: str = "none",
        stall_seconds: float = STALL_SECONDS,
        store: str | None = None,
    ) -> RunningJob:
        """Start a job."""
        folder = self._folder / f"job{next(self._numbers)}"
        job = request(folder, self._data, shape, redundancy, injections)
        network = ("--bamboo-interface", INTERFACE) if namespaces else ()
        flags = (*job.flags, *more_flags, *network)
        return self._server.start(
            replace(
                job,
                flags=flags,
                namespaces=namespaces,
                num_standbys=num_standbys,
                respawn_seconds=respawn_seconds,
                notices=notices,
                stall_seconds=stall_seconds,
                store=store,
            )
        )

    def run(
        self,
        shape: Shape,
        redundancy: str,
        *injections: str,
        more_flags: Sequence[str] = (),
        num_standbys: int = 0,
        respawn_seconds: float | None = None,
    ) -> FinishedJob:
        """Run a job to its end."""
        return self.start(
            shape,
            redundancy,
            *injections,
            more_flags=more_flags,
            num_standbys=num_standbys,
            respawn_seconds=respawn_seconds,
        ).finish(max(JOB_SECONDS, SECONDS_PER_STEP * shape.num_steps))

    def undisturbed(self, shape: Shape) -> Path:
        """The job folder of a run without redundancy, in a process tree of its own."""
        shape = replace(shape, num_mirrors=0)
        if shape not in self._undisturbed:
            job = self.run(shape, "none")
            found = complaints(job, Expected(shape, "none", ()), job.job_dir)
            assert not found, "\n".join(found)
            self._undisturbed[shape] = job.job_dir
        return self._undisturbed[shape]

    def complaints(self, job: FinishedJob, expected: Expected) -> list[str]:
        """What is not as it must be; the folder of a good job is removed."""
        found = complaints(job, expected, self.undisturbed(expected.shape))
        if not found:
            shutil.rmtree(job.request.folder)
        return found

    def survive(
        self, shape: Shape, redundancy: str, victims: Sequence[str], *injections: str
    ) -> list[str]:
        """Run a job whose losses must be survived; the complaints.

        A job that ends before it can heal is run once more, with more steps.
        """
        job = self.run(shape, redundancy, *injections)
        expected = Expected(shape, redundancy, victims)
        too_soon = shape.num_steps < STEPS_THAT_LAST and ended_too_soon(job, expected)
        if not (found := self.complaints(job, expected)) and too_soon:
            longer = replace(shape, num_steps=STEPS_THAT_LAST)
            return self.survive(longer, redundancy, victims, *injections)
        return found

    def survive_moment(self, moment: Moment | MovingMoment) -> list[str]:
        """Kill a node at this moment of a job; the complaints."""
        if isinstance(moment, MovingMoment):
            job = self.run(
                moment.shape,
                moment.redundancy,
                *moment.injections,
                num_standbys=moment.num_standbys,
            )
            return self.complaints(job, moment.expected)
        return self.survive(moment.shape, moment.redundancy, [moment.victim], moment.injection)
