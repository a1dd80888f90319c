"""State that changes move, counted at the sockets, beside the least that any placement could.

    python benchmarks/moved_state.py     # as root; some four minutes, most of which is sleep

A standby takes a victim's place, a dissolved pipeline begins again on standbys, and a node is lent:
two pipelines of three stages, or of four and two, on emulated layers. Each job has a network of its
own, so that all that crosses its loopback is the job's. *Counted* are those bytes in the iteration
in which state moved, without what they are in the ones after it: gradients, activations, and what
is said to the coordinator. Where a pipeline is cut anew, a unit comes with the step's gradient of
it, which is no state. *Logged* is what new holders say that they got. *Least*: over all ways to put
the live nodes on the places of the new arrangement, all of them tried. The exit status is 1 if the
state is more than a tenth above it.
"""

import argparse
import ctypes
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from pathlib import Path
from statistics import median

from elastic_jobs import ElasticJob
from least_moves import MOST_NODES, held_by, least_bytes, places_needed
from made_up_text import prepare_data
from step_times import Step, calm, steps_of
from tables import table
from timed_jobs import Emulation, Log, job_context

from megatron_bamboo.observe.saved_run import open_run
from megatron_bamboo.planner.arrangement import unit_names

CLONE_NEWNET = 0x40000000
LOOK_SECONDS = 0.02
JOB_SECONDS = 900.0
MOST = 1.1
HIT_STEP = 3
HEADS = ("change", "counted", "of it gradients", "logged", "least", "state over least")


@dataclass(frozen=True, slots=True)
class Scenario:
    """Who is lost, and how many standbys wait."""

    kills: tuple[str, ...]
    standbys: int
    num_steps: int
    pipelines: str | None = None


NUM_STAGES, NUM_NODES = 3, 6
SCENARIOS = (
    Scenario(("node1",), 1, 10),
    Scenario(("node3", "node4"), 2, 13),
    Scenario((), 0, 8, pipelines="4,2"),
)


def enter_own_network() -> bool:
    """Let this process and its children have a network of their own; False if it may not."""
    libc = ctypes.CDLL(None, use_errno=True)
    if os.getuid() != 0 or libc.unshare(CLONE_NEWNET) != 0:
        return False
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    return True


