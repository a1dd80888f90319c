"""The loss curve of a run whose nodes come and go, beside that of an undisturbed run.

    python benchmarks/loss_curve.py --quick     # some three minutes
    python benchmarks/loss_curve.py             # some twenty minutes

A GPT trains on the English of this Python's documentation, on two pipelines of four stages, with
``--bamboo-policy auto``, while the number of its nodes goes 8, 7, 5, 4, 6, 8: nodes are killed in
the middle of given iterations, and others join after given ones (quick: pipelines of two stages,
and 4, 3, 1, 4 nodes). Losses then change nothing but the order in which a batch is summed. What
that may do is measured: undisturbed runs train the same batches with microbatches that change
places in each step, as drawn by lot (``orders.py``).

*Deviation*: of a loss, from the undisturbed run's at the same step. Asked is that it is at most
three times the largest of those of the other orders; the same of the largest deviation of each
tensor, parameters and moments, in the end; and that each sample of each batch is in one microbatch
of the attempt that was applied. The exit status is 1 if one of it is not so.

Runs are kept by the code they were had with, so that what was ended goes on with the next one.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

from curves import (
    MOST,
    Curve,
    StateDeviation,
    deviations,
    live_nodes,
    sample_complaints,
    state_rows,
)
from elastic_jobs import BeforeTraining, ElasticJob, nothing
from orders import permute
from tables import table
from timed_jobs import Log, job_context

from megatron_bamboo.agent.outcome import Outcome, Status
from megatron_bamboo.cli import main as bamboo
from megatron_bamboo.data import train_tokenizer
from megatron_bamboo.data.corpus import documents
from megatron_bamboo.observe.compare import Difference, compare_runs
from megatron_bamboo.observe.saved_run import open_run
from megatron_bamboo.rehearsal.results import code_digest

ROOT = Path(__file__).parents[1]
NUM_DOCUMENTS = 400
JOB_SECONDS = 3600.0
HEADS = ("steps", "nodes", "loss", "deviation", "of other orders", "at most times", "steps above")
STATE_HEADS = ("state", "tensors", "largest deviation", "of other orders", "at most times", "above")


@dataclass(frozen=True, slots=True)
class Course:
    """Who is lost and who comes, and after which step; losses strike in the middle of the next."""

    num_stages: int
    num_steps: int
    kills: Mapping[str, int]
    joins: Mapping[str, int]

    @property
    def num_nodes(self) -> int:
        """Those of two pipelines."""
        return 2 * self.num_stages

    @property
    def batch(self) -> int:
        """Microbatches of a step, of a sample each."""
        return 2 * self.num_nodes


# node4 and node5 hold all copies of a stage of the second pipeline.
WHOLE = Course(
    4,
    80,
    {"node1": 7, "node4": 17, "node5": 17, "node2": 31},
    {"node8": 42, "node9": 42, "node10": 52, "node11": 52},
)
QUICK = Course(
    2, 60, {"node1": 5, "node2": 12, "node3": 12}, {"node4": 20, "node5": 20, "node6": 20}
)


def prepare_text(folder: Path) -> tuple[str, ...]:
    """Data files of real text, made once; the flags that name them."""
    names = ("--vocab-file", str(folder / "vocab.json"), "--merge-file", str(folder / "merges.txt"))
    done = folder / "whole"
    if not done.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        corpus = folder / "corpus.jsonl"
        texts = islice(documents(), NUM_DOCUMENTS)
        corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        files = ["--input", str(corpus), "--vocab-size", "1024", "--output-dir", str(folder)]
        assert train_tokenizer.main(files) == 0
        prefix = ["--output-prefix", str(folder / "text")]
        command = ["preprocess", "--input", str(corpus), *prefix, *names, "--append-eod"]
        assert bamboo(command) == 0
        done.touch()
    return ("--data-path", str(folder / "text_text_document"), "--split", "100,0,0", *names)


class Runs:
    """Makes those that are not there yet, in folders of their own."""

    def __init__(self, folder: Path, course: Course) -> None:
        self._folder = folder
        self._course = course
        self._data = prepare_text(folder / "text")
        self._context = job_context()

    def undisturbed(self) -> Path:
        """The job folder of a run that loses nothing."""
        return self._run("undisturbed", ("--bamboo-redundancy", "none"))

    def reordered(self, seed: int) -> Path:
        """That of one whose microbatches change places."""
        before = partial(permute, seed, self._course.batch)
        return self._run(f"order{seed}", ("--bamboo-redundancy", "none"), before)

    def disturbed(self) -> Path:
        """That of one whose nodes come and go."""
        return self._run("disturbed", ("--bamboo-policy", "auto"), is_disturbed=True)

    def _run(
        self,
        name: str,
        more: Sequence[str],
        before: BeforeTraining = nothing,
        is_disturbed: bool = False,
    ) -> Path:
        folder = self._folder / name
        if not _is_finished(folder / "job"):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            sys.stderr.write(f"trains {name}\n")
            flags = (*self._flags(), *more)
            job = ElasticJob(self._context, folder, self._course.num_nodes, flags, before)
            try:
                self._conduct(job, is_disturbed)
            finally:
                job.kill()
        return folder / "job"

    def _conduct(self, job: ElasticJob, is_disturbed: bool) -> None:
        course = self._course
        for number in range(course.num_nodes):
            node = f"node{number}"
            step = course.kills.get(node) if is_disturbed else None
            job.add(node, *([] if step is None else [f"iter{step + 1}:#4"]))
        joins = sorted(course.joins.items(), key=lambda join: join[1]) if is_disturbed else ()
        for node, step in joins:
            job.wait(lambda step=step: job.step >= step, JOB_SECONDS)  # type: ignore[misc]
            job.add(node)
        job.finish(JOB_SECONDS)

    def _flags(self) -> tuple[str, ...]:
        course = self._course
        return (
            *self._data,
            *("--num-layers", str(course.num_stages), "--hidden-size", "32"),
            *("--num-attention-heads", "2", "--seq-length", "32"),
            *("--max-position-embeddings", "32", "--clip-grad", "1.0"),
            *("--pipeline-model-parallel-size", str(course.num_stages)),
            *("--micro-batch-size", "1", "--global-batch-size", str(course.batch)),
            *("--train-iters", str(course.num_steps), "--lr", "1e-3", "--lr-warmup-iters", "4"),
        )


def _is_finished(job_dir: Path) -> bool:
    outcome = Outcome.read(job_dir)
    return outcome is not None and outcome.status is Status.FINISHED


def losses_of(job_dir: Path) -> dict[int, float]:
    """By step."""
    return {step: float.fromhex(loss) for step, (loss, _) in open_run(job_dir).losses.items()}


def state_deviations(run: Path, others: Sequence[Path], whole: Path) -> list[StateDeviation]:
    """Of all tensors; AssertionError where copies within a run differ."""
    own, *rest = ({d.name: d.max_abs for d in _compared(path, whole)} for path in (run, *others))
    names = {name for found in (own, *rest) for name in found}
    return [
        StateDeviation(
            name, own.get(name, 0.0), max((found.get(name, 0.0) for found in rest), default=0.0)
        )
        for name in sorted(names)
    ]


def _compared(run: Path, whole: Path) -> tuple[Difference, ...]:
    comparison = compare_runs(whole, run)
    assert not comparison.copies, comparison.copies[:3]
    return comparison.tensors


def judge(runs: Runs, course: Course, num_orders: int, group: int) -> bool:
    """Train what is missing and print the tables; whether all is as it must be.

    Args:
        group: so many steps a row.
    """
    whole = runs.undisturbed()
    others = [runs.reordered(seed) for seed in range(1, num_orders + 1)]
    run = runs.disturbed()
    curve, log = _curve(run, others, whole), Log(run)
    state = state_deviations(run, others, whole)
    write = sys.stdout.write
    write(table(HEADS, curve.rows(group, live_nodes(log))) + "\n")
    write(table(STATE_HEADS, state_rows(state)) + "\n")
    plans = [event["reason"] for event in log.of("plan") if event.get("reason")]
    write("".join(f"- {reason}\n" for reason in plans) + "\n")
    found = [f"the loss is above {MOST:g} times at step {step}" for step in curve.above()]
    found += [f"{one.name} is above {MOST:g} times" for one in state if one.times > MOST]
    found += sample_complaints(log, course.num_steps, course.batch)
    stages = [pipeline["stages"] for pipeline in log.of("finished_job")[-1]["pipelines"]]
    if (nodes := len({node for several in stages for node in several})) != course.num_nodes:
        found.append(f"in the end {nodes} nodes run stages")
    write("\n".join(found or ["All as it must be."]) + "\n")
    return not found


def _curve(run: Path, others: Sequence[Path], whole: Path) -> Curve:
    losses = losses_of(whole)
    by_order = [deviations(losses_of(other), losses) for other in others]
    most = {step: max(found[step] for found in by_order) for step in losses}
    return Curve(losses, deviations(losses_of(run), losses), most)


def main(argv: Sequence[str] | None = None) -> int:
    """Train what is missing, compare, and print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="4 nodes, 60 steps, 2 other orders")
    parser.add_argument("--orders", type=int, metavar="N", help="other orders (5; quick: 2)")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "loss-curve", help="of runs")
    args = parser.parse_args(argv)
    course = QUICK if args.quick else WHOLE
    num_orders = args.orders or (2 if args.quick else 5)
    folder = args.folder / code_digest(Path(__file__).parent) / f"{course.num_nodes}-nodes"
    is_good = judge(Runs(folder, course), course, num_orders, 5 if args.quick else 10)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
