"""Plays a trace of spot nodes to real jobs, one after the other where one cannot go on."""

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from elastic_jobs import ElasticJob
from step_times import Step, steps_of
from timed_jobs import Emulation, Log

from megatron_bamboo.agent.outcome import Outcome
from megatron_bamboo.recovery.prices import Prices
from megatron_bamboo.schedule.actions import Op
from megatron_bamboo.simulator.trace import Moment, Trace

A_LONG_TIME = 3600.0
PRICES = Prices()


@dataclass(frozen=True, slots=True)
class Settings:
    """What is trained, and what takes so long elsewhere; seconds as they are waited here."""

    num_stages: int
    num_pipelines: int
    total_microbatches: int
    iteration_seconds: float
    faster: float
    save_interval: int

    @property
    def start_seconds(self) -> float:
        """From a node's arrival until it can join."""
        return PRICES.start_seconds / self.faster

    @property
    def restart_seconds(self) -> float:
        """Until the state of a checkpoint is loaded."""
        return PRICES.restore_seconds / self.faster

    @property
    def save_seconds(self) -> float:
        """What a checkpoint holds up."""
        return PRICES.save_seconds / self.faster

    @property
    def emulation(self) -> Emulation:
        """The model."""
        each = self.total_microbatches // self.num_pipelines
        return Emulation.equal(self.num_stages, each, 2 * self.num_stages, self.iteration_seconds)


