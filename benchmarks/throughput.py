"""Our schedule's throughput against Megatron-core's own, step for step on this machine.

Both sides train the same GPT on the same text with the same flags: the product with redundancy
off, as its workers run it, and Megatron-core's schedules with its own P2P, data parallelism,
gradient finalization and optimizer. Both use gloo, the same gradient buffers, no overlap and the
same clipping. All their processes live at the same time; turns of a few steps alternate, ours
first in one pair and second in the next, so that both meet the same machine. The first step of a
turn is not counted: it finds the other side's data in the caches.

    python benchmarks/throughput.py                 # about ten minutes on two cores
    python benchmarks/throughput.py --stages 2 --chunks 1 --profile
    taskset -c 1 python benchmarks/throughput.py    # where others compute too: see below

A step's time is from the moment when the last rank had ended the step before until the last one
ended it. The ratio is their median time over ours, so above 1 ours is faster; in brackets 95 % of
the ratios that drawing the pairs anew gives (bootstrap). The second ratio is that of the
processor's time, all threads of all ranks together. On a machine that others use, the scheduler
may give one side's ranks a processor together and the other's one each, for as long as they live;
kept to one processor, both sides have the same, and the ratios are those of the work to do.
"""

import argparse
import contextlib
import math
import multiprocessing
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import mean, median, quantiles

# The training script, which both sides train, is in no package.
sys.path.append(str(Path(__file__).parents[1]))

from made_up_text import prepare_data
from parts import PARTS, mean_parts, parts_of_events
from sides import OURS, THEIRS, Training, train_ours, train_theirs
from tables import table
from turns import Step, Turns

WARM_UP_STEPS = 3
BOOTSTRAP_DRAWS = 2000
END_SECONDS = 60.0
HEADS = (
    *("stages", "chunks", "pairs", "Megatron-core, s", "ours, s", "ratio"),
    *("processor's ratio", "losses differ by"),
)
PROFILE_HEADS = ("stages", "chunks", "seconds of a rank's step", "Megatron-core", "ours")


@dataclass(frozen=True, slots=True)
class Turn:
    """The counted steps of one turn, and when the last rank had ended the step before them."""

    side: str
    first_step: int
    start: float
    steps: tuple[tuple[Step, ...], ...]  # by step and rank

    @property
    def seconds(self) -> float:
        """The mean time of a step."""
        return (max(rank.end for rank in self.steps[-1]) - self.start) / len(self.steps)

    @property
    def processor_seconds(self) -> float:
        """The mean processor time of a step, of all ranks together."""
        used = (rank.processor_seconds for ranks in self.steps for rank in ranks)
        return sum(used) / len(self.steps)


@dataclass(frozen=True, slots=True)
class Measured:
    """All turns of one shape."""

    num_stages: int
    num_chunks: int
    turns: tuple[Turn, ...]
    loss_difference: float
    profile: dict[str, dict[str, float]]  # by part and side

    def of(self, side: str) -> list[Turn]:
        """A side's turns."""
        return [turn for turn in self.turns if turn.side == side]

    def row(self) -> Sequence[str]:
        """Its row of the table."""
        ours, theirs = ([turn.seconds for turn in self.of(side)] for side in (OURS, THEIRS))
        used = ([turn.processor_seconds for turn in self.of(side)] for side in (OURS, THEIRS))
        return (
            *(str(self.num_stages), str(self.num_chunks), str(len(ours))),
            *(quartiles(theirs), quartiles(ours), ratio(ours, theirs), ratio(*used)),
            f"{self.loss_difference:.1e}",
        )

    def profile_rows(self) -> Iterator[Sequence[str]]:
        """Its rows of the profile."""
        for part, seconds in self.profile.items():
            shape = (str(self.num_stages), str(self.num_chunks))
            yield (*shape, part, f"{seconds[THEIRS]:.5f}", f"{seconds[OURS]:.5f}")


def quartiles(values: Sequence[float]) -> str:
    """The three of them."""
    return " ".join(f"{value:.4f}" for value in quantiles(values, n=4, method="inclusive"))


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """Their median over ours, and what holds 95 % of such ratios when the pairs are drawn anew."""
    draw = random.Random(0)
    pairs = list(zip(ours, theirs, strict=True))
    drawn = [draw.choices(pairs, k=len(pairs)) for _ in range(BOOTSTRAP_DRAWS)]
    cuts = quantiles([_ratio(*zip(*some, strict=True)) for some in drawn], n=40, method="inclusive")
    return f"{_ratio(ours, theirs):.3f} ({cuts[0]:.3f} to {cuts[-1]:.3f})"


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return median(theirs) / median(ours)


def measure(args: argparse.Namespace, num_stages: int, num_chunks: int) -> Measured:
    """Train one shape on both sides, turn by turn."""
    with tempfile.TemporaryDirectory(prefix="throughput-") as name:
        folder = Path(name)
        num_steps = WARM_UP_STEPS + args.pairs * (1 + args.steps)
        flags = model_flags(args, num_stages, num_chunks, num_steps) + prepare_data(folder)
        training = Training(flags, num_stages, num_steps, folder)
        turns = Turns(training.turns)
        with started(training, turns, args.profile):
            counted, losses = take_turns(turns, args.pairs, args.steps)
        turns.close()
        profile = profile_of(counted, training) if args.profile else {}
    return Measured(num_stages, num_chunks, tuple(counted), difference(losses), profile)