class Meter:
    """How many bytes have crossed the loopback by each time."""

    def __init__(self) -> None:
        self._looks: list[tuple[float, int]] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Count no more."""
        self._is_over.set()
        self._thread.join()

    def between(self, start: float, end: float) -> int:
        """The bytes of a time."""
        return self._by(end) - self._by(start)

    def _by(self, moment: float) -> int:
        return next((count for at, count in self._looks if at >= moment), self._looks[-1][1])

    def _run(self) -> None:
        while not self._is_over.wait(LOOK_SECONDS):
            # The counters of this network, whoever reads them: received on the loopback.
            lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
            (own,) = (line for line in lines if line.strip().startswith("lo:"))
            self._looks.append((time.monotonic(), int(own.split(":")[1].split()[0])))


@dataclass(frozen=True, slots=True)
class Moved:
    """What a change has moved, in bytes."""

    reason: str
    counted: int
    gradients: int
    """Of the step, which go with units to new cuts."""
    logged: int
    least: int

    @property
    def ratio(self) -> float:
        """Of the state that was counted to the least."""
        return (self.counted - self.gradients) / self.least

    def cells(self) -> Sequence[str]:
        """Of its row."""
        sizes = (f"{size:,}" for size in (self.counted, self.gradients, self.logged, self.least))
        return (self.reason, *sizes, f"{self.ratio:.3f}")


def run(
    context: ForkServerContext, folder: Path, scenario: Scenario, seconds: float
) -> list[Moved]:
    """One job; its changes that gave places to nodes."""
    emulation = Emulation.equal(NUM_STAGES, 4, 2 * NUM_STAGES, seconds)
    flags = (
        *emulation.flags(scenario.pipelines),
        *("--global-batch-size", "8", "--hidden-size", "256", "--num-attention-heads", "4"),
        *prepare_data(folder),
        *("--train-iters", str(scenario.num_steps), "--bamboo-policy", "auto"),
    )
    meter, job = Meter(), ElasticJob(context, folder, NUM_NODES, flags)
    try:
        for number in range(NUM_NODES):
            node = f"node{number}"
            job.add(node, *([f"iter{HIT_STEP}:#4"] if node in scenario.kills else []))
        job.wait(lambda: len(job.events("agent_joined")) == NUM_NODES, JOB_SECONDS)
        for number in range(scenario.standbys):
            job.add(f"node{NUM_NODES + number}")
        log = job.finish(JOB_SECONDS)
    finally:
        job.kill()
        meter.close()
    return moves_of(log, meter, bytes_of_units(job.job_dir))


def bytes_of_units(job_dir: Path) -> Mapping[int, int]:
    """By unit what its state takes, as holders have written it."""
    files = open_run(job_dir).files
    found: defaultdict[int, int] = defaultdict(int)
    names = {name: file for file in files for name in file.names}
    order = unit_names(len({name.split("/")[0] for name in names}))
    for name, file in names.items():
        found[order.index(name.split("/")[0])] += file.tensor(name).nbytes
    return found


def moves_of(log: Log, meter: Meter, unit_bytes: Mapping[int, int]) -> list[Moved]:
    """What each change has moved that left no stage without a node of its own."""
    steps = {step.number: step for step in steps_of(log)}
    usual = _usual_bytes(list(steps.values()), meter)
    plans = {event["epoch"]: event for event in log.of("plan") if "pipelines" in event}
    arranged = plans[min(plans)]["pipelines"]
    found = []
    for event in sorted((*plans.values(), *log.of("changed")), key=lambda e: float(e["time"])):
        before, arranged = arranged, event["pipelines"]
        if event["event"] != "changed" or event["step"] not in steps:
            continue
        step, needed = steps[event["step"]], places_needed(arranged)
        # A pipeline that begins with the plan has nothing yet.
        held = held_by([pipe for pipe in before if pipe["shape"]["num_microbatches"]])
        nodes = sorted({node for several in arranged for node in several["stages"]})
        after = steps.get(step.number + 1)
        if len(nodes) < len(needed) or after is None or after.arranged not in usual:
            continue
        counted = meter.between(step.end - step.seconds, step.end) - usual[after.arranged]
        fetches = [event for event in log.of("fetch") if event["step"] == step.number]
        # Parameters and two moments, each as large as the gradient.
        gradients = sum(event["bytes"] // 3 for event in fetches if "unit" in event)
        logged = sum(event["bytes"] for event in fetches)
        least = least_bytes(needed, nodes[:MOST_NODES], held, unit_bytes)
        if least:
            reason = plans[event["epoch"]]["reason"]
            found.append(Moved(reason, round(counted), gradients, logged, least))
    return found


def _usual_bytes(steps: Sequence[Step], meter: Meter) -> Mapping[str, float]:
    found: defaultdict[str, list[int]] = defaultdict(list)
    for step in calm(steps):
        found[step.arranged].append(meter.between(step.end - step.seconds, step.end))
    return {arranged: median(counts) for arranged, counts in found.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=4.0, help="of an iteration (4)")
    args = parser.parse_args(argv)
    if not enter_own_network():
        sys.stdout.write("skipped: only root may make a network for the job alone\n")
        return 0
    context, found = job_context(), []
    for scenario in SCENARIOS:
        with tempfile.TemporaryDirectory(prefix="moved-state-") as name:
            found += run(context, Path(name), scenario, args.seconds)
    sys.stdout.write(table(HEADS, (moved.cells() for moved in found)))
    return int(not found or any(moved.ratio > MOST for moved in found))


if __name__ == "__main__":
    sys.exit(main())
