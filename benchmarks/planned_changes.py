"""What planned changes hold up a training on emulated layers, in iterations.

    python benchmarks/planned_changes.py              # some ten minutes, most of which is sleep
    python benchmarks/planned_changes.py --only drain

Two pipelines of four stages train with iterations of seven seconds, while each kind of change is
planned: new shadows after a takeover, a standby in a victim's place, other microbatches and a new
cut, a node that is told to leave, a dissolved pipeline that begins again, and, of pipelines of five
stages and three, a node that is lent. State moves in one iteration, and from the next one on things
are as they were planned. *Held up* is by how much these two take longer than iterations in which
nothing happens, with the same stages on the same nodes and the same microbatches: those of all jobs
are compared. *Fetched*: what new holders got in that
iteration; *longest wait*: of one of them, when it had nothing else to do, as a standby never has.

Everything is the product's own path but the layers, which sleep. Results are kept by job and by the
code they were had with, so that what was ended goes on with the next job.
"""

import argparse
import json
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from elastic_jobs import ElasticJob
from made_up_text import prepare_data
from step_times import Step, calm_seconds, steps_of
from tables import table
from timed_jobs import Emulation, Log, job_context

from megatron_bamboo.rehearsal.results import code_digest

ROOT = Path(__file__).parents[1]
AIM = 0.05
HIT_STEP = 3
CALM_STEPS = 5
"""That follow what is done, before the job ends."""
JOB_SECONDS = 600.0
HEADS = ("job", "change", "held up", "by the move", "by the switch", "fetched", "longest wait")


@dataclass(frozen=True, slots=True)
class Scenario:
    """What is done to a job."""

    num_steps: int
    kills: tuple[str, ...] = ()
    """Nodes that are lost in the middle of a step."""
    drains: tuple[str, ...] = ()
    """Nodes that are told to leave when the step before it has passed."""
    standbys: int = 0
    flags: tuple[str, ...] = ()
    is_uneven: bool = False
    """One pipeline has a stage more, and the other one a stage less."""


AUTO = ("--bamboo-policy", "auto")
SCENARIOS = {
    "new shadows": Scenario(HIT_STEP + CALM_STEPS, kills=("node1",)),
    "standby": Scenario(HIT_STEP + CALM_STEPS, kills=("node1",), standbys=1),
    "new cut": Scenario(HIT_STEP + CALM_STEPS + 4, kills=("node1",), flags=AUTO),
    "drain": Scenario(HIT_STEP + CALM_STEPS, drains=("node1",)),
    # Their neighbours are let go, and come back as standbys.
    "growth": Scenario(HIT_STEP + CALM_STEPS + 3, ("node4", "node5"), standbys=2, flags=AUTO),
    # What an iteration takes on them before one is lent.
    "uneven pipelines": Scenario(CALM_STEPS, is_uneven=True),
    "lent node": Scenario(HIT_STEP + CALM_STEPS, flags=AUTO, is_uneven=True),
}


@dataclass(frozen=True, slots=True)
class Fetch:
    """State that a new holder has got."""

    step: int
    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Record:
    """What a job has shown."""

    steps: tuple[Step, ...]
    reasons: Mapping[int, str]
    """By step in which state moved what was planned."""
    fetches: tuple[Fetch, ...]
    load: float
    """Of the machine when the job was over."""

    @classmethod
    def of(cls, log: Log) -> "Record":
        """From a job's log."""
        reasons = {e["epoch"]: str(e["reason"]) for e in log.of("plan") if "pipelines" in e}
        said = {event["step"]: reasons[event["epoch"]] for event in log.of("changed")}
        fetches = tuple(Fetch(e["step"], e["bytes"], e["seconds"]) for e in log.of("fetch"))
        return cls(steps_of(log), said, fetches, os.getloadavg()[0])

    @classmethod
    def from_fields(cls, values: Mapping[str, Any]) -> "Record":
        """The record that ``asdict`` gave, and JSON has kept."""
        return cls(
            tuple(Step(**step) for step in values["steps"]),
            {int(step): reason for step, reason in values["reasons"].items()},
            tuple(Fetch(**fetch) for fetch in values["fetches"]),
            values["load"],
        )


@dataclass(frozen=True, slots=True)
class Change:
    """One planned change and what it has held up, in iterations."""

    job: str
    reason: str
    move: float | None
    """In the iteration in which state moved; None where none without it is known."""
    switch: float | None
    """In the one after it."""
    fetches: tuple[Fetch, ...]

    @property
    def held_up(self) -> float | None:
        """By both, as far as known."""
        known = [part for part in (self.move, self.switch) if part is not None]
        return sum(known) if known else None

    def cells(self) -> Sequence[str]:
        """Of its row."""
        parts = (self.held_up, self.move, self.switch)
        size = sum(fetch.num_bytes for fetch in self.fetches)
        longest = max((fetch.seconds for fetch in self.fetches), default=0.0)
        numbers = ("" if part is None else f"{part:+.3f}" for part in parts)
        return (self.job, self.reason, *numbers, f"{size:,}", f"{longest:.2f} s")