def slow_disks(save_seconds: float, load_seconds: float) -> None:
    """Let this process's checkpoints, and its returns to one, take so much longer."""
    # With them comes torch, which only workers need.
    from megatron_bamboo.checkpoint import child
    from megatron_bamboo.checkpoint.checkpoints import Checkpoints

    publish, load = child.publish, Checkpoints.load
    is_first = True

    def publish_late(*args: Any) -> None:
        time.sleep(save_seconds)
        publish(*args)

    def load_late(checkpoints: Checkpoints, start: Any) -> int:
        nonlocal is_first
        # A job that begins has nothing to load.
        if start.step > 0 or not is_first:
            time.sleep(load_seconds)
        is_first = False
        return load(checkpoints, start)

    child.publish = publish_late
    Checkpoints.load = load_late  # type: ignore[method-assign]


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a run without a return to a checkpoint; times of the monotonic clock."""

    called: float
    """When the one before had ended, or the trace began."""
    waited: float
    """Seconds until there were enough nodes for a job."""
    ended: float
    first_step: int
    """What it goes on after."""
    steps: tuple[Step, ...]
    first_end: float
    """When its first step had passed."""
    saved: int
    """The step of the checkpoint that the next one goes on from."""
    samples_again: int
    """Read in attempts at steps that were begun anew."""
    samples_open: int
    """Read in a step that had not passed when it ended."""


class Play:
    """One policy's run through a trace."""

    def __init__(
        self,
        context: ForkServerContext,
        folder: Path,
        settings: Settings,
        flags: Sequence[str],
        trace: Trace,
    ) -> None:
        self._context = context
        self._folder = folder
        self._settings = settings
        self._flags = tuple(flags)
        self._trace = trace
        self._alive = [_machine(node) for node in trace.present]
        self._starting: dict[str, float] = {}
        """By machine when it will have started."""
        self._segments: list[Segment] = []
        self._num_jobs = 0
        self._began: float | None = None

    def run(self) -> list[Segment]:
        """To the end of the trace; the jobs that there were."""
        called = time.monotonic()
        while self._left() > 0:
            waited, job = self._start()
            if job is None:
                break
            try:
                self._conduct(job)
            finally:
                job.kill()
            self._segments += self._look_back(job, called, waited)
            called = time.monotonic()
            if self._left() > 0:
                outcome = Outcome.read(job.job_dir)
                sys.stderr.write(f"after {self._now():.0f} s: {outcome and outcome.message}\n")
        return self._segments

    def _now(self) -> float:
        """Seconds since the trace began, as they pass here."""
        return 0.0 if self._began is None else time.monotonic() - self._began

    def _left(self) -> float:
        return self._trace.seconds / self._settings.faster - self._now()

    def _start(self) -> tuple[float, ElasticJob | None]:
        """A job on those who are there, when they are enough; the seconds until then."""
        began = time.monotonic()
        while (number := len(self._alive) // self._settings.num_stages) == 0:
            self._pass_time(0.1)
            if self._left() <= 0:
                return time.monotonic() - began, None
        waited = time.monotonic() - began
        settings = self._settings
        pipelines = min(number, settings.num_pipelines)
        self._num_jobs += 1
        folder = self._folder / f"job{self._num_jobs}"
        folder.mkdir()
        alive, size = list(self._alive), pipelines * settings.num_stages
        before = partial(slow_disks, settings.save_seconds, settings.restart_seconds)
        job = ElasticJob(self._context, folder, size, self._flags, before, speaker=alive[0])
        for node in alive:
            job.add(node)
        return waited, job

    def _conduct(self, job: ElasticJob) -> None:
        """Let nodes come and go until the job or the trace is over."""
        if self._began is None:
            job.wait(lambda: job.step > 0, A_LONG_TIME)
            self._began = time.monotonic()
        while self._left() > 0 and not job.has_ended:
            self._let_pass(job)
            until = time.monotonic() + 0.1
            job.wait(lambda until=until: time.monotonic() > until, A_LONG_TIME)  # type: ignore[misc]

    def _pass_time(self, seconds: float) -> None:
        """Without a job."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._let_pass(None)
            time.sleep(0.05)

    def _let_pass(self, job: ElasticJob | None) -> None:
        """Do what is due by now."""
        now = self._now()
        while self._trace.moments and self._trace.moments[0].seconds / self._settings.faster <= now:
            moment, *later = self._trace.moments
            self._trace = Trace((), tuple(later), self._trace.seconds)
            self._happen(moment, now, job)
        for node in [node for node, due in self._starting.items() if due <= now]:
            del self._starting[node]
            self._alive.append(node)
            if job is not None:
                job.add(node)

    def _happen(self, moment: Moment, now: float, job: ElasticJob | None) -> None:
        for node in map(_machine, moment.removed):
            self._starting.pop(node, None)
            if node in self._alive:
                self._alive.remove(node)
            if job is not None:
                job.remove(node)
        for node in map(_machine, moment.added):
            self._starting[node] = now + self._settings.start_seconds

    def _look_back(self, job: ElasticJob, called: float, waited: float) -> list[Segment]:
        """The parts of a job."""
        log, over = Log(job.job_dir), time.monotonic()
        began = called if self._segments or self._began is None else self._began
        returns = [e for e in log.of("plan") if e.get("restored") is not None]
        starts = [began, *(event["time"] for event in returns)]
        goes_on_after = [self._segments[-1].saved if self._segments else 0]
        goes_on_after += [event["restored"] for event in returns]
        newest = max([goes_on_after[-1], *(event["step"] for event in log.of("saved"))])
        kept = [*goes_on_after[1:], newest]
        found = []
        for again, (start, end) in enumerate(pairwise([*starts, over])):
            steps = tuple(step for step in steps_of(log) if step.again == again)
            reads = [event for event in log.of("samples") if start <= event["time"] < end]
            ends = [d.end for d in log.actions if d.action.op is Op.STEP and start <= d.end < end]
            first_end = steps[0].end - steps[0].seconds if steps else max(ends, default=end)
            last = steps[-1].number if steps else goes_on_after[again] + bool(ends)
            own_wait = waited if again == 0 else 0.0
            in_vain = _in_vain(reads, last)
            found.append(
                Segment(start, own_wait, end, goes_on_after[again], steps, first_end, kept[again],
                        *in_vain)
            )  # fmt: skip
        return found


def _machine(node: str) -> str:
    """The name in jobs of a node of the trace, where ``node5.2`` is another machine's."""
    return node.replace(".", "-")


def _in_vain(events: Sequence[Mapping[str, Any]], last: int) -> tuple[int, int]:
    """Samples read in attempts at steps that were begun anew, and in steps that did not pass."""
    newest: dict[int, int] = {}
    reads = {(e["step"], e["attempt"], sample) for e in events for sample in e["samples"]}
    for step, attempt, _ in reads:
        newest[step] = max(newest.get(step, 0), attempt)
    again = sum(attempt < newest[step] for step, attempt, _ in reads)
    return again, sum(step > last and attempt == newest[step] for step, attempt, _ in reads)
