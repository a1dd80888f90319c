"""What ``bamboo memory`` says a run takes, beside what its workers' tensors then took.

``python benchmarks/memory.py`` trains a GPT of 50 million parameters for two steps (in the second
the optimizer has its state) in each mode, one run after the other: each worker counts its tensors
by category after every action. About 4 GB of memory and 15 minutes on two cores; with names of
modes only those. Its exit status is 1 if a category is off by more than 5 %.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from made_up_text import prepare_data
from tables import table

from megatron_bamboo.observe.events import read_events
from megatron_bamboo.schedule.footprint import Category

ROOT = Path(__file__).parents[1]
MODEL = (
    *("--num-layers", "4", "--hidden-size", "1024", "--num-attention-heads", "16"),
    *("--seq-length", "32", "--max-position-embeddings", "32", "--micro-batch-size", "1"),
    *("--train-iters", "2", "--lr", "1e-4"),
)
TWO_STAGES = ("--pipeline-model-parallel-size", "2", "--global-batch-size", "12")
TWO_BY_TWO = ("--pipeline-model-parallel-size", "2", "--global-batch-size", "16")
TWO_PIPELINES = ("--global-batch-size", "8")
ZERO = "--use-distributed-optimizer"
MOST_OFF = 0.05
MEGABYTE = 1e6


def _redundancy(mode: str, *more: str) -> tuple[str, ...]:
    return ("--bamboo-redundancy", mode, *more)


@dataclass(frozen=True, slots=True)
class Mode:
    """One run."""

    nodes: int
    flags: tuple[str, ...]


MODES = {
    "none": Mode(2, (*TWO_STAGES, *_redundancy("none"))),
    "lazy": Mode(2, (*TWO_STAGES, *_redundancy("lazy"))),
    "eager": Mode(2, (*TWO_STAGES, *_redundancy("eager"))),
    "eager-bf16": Mode(2, (*TWO_STAGES, *_redundancy("eager"), "--bf16")),
    "eager-host": Mode(2, (*TWO_STAGES, *_redundancy("eager", "--bamboo-replica-memory", "host"))),
    "eager-recompute": Mode(
        2, (*TWO_STAGES, *_redundancy("eager", "--bamboo-replica-memory", "recompute"))
    ),
    "lazy-mirrors": Mode(2, (*TWO_STAGES, *_redundancy("lazy", "--bamboo-mirror-gradients", "4"))),
    "two-pipelines": Mode(2, (*TWO_PIPELINES, *_redundancy("none"))),
    "two-pipelines-zero": Mode(2, (*TWO_PIPELINES, *_redundancy("none"), ZERO)),
    "two-pipelines-zero-bf16": Mode(2, (*TWO_PIPELINES, *_redundancy("none"), ZERO, "--bf16")),
    "lazy-zero": Mode(4, (*TWO_BY_TWO, *_redundancy("lazy"), ZERO)),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the modes and print a table of each; 1 if a category is off by more than it may be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("modes", nargs="*", metavar="MODE", help=f"{', '.join(MODES)} (all)")
    names = parser.parse_args(argv).modes or list(MODES)
    if unknown := set(names) - MODES.keys():
        parser.error(f"there is no mode {min(unknown)}: they are {', '.join(MODES)}")
    worst = 0.0
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            compared = [*_run(name, Path(folder))]
        worst = max([worst, *(one.off for one in compared)])
        heads = ["node", "category", "said (MB)", "found (MB)", "found / said"]
        sys.stdout.write(f"{name}\n\n{table(heads, [one.cells() for one in compared])}\n")
        sys.stdout.flush()
    sys.stdout.write(f"furthest off: {100 * worst:.2f} %\n")
    return int(worst > MOST_OFF)


@dataclass(frozen=True, slots=True)
class Compared:
    """What was said and what was found, in bytes."""

    node: str
    what: str
    said: int | None
    found: int

    @property
    def off(self) -> float:
        """By how much of what was said."""
        if self.said is None or self.said == self.found:
            return 0.0
        return abs(self.found / self.said - 1) if self.said else float("inf")

    def cells(self) -> list[str]:
        """A line of the table."""
        said = "" if self.said is None else f"{self.said / MEGABYTE:,.2f}"
        ratio = f"{self.found / self.said:.4f}" if self.said else ""
        return [self.node, self.what, said, f"{self.found / MEGABYTE:,.2f}", ratio]


def _run(name: str, folder: Path) -> Iterator[Compared]:
    mode = MODES[name]
    words = [str(ROOT / "pretrain_gpt_bamboo.py"), *MODEL, *mode.flags, *prepare_data(folder)]
    said = json.loads(_bamboo("memory", "--json", "--nodes", str(mode.nodes), *words))
    job = folder / "job"
    nodes = ("--nodes", str(mode.nodes), "--job-dir", str(job))
    _bamboo("run", *nodes, *words, "--bamboo-account-memory")
    events = [event for event in read_events(job / "events") if event["event"] == "memory"]
    for event in sorted(events, key=lambda event: event["source"]):
        number = int(event["source"].removeprefix("node"))
        yield from _compare(said[number % len(said)], event)


def _compare(said: Mapping[str, Any], event: Mapping[str, Any]) -> Iterator[Compared]:
    node = event["source"]
    for category in Category:
        at_peak, largest = (
            (said[which][category], event[which].get(category, 0))
            for which in ("at_peak", "largest")
        )
        if any(largest):
            yield Compared(node, f"{category}, at the peak", *at_peak)
        if largest != at_peak:
            yield Compared(node, f"{category}, when it takes most", *largest)
    together = (sum(one["at_peak"].values()) for one in (said, event))
    yield Compared(node, "together at the peak", *together)
    yield Compared(node, "resident memory, of all that the process has", None, event["resident"])


def _bamboo(*words: str) -> str:
    command = [sys.executable, "-m", "megatron_bamboo", *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(words[:1])} ended with {done.returncode}:\n{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
