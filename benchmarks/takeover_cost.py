"""What a takeover costs a training on emulated layers: its pause, and a stretched iteration.

A node of an eight-stage pipeline is killed at 25, 50, 75 and 100 % of an iteration of some seven
seconds: that of the first, a middle and the last stage, in each mode of redundancy. Everything is
the product's own path but the layers, which sleep.

    python benchmarks/takeover_cost.py --quick        # some ten minutes
    python benchmarks/takeover_cost.py --repeat 3     # 108 kills, some fifty minutes

*Pause*: from just before the SIGKILL until the shadow begins its first forward or backward of the
victim's stage, in undisturbed iterations of the same mode, without *wait*: what the computation
took that the shadow was in, which it ends first. *Stretch*: what the hit iteration takes more than
an undisturbed one. *Bound*: the stretch by the shadow's work alone (``shadow_bound.py``).
*Excess*: stretch - bound - pause. *Simulated*: the stretch that the simulator plays without any
pause, by the order in which the product does things; *least*: that of the best order there is,
backwards being whole. 100 % is the middle of the first stage's last
backward, with which the iteration ends: then the commit comes. Kills after that are made again.

With ``--signal STOP`` the node hangs instead: its lease (5 s) is part of the pause.

Results are kept by kill and by the code they were had with, so that a run that was ended goes on.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from multiprocessing.context import ForkServerContext
from pathlib import Path
from statistics import median

from made_up_text import prepare_data
from shadow_bound import last_ends_at, shadow_ends_at
from tables import table
from timed_jobs import Emulation, Log, TimedJob, job_context

from megatron_bamboo.agent.job import COORDINATOR
from megatron_bamboo.rehearsal.results import code_digest
from megatron_bamboo.schedule.actions import COMPUTE_OPS, Op
from megatron_bamboo.schedule.generate import compute_schedule
from megatron_bamboo.schedule.lower import lower
from megatron_bamboo.schedule.redundancy import Redundancy, add_redundancy
from megatron_bamboo.schedule.rehearse import loss_at, rehearse
from megatron_bamboo.schedule.simulate import simulate

ROOT = Path(__file__).parents[1]
MODES = (Redundancy.EAGER, Redundancy.LAZY, Redundancy.BUBBLE)
MOMENTS = (0.25, 0.5, 0.75, 1.0)
PAPERS_PAUSES = {0.25: 0.175, 0.5: 0.272, 0.75: 0.355, 1.0: 0.487}
HIT_STEP = 2
UNDISTURBED_STEPS = 3
TRIES = 4
START_SECONDS = 120.0
POLL_SECONDS = 0.01
AIM = 0.05
HEADS = (
    *("redundancy", "stage lost", "at", "kills", "pause", "longest", "paper's", "wait"),
    *("stretch", "bound", "excess", "simulated", "least"),
)
PARTS = ("kill to loss", "loss to plan", "plan to acting on it", "own work first", "the rest")


@dataclass(frozen=True, slots=True)
class Cell:
    """One kind of loss."""

    mode: Redundancy
    stage: int
    moment: float

    def __str__(self) -> str:
        return f"{self.mode} stage {self.stage} at {self.moment:.0%}"


@dataclass(frozen=True, slots=True)
class Undisturbed:
    """An iteration of a mode without a loss: when, from its start, compute ends, and all of it."""

    seconds: float
    compute_seconds: float


@dataclass(frozen=True, slots=True)
class Kill:
    """What one loss has cost, in seconds."""

    wait: float
    pause: float  # without the wait
    hit: float  # the iteration
    bound: float  # of it
    parts: tuple[float, ...]  # of pause and wait: see PARTS
    load: float  # of the machine when the job was over


class Missed(Exception):
    """The step had been applied when the kill came."""


class Results:
    """The results file: one JSON line a kill or undisturbed job."""

    def __init__(self, path: Path, key: str) -> None:
        self._path = path
        self._key = key
        path.parent.mkdir(parents=True, exist_ok=True)

    def add(self, name: str, values: object) -> None:
        """Append a result."""
        assert isinstance(values, Undisturbed | Kill)
        line = json.dumps({"key": self._key, "name": name, "values": asdict(values)})
        with self._path.open("a") as file:
            file.write(line + "\n")

    def read(self) -> Mapping[str, list[dict[str, object]]]:
        """All results of this key by name."""
        found: defaultdict[str, list[dict[str, object]]] = defaultdict(list)
        lines = self._path.read_text().splitlines() if self._path.is_file() else []
        for line in map(json.loads, lines):
            if line["key"] == self._key:
                found[line["name"]].append(line["values"])
        return found

    def kills(self, cell: Cell) -> list[Kill]:
        """Those of one kind."""
        return [Kill(**values) for values in self.read()[str(cell)]]  # type: ignore[arg-type]

    def undisturbed(self, mode: Redundancy) -> list[Undisturbed]:
        """The iterations of a mode."""
        return [Undisturbed(**values) for values in self.read()[mode]]  # type: ignore[arg-type]


class Benchmark:
    """Runs jobs one after the other."""

    def __init__(
        self,
        context: ForkServerContext,
        folder: Path,
        emulation: Emulation,
        results: Results,
        sign: signal.Signals,
        num_mirrors: int,
    ) -> None:
        self._context = context
        self._sign = sign
        self._num_mirrors = num_mirrors
        self._folder = folder
        self._emulation = emulation
        self._results = results
        self._data = prepare_data(folder)
        self._costs = folder / "costs.json"
        self._costs.write_text(emulation.costs.to_json())
        self._num_jobs = 0

    def run_undisturbed(self, mode: Redundancy) -> None:
        """Time the iterations of a mode."""
        log = self._start(mode, UNDISTURBED_STEPS).finish()
        ends = log.step_ends()
        for step, seconds in log.step_seconds().items():
            computed = [d.end for d in log.actions if d.step == step and d.action.op in COMPUTE_OPS]
            value = Undisturbed(seconds, max(computed) - ends[step - 1])
            self._results.add(mode, value)

    def run_kill(self, cell: Cell) -> None:
        """Lose a node once; again if the kill came too late."""
        for _ in range(TRIES):
            try:
                self._results.add(str(cell), self._lose(cell))
                return
            except Missed:
                _say(f"{cell}: the step had been applied; again")
        raise RuntimeError(f"{cell}: {TRIES} kills came too late")

    def _lose(self, cell: Cell) -> Kill:
        job = self._start(cell.mode, HIT_STEP)
        try:
            moment = self._await_moment(job, cell)
            groups = {e["node"]: e["pid"] for e in Log(job.job_dir).of("agent_joined")}
            group = groups[f"node{cell.stage}"]
            assert isinstance(group, int)
            time.sleep(max(0.0, moment - time.monotonic()))
            kill = time.monotonic()
            os.killpg(group, self._sign)
            log = job.finish()
        finally:
            job.kill()
        return self._cost_of(log, cell, kill)

    def _await_moment(self, job: TimedJob, cell: Cell) -> float:
        """Return shortly before a cell's moment, with its time."""
        # The first node has applied the step before.
        began = _await_action(job, f"{Op.STEP}", HIT_STEP - 1)
        if cell.moment < 1:
            undisturbed = self._results.undisturbed(cell.mode)
            return began + cell.moment * median(one.compute_seconds for one in undisturbed)
        received = f"{Op.RECV_B}{self._emulation.num_microbatches - 1}"
        last = _await_action(job, received, HIT_STEP)
        return last + self._seconds()[0, Op.B] / 2

    def _cost_of(self, log: Log, cell: Cell, kill: float) -> Kill:
        shadow_stage = (cell.stage - 1) % self._emulation.num_stages
        shadow = f"node{shadow_stage}"
        if not any(takeover["shadow"] == shadow for takeover in log.of("takeover")):
            raise Missed
        done = [d for d in log.actions if d.step == HIT_STEP and d.worker == shadow]
        work = [d for d in done if d.action.op in COMPUTE_OPS]
        begun = [d.end for d in work if d.start <= kill < d.end]
        wait = begun[0] - kill if begun else 0.0
        instead = [
            d.start
            for d in work
            if d.action.stage == cell.stage and d.action.op is not Op.RF and d.start > kill
        ]
        if not instead:
            raise Missed
        ends = log.step_ends()
        start, seconds = ends[HIT_STEP - 1], self._seconds()
        mirrored = [e["microbatch"] + 1 for e in log.of("mirror") if e["source"] == shadow]
        ends_at = shadow_ends_at(
            done,
            kill,
            shadow,
            shadow_stage,
            cell.stage,
            self._emulation.num_microbatches,
            seconds,
            max(mirrored, default=0),
        )
        return Kill(
            wait=wait,
            pause=min(instead) - kill - wait,
            hit=ends[HIT_STEP] - start,
            bound=ends_at - start,
            parts=_parts_of(log, shadow, kill, wait, min(instead)),
            load=os.getloadavg()[0],
        )

    def _seconds(self) -> Mapping[tuple[int, Op], float]:
        """What computations take by themselves."""
        costs = self._emulation.costs
        assert isinstance(costs.forward, tuple) and isinstance(costs.backward, tuple)
        pairs = enumerate(zip(costs.forward, costs.backward, strict=True))
        return {
            (stage, op): time
            for stage, times in pairs
            for op, time in zip((Op.F, Op.B), times, strict=True)
        }

    def _start(self, mode: Redundancy, num_steps: int) -> TimedJob:
        self._num_jobs += 1
        folder = self._folder / f"job{self._num_jobs}"
        folder.mkdir()
        flags = (
            *self._emulation.flags(),
            *self._data,
            *("--train-iters", str(num_steps), "--bamboo-redundancy", mode),
            *("--bamboo-costs", str(self._costs)) * (mode is Redundancy.BUBBLE),
            *("--bamboo-mirror-gradients", str(self._num_mirrors)) * (self._num_mirrors > 0),
        )
        return TimedJob(self._context, folder, self._emulation.num_stages, flags)


