"""What redundancy costs while no node is lost: the iteration's time over that without any.

    python benchmarks/overhead.py --quick     # some ten minutes
    python benchmarks/overhead.py             # some forty minutes

Jobs of all modes alternate, so that all meet the same machine; the first step of a job is not
counted. *equal*: eight stages of equal emulated layers. *memory-balanced*: as much work in all, but
each stage needs the same memory: stage s of P keeps the activations of P - s microbatches, and
those of one are taken to be a tenth of a layer's state, so that the last stage has 1.64 times the
work of the first. *tiny-gpt*: real layers on real processors, where every redundant forward costs
processor time. ``bubble`` places redundant forwards by the layers' times, for the tiny GPT by those
that ``bamboo profile`` measures. The paper's (BERT-Large): 7.0 % lazy, 19.8 % eager.
"""

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from pathlib import Path
from statistics import median, quantiles

from made_up_text import prepare_data
from tables import table
from timed_jobs import Emulation, TimedJob, job_context, pipeline_flags

from megatron_bamboo.schedule.redundancy import Redundancy

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "pretrain_gpt_bamboo.py"
MODES = (Redundancy.NONE, Redundancy.LAZY, Redundancy.EAGER, Redundancy.BUBBLE)
STATE_OF_ACTIVATIONS = 10.0  # a layer's state in those of one microbatch
PIPELINES = EQUAL, BALANCED, TINY = ("equal", "memory-balanced", "tiny-gpt")
TINY_STEPS = 10  # as many times the steps, which are short
HEADS = ("pipeline", "redundancy", "iterations", "seconds", "over none")


@dataclass(frozen=True, slots=True)
class Pipeline:
    """What is trained."""

    name: str
    num_nodes: int
    flags: tuple[str, ...]
    costs: Path


def emulated(name: str, emulation: Emulation, data: Sequence[str], folder: Path) -> Pipeline:
    """A pipeline of emulated layers, and what its stages take."""
    costs = folder / f"{name}.json"
    costs.write_text(emulation.costs.to_json())
    return Pipeline(name, emulation.num_stages, (*emulation.flags(), *data), costs)


def memory_balanced(equal: Emulation) -> Emulation:
    """The same work in all, cut so that stages need equal memory.

    The product cuts layers into equal numbers, so a stage's layers take more or less time instead.
    """
    stages = equal.num_stages
    shares = [1 / (STATE_OF_ACTIVATIONS + stages - stage) for stage in range(stages)]
    size = len(equal.forward_ms) // stages
    factors = [share * stages / sum(shares) for share in shares for _ in range(size)]
    forwards, backwards = (
        tuple(round(ms * factor, 3) for ms, factor in zip(all_ms, factors, strict=True))
        for all_ms in (equal.forward_ms, equal.backward_ms)
    )
    return Emulation(stages, equal.num_microbatches, forwards, backwards)


def tiny_gpt(data: Sequence[str], folder: Path) -> Pipeline:
    """A real one, and what this machine takes for its stages."""
    flags = (
        *("--num-layers", "4", "--hidden-size", "256", "--num-attention-heads", "4"),
        *("--seq-length", "128", "--max-position-embeddings", "128"),
        *pipeline_flags(4, 8),
        *data,
    )
    costs = folder / "tiny.json"
    command = [sys.executable, "-m", "megatron_bamboo", "profile", "--output", str(costs)]
    more = ["--train-iters", "1", "--bamboo-redundancy", "none"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run(
        [*command, str(SCRIPT), *flags, *more],
        env=environment,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return Pipeline(TINY, 4, flags, costs)


class Overhead:
    """Runs jobs one after the other."""

    def __init__(self, context: ForkServerContext, folder: Path, more_flags: Sequence[str]) -> None:
        self._context = context
        self._more_flags = tuple(more_flags)
        self._folder = folder
        self._num_jobs = 0

    def seconds(self, pipeline: Pipeline, mode: Redundancy, num_steps: int) -> list[float]:
        """The times of so many steps of one job, after a first one."""
        self._num_jobs += 1
        folder = self._folder / f"job{self._num_jobs}"
        folder.mkdir()
        flags = (
            *pipeline.flags,
            *("--train-iters", str(1 + num_steps), "--bamboo-redundancy", mode),
            *("--bamboo-costs", str(pipeline.costs)) * (mode is Redundancy.BUBBLE),
            *(self._more_flags if mode is not Redundancy.NONE else ()),
        )
        job = TimedJob(self._context, folder, pipeline.num_nodes, flags)
        try:
            return list(job.finish().step_seconds().values())
        finally:
            job.kill()

    def measure(
        self, pipeline: Pipeline, rounds: int, num_steps: int
    ) -> Mapping[Redundancy, list[float]]:
        """The times of all modes, which take turns; each round begins with another one."""
        times: dict[Redundancy, list[float]] = {mode: [] for mode in MODES}
        for number in range(rounds):
            first = number % len(MODES)
            for mode in (*MODES[first:], *MODES[:first]):
                times[mode] += self.seconds(pipeline, mode, num_steps)
                _say(f"{pipeline.name}, round {number + 1} of {rounds}: {mode}")
        return times


def rows(pipeline: Pipeline, times: Mapping[Redundancy, list[float]]) -> Iterator[Sequence[str]]:
    """One row a mode: quartiles of the seconds, and the ratio of the medians."""
    plain = median(times[Redundancy.NONE])
    for mode, seconds in times.items():
        cuts = quantiles(seconds, n=4, method="inclusive")
        yield (
            *(pipeline.name, mode.value, str(len(seconds))),
            " ".join(f"{cut:.3f}" for cut in cuts),
            f"{median(seconds) / plain - 1:+.2%}",
        )


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer and shorter iterations")
    parser.add_argument("--pipelines", nargs="+", choices=PIPELINES, default=PIPELINES)
    parser.add_argument("--stages", type=int, default=8, help="of emulated pipelines (8)")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--seconds", type=float, help="of an emulated iteration (7; quick: 4)")
    parser.add_argument("--rounds", type=int, help="jobs of each kind (4; quick: 2)")
    parser.add_argument(
        "--flags",
        type=shlex.split,
        default=[],
        help="more flags of the trainings with redundancy, in one word",
    )
    args = parser.parse_args(argv)
    seconds, rounds, num_steps = (4.0, 2, 3) if args.quick else (7.0, 4, 4)
    equal = Emulation.equal(args.stages, args.microbatches, args.layers, args.seconds or seconds)
    with tempfile.TemporaryDirectory(prefix="overhead-") as name:
        folder = Path(name)
        data = prepare_data(folder)
        overhead = Overhead(job_context(), folder, args.flags)
        lines: list[Sequence[str]] = []
        for kind in args.pipelines:
            pipeline = _pipeline(kind, equal, data, folder)
            steps = num_steps * (TINY_STEPS if kind == TINY else 1)
            times = overhead.measure(pipeline, args.rounds or rounds, steps)
            lines += rows(pipeline, times)
    sys.stdout.write("Seconds of an iteration are quartiles.\n\n" + table(HEADS, lines))
    return 0


def _pipeline(kind: str, equal: Emulation, data: Sequence[str], folder: Path) -> Pipeline:
    if kind == TINY:
        return tiny_gpt(data, folder)
    return emulated(kind, memory_balanced(equal) if kind == BALANCED else equal, data, folder)


if __name__ == "__main__":
    sys.exit(main())