def changes_of(records: Mapping[str, Sequence[Record]], iteration: float) -> list[Change]:
    """All that were made, measured by calm iterations of any job.

    Args:
        iteration: seconds of an undisturbed one.
    """
    seconds = calm_seconds(record.steps for several in records.values() for record in several)
    found = []
    for job, record in ((job, record) for job, several in records.items() for record in several):
        by_number = {step.number: step for step in record.steps}
        for number, reason in record.reasons.items():
            first, second = by_number[number], by_number.get(number + 1)
            # Where another change or loss comes at once, it is no measure of this one.
            if second is not None and (second.epoch != first.epoch or second.moves):
                second = None
            parts = (_longer(step, seconds, iteration) for step in (first, second))
            fetches = tuple(fetch for fetch in record.fetches if fetch.step == number)
            found.append(Change(job, reason, *parts, fetches))
    return found


def _longer(step: Step | None, calm: Mapping[str, float], iteration: float) -> float | None:
    if step is None or step.arranged not in calm:
        return None
    return (step.seconds - calm[step.arranged]) / iteration


class Results:
    """The results file: one JSON line a job."""

    def __init__(self, path: Path, key: str) -> None:
        self._path = path
        self._key = key
        path.parent.mkdir(parents=True, exist_ok=True)

    def add(self, job: str, record: Record) -> None:
        """Append a result."""
        line = json.dumps({"key": self._key, "job": job, "record": asdict(record)})
        with self._path.open("a") as file:
            file.write(line + "\n")

    def read(self) -> Mapping[str, list[Record]]:
        """All results of this key by job."""
        found: defaultdict[str, list[Record]] = defaultdict(list)
        lines = self._path.read_text().splitlines() if self._path.is_file() else []
        for line in map(json.loads, lines):
            if line["key"] == self._key:
                found[line["job"]].append(Record.from_fields(line["record"]))
        return found


class Benchmark:
    """Runs jobs one after the other."""

    def __init__(self, folder: Path, emulation: Emulation, more: Sequence[str]) -> None:
        self._folder = folder
        self._emulation = emulation
        self._more = more
        self._data = prepare_data(folder)
        self._context = job_context()
        self._num_jobs = 0

    def run(self, scenario: Scenario) -> Record:
        """One job."""
        self._num_jobs += 1
        folder = self._folder / f"job{self._num_jobs}"
        folder.mkdir()
        num_stages = self._emulation.num_stages
        num_nodes = 2 * num_stages
        uneven = f"{num_stages + 1},{num_stages - 1}" if scenario.is_uneven else None
        flags = (
            *self._emulation.flags(uneven),
            *("--global-batch-size", str(2 * self._emulation.num_microbatches)),
            *self._data,
            *("--train-iters", str(scenario.num_steps)),
            *scenario.flags,
            *self._more,
        )
        job = ElasticJob(self._context, folder, num_nodes, flags)
        try:
            return Record.of(self._conduct(job, scenario, num_nodes))
        finally:
            job.kill()

    def _conduct(self, job: ElasticJob, scenario: Scenario, num_nodes: int) -> Log:
        nodes = [f"node{number}" for number in range(num_nodes)]
        for node in nodes:
            job.add(node, *([f"iter{HIT_STEP}:#9"] if node in scenario.kills else []))
        # The first that come run the job.
        job.wait(lambda: len(job.events("agent_joined")) == num_nodes, JOB_SECONDS)
        for number in range(scenario.standbys):
            job.add(f"node{num_nodes + number}")
        job.wait(lambda: job.step >= HIT_STEP - 1, JOB_SECONDS)
        for node in scenario.drains:
            job.drain(node)
        return job.finish(JOB_SECONDS)


def verdict(changes: Sequence[Change], records: Mapping[str, Sequence[Record]]) -> str:
    """One line: whether it is as it should be, and on how busy a machine it was measured."""
    known = [change.held_up for change in changes if change.held_up is not None]
    loads = [record.load for several in records.values() for record in several]
    if not known:
        return "No change was made that could be measured."
    above = sum(value > AIM for value in known)
    return (
        f"{len(known)} changes: median {median(known):+.3f} iterations, largest {max(known):+.3f}; "
        f"{above} above {AIM:g}; load of the machine {min(loads):.1f} to {max(loads):.1f}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what is missing and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=SCENARIOS, default=list(SCENARIOS))
    parser.add_argument("--repeat", type=int, default=1, metavar="N", help="jobs of each kind (1)")
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=8, help="of each pipeline (8)")
    parser.add_argument("--seconds", type=float, default=7.0, help="of an iteration (7)")
    parser.add_argument(
        "--bandwidth", type=float, metavar="MB/S", help="of each node's link (without limit)"
    )
    parser.add_argument(
        "--results", type=Path, default=ROOT / "runs" / "planned-changes.jsonl", help="file"
    )
    args = parser.parse_args(argv)
    emulation = Emulation.equal(args.stages, args.microbatches, args.layers, args.seconds)
    more = () if args.bandwidth is None else ("--bamboo-emulated-bandwidth", f"{args.bandwidth:g}")
    key = f"{code_digest(Path(__file__).parent)} {emulation} {more}"
    results = Results(args.results, key)
    with tempfile.TemporaryDirectory(prefix="planned-changes-") as name:
        benchmark: Benchmark | None = None
        for number in range(args.repeat):
            for job in args.only:
                if len(results.read()[job]) <= number:
                    benchmark = benchmark or Benchmark(Path(name), emulation, more)
                    results.add(job, benchmark.run(SCENARIOS[job]))
                    sys.stderr.write(f"round {number + 1} of {args.repeat}: {job}\n")
    records = {job: several for job, several in results.read().items() if job in args.only}
    changes = changes_of(records, args.seconds)
    sys.stdout.write(table(HEADS, (change.cells() for change in changes)) + "\n")
    sys.stdout.write(verdict(changes, records) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
