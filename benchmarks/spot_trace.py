"""Real runs under a trace of spot nodes, one policy after the other, on emulated layers.

    python benchmarks/spot_trace.py --trace p3-trace.csv                    # ten minutes a policy
    python benchmarks/spot_trace.py --trace p3-trace.csv --policies auto

An hour of the trace, with as many of its nodes as fit, is played six times as fast, while a model
trains whose iterations take a second. Nodes are killed and join as the trace says. What a cloud's
machines and large models take, and emulated ones do not, is waited for, six times as short too: a
node's start, the writing of a checkpoint, and the loading of one. Our own pauses take what they
take. A job that has ended is started again from its last checkpoint, on as many pipelines as the
nodes that are there suffice for.

The clock begins with the first iteration that has passed. *Takeover* and *reconfiguration* are by
how much iterations were longer than those in which nothing happened, with the same stages on the
same nodes; *restore*: from the end of one part to the first iteration of the next, in which all go
on from a checkpoint; *wait*: too few nodes were there for a pipeline; *lost*: iterations, or parts
of them, that were done in vain.

Results are kept by policy and by the code they were had with: what was ended goes on with the next.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.context import ForkServerContext
from pathlib import Path

from made_up_text import prepare_data
from step_times import Step, calm_seconds
from tables import table
from timed_jobs import job_context
from trace_player import PRICES, Play, Segment, Settings

from megatron_bamboo.recovery.names import PolicyName
from megatron_bamboo.rehearsal.results import code_digest
from megatron_bamboo.simulator.timeline import Kind
from megatron_bamboo.simulator.trace import HOUR, Trace, read_trace

ROOT = Path(__file__).parents[1]
MOST_STEPS = 100_000
HEADS = ("policy", "iterations", "samples lost", *(kind.value for kind in Kind), "parts")


@dataclass(frozen=True, slots=True)
class Row:
    """What became of one policy's run."""

    iterations: int
    samples_lost: int
    seconds: Mapping[str, float]
    """By kind."""
    parts: int
    """Each but the last ended with a return to a checkpoint."""

    def cells(self, policy: str) -> Sequence[str]:
        """Of its row of the table."""
        times = (f"{self.seconds.get(kind, 0.0):.1f}" for kind in Kind)
        return (policy, str(self.iterations), str(self.samples_lost), *times, str(self.parts))


def account(segments: Sequence[Segment], batch: int) -> Row:
    """What the time of a run went into."""
    calm = calm_seconds(segment.steps for segment in segments)
    usual = min(calm.values(), default=0.0)
    seconds = dict.fromkeys(Kind, 0.0)
    lost_samples = 0
    for number, segment in enumerate(segments):
        is_last = number == len(segments) - 1
        seconds[Kind.WAIT] += segment.waited
        if number:
            # Nobody knows when its first iteration began.
            first = usual if segment.first_end < segment.ended else 0.0
            seconds[Kind.RESTORE] += segment.first_end - segment.called - segment.waited - first
            seconds[Kind.TRAINING] += first
        newest = _newest(segment)
        kept = newest if is_last else segment.saved
        for step in segment.steps:
            base = min(step.seconds, calm.get(step.arranged, usual))
            seconds[Kind.TRAINING if step.number <= kept else Kind.LOST] += base
            seconds[_cause(step, segment.steps)] += step.seconds - base
        end = segment.steps[-1].end if segment.steps else segment.first_end
        seconds[Kind.TRAINING if is_last else Kind.LOST] += segment.ended - end
        lost_samples += segment.samples_again + (newest - kept) * batch
        # What is under way when the trace ends is in vain for nobody.
        lost_samples += 0 if is_last else segment.samples_open
    done = _newest(segments[-1]) if segments else 0
    return Row(done, lost_samples, {str(k): round(v, 2) for k, v in seconds.items()}, len(segments))


def _newest(segment: Segment) -> int:
    """The last step that had passed in it."""
    if segment.steps:
        return segment.steps[-1].number
    return segment.first_step + (segment.first_end < segment.ended)


def _cause(step: Step, steps: Sequence[Step]) -> Kind:
    """Why an iteration was longer than others like it."""
    before = next((one for one in steps if one.number == step.number - 1), None)
    if step.is_redone or step.moves or (before is not None and before.moves):
        return Kind.RECONFIGURATION
    if step.loses or (before is not None and before.loses):
        return Kind.TAKEOVER
    return Kind.SAVING if step.follows_save else Kind.TRAINING