def _await_action(job: TimedJob, name: str, step: int) -> float:
    """Wait until the first node has run an action of a step; when it ended."""
    path, sign = job.job_dir / "events" / "node0.jsonl", f'{name}", "step": {step},'
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until and not job.has_ended():
        lines = path.read_text().splitlines() if path.is_file() else []
        found = [line for line in lines if sign in line]
        if found:
            return float(json.loads(found[0])["end"])
        time.sleep(POLL_SECONDS)
    job.finish()
    raise TimeoutError(f"{name} of step {step} did not come within {START_SECONDS:g} s")


def _parts_of(log: Log, shadow: str, kill: float, wait: float, instead: float) -> tuple[float, ...]:
    """Where the time between kill and work went."""
    (loss,) = log.of("loss")
    (plan,) = (e for e in log.of("plan") if e["epoch"] == 1 and e["source"] == COORDINATOR)
    (acted,) = (e for e in log.of("epoch") if e["source"] == shadow)
    could_act = max(plan["time"], kill + wait)
    own = sum(
        min(done.end, instead) - done.start
        for done in log.actions
        if done.worker == shadow
        and done.action.op in COMPUTE_OPS
        and acted["time"] <= done.start < instead
    )
    return (
        loss["time"] - kill,
        plan["time"] - loss["time"],
        acted["time"] - could_act,
        own,
        instead - acted["time"] - own,
    )


