"""Jobs of the product whose iterations are timed from its own event log.

Jobs run one at a time, each in a process tree of its own, forked from a server that has imported
everything. A step's time is from the moment when the last worker had ended the step before until
the last one ended it.
"""

import multiprocessing
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

# The training script is in no package.
sys.path.append(str(Path(__file__).parents[1]))

from megatron_bamboo.agent.outcome import Status
from megatron_bamboo.observe.events import read_events
from megatron_bamboo.schedule.actions import COMPUTE_OPS, Action, Op
from megatron_bamboo.schedule.costs import Costs

JOB_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class Emulation:
    """A pipeline of emulated layers; milliseconds by layer."""

    num_stages: int
    num_microbatches: int
    forward_ms: tuple[float, ...]
    backward_ms: tuple[float, ...]

    @classmethod
    def equal(
        cls, num_stages: int, num_microbatches: int, layers: int, seconds: float
    ) -> "Emulation":
        """Equal layers, backwards twice as long as forwards, and iterations of so many seconds."""
        slots = (num_microbatches + num_stages - 1) * layers / num_stages
        forward = round(1e3 * seconds / slots / 3, 3)
        return cls(num_stages, num_microbatches, (forward,) * layers, (2 * forward,) * layers)

    @property
    def costs(self) -> Costs:
        """What a stage takes, in seconds."""
        return Costs(self._by_stage(self.forward_ms), self._by_stage(self.backward_ms))

    def flags(self, pipelines: str | None = None) -> tuple[str, ...]:
        """Those of this model.

        Args:
            pipelines: of how many stages each is, where they are not alike.
        """
        times = [
            ",".join(f"{ms:g}" for ms in all_ms) for all_ms in (self.forward_ms, self.backward_ms)
        ]
        return (
            *("--transformer-impl", "emulated", "--num-layers", str(len(self.forward_ms))),
            *("--bamboo-emulated-forward-ms", times[0], "--bamboo-emulated-backward-ms", times[1]),
            *pipeline_flags(pipelines or self.num_stages, self.num_microbatches),
            *("--hidden-size", "32", "--num-attention-heads", "2"),
            *("--seq-length", "16", "--max-position-embeddings", "16"),
        )

    def _by_stage(self, all_ms: Sequence[float]) -> tuple[float, ...]:
        size = len(all_ms) // self.num_stages
        return tuple(sum(all_ms[s * size : (s + 1) * size]) / 1e3 for s in range(self.num_stages))


def pipeline_flags(stages: int | str, num_microbatches: int) -> tuple[str, ...]:
    """Pipelines of so many stages, or of several numbers of them, and what has to be said of any
    training."""
    is_even = isinstance(stages, int)
    return (
        "--pipeline-model-parallel-size" if is_even else "--bamboo-pipelines",
        str(stages),
        *("--micro-batch-size", "1", "--global-batch-size", str(num_microbatches)),
        *("--lr", "1e-3", "--distributed-timeout-minutes", "1"),
    )


class TimedJob:
    """A job under way in ``folder/job``."""

    def __init__(
        self, context: ForkServerContext, folder: Path, num_nodes: int, flags: Sequence[str]
    ) -> None:
        self.job_dir = folder / "job"
        self.num_nodes = num_nodes
        arguments = (folder, num_nodes, tuple(flags))
        self._process = context.Process(target=_lead, args=arguments)
        self._process.start()

    def has_ended(self) -> bool:
        """Whether the job is over, in whatever way."""
        return not self._process.is_alive()

    def finish(self) -> "Log":
        """Wait for the end; what the job has logged.

        Raises:
            RuntimeError: it failed, or takes too long.
        """
        self._process.join(JOB_SECONDS)
        if self._process.exitcode != 0:
            logs = [path.read_text()[-2000:] for path in sorted(self.job_dir.glob("logs/*.log"))]
            raise RuntimeError(f"the job ended with {self._process.exitcode}\n" + "\n".join(logs))
        return Log(self.job_dir)

    def kill(self) -> None:
        """End it if it runs: agents end with their launcher, and workers with their agents."""
        self._process.kill()
        self._process.join()


def job_context() -> ForkServerContext:
    """Where jobs are forked from."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["megatron_bamboo.training", "product_job"])
    return context


def _lead(folder: Path, num_nodes: int, flags: tuple[str, ...]) -> None:
    """Be the job's launching process."""
    from product_job import run_product, train

    outcome = run_product(flags, num_nodes, folder / "job", lambda: train(flags))
    assert outcome.status is Status.FINISHED, outcome.message


@dataclass(frozen=True, slots=True)
class Done:
    """An action that a worker has run."""

    action: Action
    worker: str
    step: int
    epoch: int
    start: float
    end: float


_DONE = ("source", "step", "epoch", "start", "end")


class Log:
    """What a job has logged."""

    def __init__(self, job_dir: Path) -> None:
        self.events = read_events(job_dir / "events")
        self.actions = [
            Done(
                Action.parse(e["action"]), e["source"], e["step"], e["epoch"], e["start"], e["end"]
            )
            for e in self.events
            if e["event"] == "action"
        ]

    def of(self, kind: str) -> list[dict[str, Any]]:
        """Events of one kind, by time."""
        return [event for event in self.events if event["event"] == kind]

    def step_ends(self) -> dict[int, float]:
        """By step, when the last worker had ended it."""
        ends: defaultdict[int, float] = defaultdict(float)
        for done in self.actions:
            if done.action.op is Op.STEP:
                ends[done.step] = max(ends[done.step], done.end)
        return dict(ends)

    def step_seconds(self) -> dict[int, float]:
        """The time of each step but the first."""
        ends = self.step_ends()
        return {step: ends[step] - ends[step - 1] for step in ends if step - 1 in ends}

    def computation_seconds(self, steps: Sequence[int]) -> dict[tuple[int, Op], float]:
        """The median time of a computation in some steps, by stage and operation."""
        times: defaultdict[tuple[int, Op], list[float]] = defaultdict(list)
        for done in self.actions:
            if done.action.op in COMPUTE_OPS and done.step in steps:
                times[done.action.stage, done.action.op].append(done.end - done.start)
        return {key: statistics.median(values) for key, values in times.items()}