class Results:
    """The results file: one JSON line a policy's run."""

    def __init__(self, path: Path, key: str) -> None:
        self._path = path
        self._key = key
        path.parent.mkdir(parents=True, exist_ok=True)

    def add(self, policy: str, row: Row) -> None:
        """Append a result."""
        line = json.dumps({"key": self._key, "policy": policy, "row": asdict(row)})
        with self._path.open("a") as file:
            file.write(line + "\n")

    def read(self) -> Mapping[str, Row]:
        """The newest result of each policy."""
        lines = self._path.read_text().splitlines() if self._path.is_file() else []
        known = [line for line in map(json.loads, lines) if line["key"] == self._key]
        return {line["policy"]: Row(**line["row"]) for line in known}


def play(context: ForkServerContext, settings: Settings, policy: PolicyName, trace: Trace) -> Row:
    """One policy's run."""
    with tempfile.TemporaryDirectory(prefix="spot-trace-") as name:
        folder = Path(name)
        checkpoints = str(folder / "checkpoints")
        flags = (
            *settings.emulation.flags(),
            *("--global-batch-size", str(settings.total_microbatches)),
            *prepare_data(folder),
            *("--train-iters", str(MOST_STEPS), "--bamboo-policy", policy),
            *("--save", checkpoints, "--save-interval", str(settings.save_interval)),
            *("--load", checkpoints, "--bamboo-redundancy", policy.redundancy),
        )
        segments = Play(context, folder, settings, flags, trace).run()
        return account(segments, settings.total_microbatches)


def head(settings: Settings, trace: Trace, name: str) -> str:
    """What is played, and what is waited for."""
    numbers = [number for _, number in trace.counts()]
    return (
        f"{name}: {trace.num_removed} removals, {trace.num_added} adds, {min(numbers)} to "
        f"{max(numbers)} nodes, {trace.seconds / settings.faster:.0f} s; "
        f"{settings.num_pipelines} pipelines of {settings.num_stages} stages, "
        f"{settings.total_microbatches} samples an iteration of {settings.iteration_seconds:g} s\n"
        f"Waited for: start of a node {settings.start_seconds:g} s, loading a checkpoint "
        f"{settings.restart_seconds:g} s, writing one {settings.save_seconds:g} s every "
        f"{settings.save_interval} iterations\n"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the policies that have no result yet, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trace", type=Path, required=True, help="as bamboo simulate reads it")
    policies = {"type": PolicyName, "choices": PolicyName, "default": list(PolicyName)}
    parser.add_argument("--policies", nargs="+", **policies)  # type: ignore[arg-type]
    parser.add_argument("--from", type=float, default=4.0, dest="start", metavar="H", help="(4)")
    parser.add_argument("--hours", type=float, default=1.0, metavar="H", help="how long (1)")
    parser.add_argument("--nodes", type=int, default=12, help="at most (12)")
    parser.add_argument("--faster", type=float, default=6.0, help="so many times as fast (6)")
    parser.add_argument("--stages", type=int, default=3, help="of a pipeline (3)")
    parser.add_argument("--pipelines", type=int, default=3, help="at most (3)")
    parser.add_argument("--microbatches", type=int, default=12, help="of an iteration (12)")
    parser.add_argument("--seconds", type=float, default=1.0, help="of an iteration (1)")
    parser.add_argument("--save-interval", type=int, default=PRICES.save_interval)
    parser.add_argument(
        "--results", type=Path, default=ROOT / "runs" / "spot-trace.jsonl", help="file"
    )
    args = parser.parse_args(argv)
    if not args.trace.is_file():
        sys.stdout.write(f"skipped: there is no trace {args.trace}\n")
        return 0
    whole = read_trace(args.trace.read_text(encoding="utf-8"))
    trace = whole.window(args.start * HOUR, args.hours * HOUR).at_most(args.nodes)
    settings = Settings(
        args.stages, args.pipelines, args.microbatches, args.seconds, args.faster,
        args.save_interval,
    )  # fmt: skip
    part = f"{args.trace.name} {args.start} {args.hours} {args.nodes}"
    results = Results(args.results, f"{code_digest(Path(__file__).parent)} {settings} {part}")
    context = job_context()
    for policy in args.policies:
        if policy not in results.read():
            results.add(policy, play(context, settings, policy, trace))
            sys.stderr.write(f"played {policy}\n")
    rows = [row.cells(policy) for policy, row in results.read().items() if policy in args.policies]
    sys.stdout.write(head(settings, trace, args.trace.name) + "\n" + table(HEADS, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