def simulated_stretches(emulation: Emulation, cell: Cell, num_mirrors: int) -> tuple[float, float]:
    """What the simulator says of a loss without pause, and the least that it could be."""
    costs = emulation.costs
    compute = compute_schedule(emulation.num_stages, 1, emulation.num_microbatches)
    schedule = lower(add_redundancy(compute, cell.mode, costs, num_mirrors))
    undisturbed = simulate(schedule, costs)
    loss = loss_at(undisturbed, cell.stage, cell.moment * undisturbed.makespan)
    hit = rehearse(schedule, costs, loss)
    least = max(last_ends_at(hit, costs), undisturbed.makespan)
    return hit.timeline.makespan / undisturbed.makespan - 1, least / undisturbed.makespan - 1


def cost_rows(
    cells: Iterable[Cell], results: Results, emulation: Emulation, num_mirrors: int
) -> Iterator[Sequence[str]]:
    """One row a cell: medians, in iterations."""
    for cell in cells:
        kills = results.kills(cell)
        if not kills:
            continue
        whole = median(one.seconds for one in results.undisturbed(cell.mode))
        pauses = [kill.pause / whole for kill in kills]
        stretches = [kill.hit / whole - 1 for kill in kills]
        bounds = [max(kill.bound / whole, 1.0) - 1 for kill in kills]
        excess = [s - b - p for s, b, p in zip(stretches, bounds, pauses, strict=True)]
        waits = [kill.wait / whole for kill in kills]
        numbers = (
            *(median(pauses), max(pauses), PAPERS_PAUSES[cell.moment], median(waits)),
            *(median(stretches), median(bounds), median(excess)),
            *simulated_stretches(emulation, cell, num_mirrors),
        )
        place = (cell.mode.value, str(cell.stage), f"{cell.moment:.0%}", str(len(kills)))
        yield (*place, *(f"{number:.3f}" for number in numbers))