@contextlib.contextmanager
def started(training: Training, turns: Turns, with_parts: bool) -> Iterator[None]:
    """All processes of both sides, ready to train; at the end they must have ended well."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["megatron_bamboo.training", "sides"])
    # The product's prepare phase builds the data's indices, which Megatron's side then reads.
    processes = [_start(context, train_ours, training)]
    try:
        turns.await_ranks(OURS, training.num_ranks)
        for rank in range(training.num_ranks):
            processes.append(_start(context, train_theirs, training, rank, with_parts))
        turns.await_ranks(THEIRS, training.num_ranks)
        yield
        for process in processes:
            process.join(END_SECONDS)
        ended = [process.exitcode for process in processes]
        assert set(ended) == {0}, f"the processes ended with {ended}"
    except OSError:
        sys.stderr.writelines(log.read_text() for log in training.job_dir.glob("logs/*.log"))
        raise
    finally:
        for process in processes:
            process.kill()


def _start(context: ForkServerContext, function: object, *arguments: object) -> BaseProcess:
    process = context.Process(target=function, args=arguments)  # type: ignore[arg-type]
    process.start()
    return process


def take_turns(
    turns: Turns, num_pairs: int, num_steps: int
) -> tuple[list[Turn], dict[str, list[float]]]:
    """The counted turns, and each side's losses in order."""
    counted = []
    losses: dict[str, list[float]] = {OURS: [], THEIRS: []}
    for side in losses:
        losses[side] += _losses(turns.run(side, WARM_UP_STEPS))
    for pair in range(num_pairs):
        first = WARM_UP_STEPS + pair * (1 + num_steps) + 2
        for side in (OURS, THEIRS) if pair % 2 == 0 else (THEIRS, OURS):
            uncounted, *steps = turns.run(side, 1 + num_steps)
            losses[side] += _losses([uncounted, *steps])
            start = max(rank.end for rank in uncounted)
            counted.append(Turn(side, first, start, tuple(map(tuple, steps))))
    return counted, losses


def _losses(steps: Sequence[Sequence[Step]]) -> list[float]:
    return [loss for ranks in steps for rank in ranks for loss in rank.losses]


def difference(losses: dict[str, list[float]]) -> float:
    """The largest relative difference of a microbatch's loss."""
    pairs = zip(losses[OURS], losses[THEIRS], strict=True)
    return max(abs(ours - theirs) / theirs for ours, theirs in pairs)


def profile_of(turns: Sequence[Turn], training: Training) -> dict[str, dict[str, float]]:
    """Each side's mean seconds of a rank's step by part, and the processor's in all."""
    by_step = parts_of_events(training.job_dir)
    profile: dict[str, dict[str, float]] = {
        name: {} for name in (*PARTS, "the whole step", "processor time of the step")
    }
    for side in (OURS, THEIRS):
        mine = [turn for turn in turns if turn.side == side]
        ranks = [rank for turn in mine for ranks in turn.steps for rank in ranks]
        whole = mean(turn.seconds for turn in mine)
        if side == THEIRS:
            steps = [rank.parts for rank in ranks]
        else:
            numbers = [turn.first_step + i for turn in mine for i in range(len(turn.steps))]
            steps = [parts for number in numbers for parts in by_step[number].values()]
        parts = mean_parts(steps, whole)
        parts["the whole step"] = whole
        parts["processor time of the step"] = mean(rank.processor_seconds for rank in ranks)
        for name, seconds in parts.items():
            profile[name][side] = seconds
    return profile


def model_flags(
    args: argparse.Namespace, num_stages: int, num_chunks: int, num_steps: int
) -> tuple[str, ...]:
    """Megatron's flags, the same for both sides; without dropout, since losses are compared."""
    per_chunk = args.layers // (num_stages * num_chunks)
    return (
        *("--num-layers", str(args.layers), "--hidden-size", str(args.hidden)),
        *("--num-attention-heads", "4", "--num-layers-per-virtual-pipeline-stage", str(per_chunk)),
        *("--seq-length", str(args.sequence), "--max-position-embeddings", str(args.sequence)),
        *("--micro-batch-size", "1", "--global-batch-size", str(args.microbatches)),
        *("--train-iters", str(num_steps), "--lr", "1e-3", "--clip-grad", "1.0"),
        *("--attention-dropout", "0", "--hidden-dropout", "0"),
        *("--pipeline-model-parallel-size", str(num_stages)),
        *("--bamboo-redundancy", "none", "--distributed-timeout-minutes", "5"),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table, and with ``--profile`` a second one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--chunks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--pairs", type=int, default=20, help="turns of each side")
    parser.add_argument("--steps", type=int, default=2, help="counted steps of a turn")
    parser.add_argument("--profile", action="store_true", help="also show where the time goes")
    args = parser.parse_args(argv)
    if args.layers % math.lcm(*(s * c for s, c in product(args.stages, args.chunks))):
        parser.error("--layers must be a multiple of --stages times --chunks")
    measured = [measure(args, *shape) for shape in product(args.stages, args.chunks)]
    sys.stdout.write("Seconds of a step are the quartiles over the pairs.\n\n")
    sys.stdout.write(table(HEADS, [shape.row() for shape in measured]))
    if args.profile:
        rows = [row for shape in measured for row in shape.profile_rows()]
        sys.stdout.write("\n" + table(PROFILE_HEADS, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