def part_rows(cells: Iterable[Cell], results: Results) -> Iterator[Sequence[str]]:
    """By mode the medians of where the pause goes, in seconds."""
    for mode in MODES:
        kills = [kill for cell in cells if cell.mode is mode for kill in results.kills(cell)]
        if kills:
            parts = zip(*(kill.parts for kill in kills), strict=True)
            yield (mode.value, *(f"{median(part):.3f}" for part in parts))


def verdict(cells: Iterable[Cell], results: Results) -> str:
    """Over all kills: the median pause, and how many are short."""
    pauses = [
        kill.pause / median(one.seconds for one in results.undisturbed(cell.mode))
        for cell in cells
        for kill in results.kills(cell)
    ]
    short = sum(pause <= AIM for pause in pauses)
    loads = [kill.load for cell in cells for kill in results.kills(cell)]
    return (
        f"{len(pauses)} kills: median pause {median(pauses):.4f} iterations, at most {AIM:g} in "
        f"{short} ({short / len(pauses):.1%}); the machine's load was {min(loads):.1f} to "
        f"{max(loads):.1f} on {os.cpu_count()} processors"
    )


def undisturbed_line(results: Results) -> str:
    """What an iteration takes in each mode."""
    parts = []
    for mode in MODES:
        if found := results.undisturbed(mode):
            seconds = median(one.seconds for one in found)
            parts.append(f"{mode} {seconds:.3f} s ({len(found)} iterations)")
    return "Undisturbed, median: " + ", ".join(parts)


def cells_of(args: argparse.Namespace) -> list[Cell]:
    """What is to be lost: everything, or each stage and moment once in each mode."""
    stages = (0, (args.stages - 1) // 2, args.stages - 1)
    places: Iterable[tuple[int, float]] = product(stages, MOMENTS)
    if args.quick:
        places = ((stages[0], 0.5), (stages[1], 0.25), (stages[2], 0.75), (stages[1], 1.0))
    return [
        Cell(mode, *place)
        for mode, place in product(args.modes, places)
        if place[1] in args.moments
    ]


def measure(benchmark: Benchmark, cells: Sequence[Cell], results: Results, repeat: int) -> None:
    """Run what is not in the results yet; rounds, so that all cells meet the same machine."""
    for number in range(1, repeat + 1):
        for mode in dict.fromkeys(cell.mode for cell in cells):
            if len(results.undisturbed(mode)) < number * (UNDISTURBED_STEPS - 1):
                benchmark.run_undisturbed(mode)
        for place, cell in enumerate(cells, start=1):
            if len(results.kills(cell)) < number:
                benchmark.run_kill(cell)
                _say(f"round {number}, {place} of {len(cells)}: {cell}")


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what is not measured yet, and print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeat", type=int, default=1, metavar="N", help="kills of each kind (1)")
    parser.add_argument("--quick", action="store_true", help="12 kinds of loss instead of 36")
    modes = {"type": Redundancy, "choices": MODES, "default": MODES}
    parser.add_argument("--modes", nargs="+", help="only these", **modes)
    moments = {"type": float, "choices": MOMENTS, "default": MOMENTS}
    parser.add_argument("--moments", nargs="+", help="only at these", **moments)
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=7.0, help="of an iteration (7)")
    parser.add_argument(
        "--results", type=Path, default=ROOT / "runs" / "takeover-cost.jsonl", help="file"
    )
    parser.add_argument(
        "--signal", choices=("KILL", "STOP"), default="KILL", help="how nodes are lost (KILL)"
    )
    parser.add_argument(
        "--mirror-gradients", type=int, default=0, metavar="K", help="mirrors of a stage (0)"
    )
    args = parser.parse_args(argv)
    sign = signal.Signals[f"SIG{args.signal}"]
    emulation = Emulation.equal(args.stages, args.microbatches, args.layers, args.seconds)
    code = code_digest(Path(__file__).parent)
    results = Results(
        args.results,
        f"{code} {emulation} {sign.name} {args.mirror_gradients}",
    )
    cells = cells_of(args)
    with tempfile.TemporaryDirectory(prefix="takeover-cost-") as name:
        benchmark = Benchmark(
            job_context(), Path(name), emulation, results, sign, args.mirror_gradients
        )
        measure(benchmark, cells, results, args.repeat)
    sys.stdout.write(undisturbed_line(results) + "\n\n")
    sys.stdout.write(
        table(HEADS, cost_rows(cells, results, emulation, args.mirror_gradients)) + "\n"
    )
    sys.stdout.write("Where the pause goes, medians in seconds:\n\n")
    sys.stdout.write(table(("redundancy", *PARTS), part_rows(cells, results)) + "\n")
    sys.stdout.write(verdict(cells, results) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
