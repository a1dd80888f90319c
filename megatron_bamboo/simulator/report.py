"""What came of a trace under several policies: as JSON for programs, and as lines and tables."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from megatron_bamboo.planner.infeasible import counted
from megatron_bamboo.recovery.decision import Action
from megatron_bamboo.recovery.names import PolicyName
from megatron_bamboo.recovery.prices import Prices
from megatron_bamboo.simulator.run import Outcome
from megatron_bamboo.simulator.timeline import Kind, totals
from megatron_bamboo.simulator.trace import HOUR, Trace

_COUNTED = (
    Action.TAKE_OVER,
    Action.HEAL,
    Action.REBALANCE,
    Action.RECONFIGURE,
    Action.RESTORE,
    Action.WAIT,
)


@dataclass(frozen=True, slots=True)
class Simulation:
    """What was played, and what came of it."""

    name: str
    """Of the trace."""
    start_hour: float
    trace: Trace
    prices: Prices
    fault_tolerance: int
    num_microbatches: int
    micro_batch_size: int
    outcomes: Mapping[PolicyName, Outcome]

    def samples(self, iterations: float) -> float:
        """So many iterations' samples."""
        return iterations * self.num_microbatches * self.micro_batch_size


def as_json(simulation: Simulation) -> dict[str, Any]:
    """All of it, in seconds and samples."""
    trace = simulation.trace
    return {
        "trace": {
            "name": simulation.name,
            "start_hour": simulation.start_hour,
            "seconds": trace.seconds,
            "added": trace.num_added,
            "removed": trace.num_removed,
            "nodes": list(trace.counts()),
        },
        "prices": asdict(simulation.prices),
        "fault_tolerance": simulation.fault_tolerance,
        "microbatches": simulation.num_microbatches,
        "micro_batch_size": simulation.micro_batch_size,
        "policies": {
            name.value: _outcome(simulation, outcome)
            for name, outcome in simulation.outcomes.items()
        },
    }


def _outcome(simulation: Simulation, outcome: Outcome) -> dict[str, Any]:
    samples = simulation.samples(outcome.iterations)
    return {
        "iterations": outcome.iterations,
        "samples": samples,
        "samples_lost": simulation.samples(outcome.lost_iterations),
        "samples_per_second": samples / simulation.trace.seconds,
        "seconds": {kind.value: time for kind, time in totals(outcome.pieces).items()},
        "decisions": [
            {
                "seconds": decided.seconds,
                "event": str(decided.event),
                "action": decided.action.value,
                "reason": decided.reason.words,
                "numbers": dict(decided.reason.numbers),
            }
            for decided in outcome.decisions
        ],
        "pieces": [asdict(piece) for piece in outcome.pieces],
    }


def head(simulation: Simulation) -> Iterator[str]:
    """What was played, in a few lines."""
    trace, prices = simulation.trace, simulation.prices
    numbers = [number for _, number in trace.counts()]
    first, last = simulation.start_hour, simulation.start_hour + trace.seconds / HOUR
    yield (
        f"{simulation.name}, hours {first:.6g} to {last:.6g}: "
        f"{counted(trace.num_removed, 'node')} removed, {trace.num_added} added, "
        f"{min(numbers)} to {max(numbers)} at a time, {trace.node_seconds / trace.seconds:.2f} in "
        "the mean"
    )
    yield (
        f"{counted(simulation.num_microbatches, 'microbatch')} of "
        f"{counted(simulation.micro_batch_size, 'sample')} an iteration, fault tolerance "
        f"{simulation.fault_tolerance}, links of {prices.bandwidth / 1e6:.6g} MB/s"
    )
    yield (
        f"seconds assumed: takeover {prices.takeover_seconds:.6g}, switch "
        f"{prices.switch_seconds:.6g}, reconfiguration {prices.reconfigure_seconds:.6g}, start of "
        f"a node {prices.start_seconds:.6g}, restore {prices.restore_seconds:.6g}, checkpoint "
        f"{prices.save_seconds:.6g} every {counted(prices.save_interval, 'iteration')}"
    )


def work_table(simulation: Simulation) -> Table:
    """What each policy has got done, and what was in vain."""
    table = _table(
        "Work", ["iterations", "samples/s", "samples lost", *(a.value for a in _COUNTED)]
    )
    for name, outcome in simulation.outcomes.items():
        samples = simulation.samples(outcome.iterations)
        made = Counter(decided.action for decided in outcome.decisions)
        table.add_row(
            name.value,
            f"{outcome.iterations:,}",
            f"{samples / simulation.trace.seconds:.2f}",
            f"{simulation.samples(outcome.lost_iterations):,.0f}",
            *(str(made[action]) for action in _COUNTED),
        )
    return table


def time_table(simulation: Simulation) -> Table:
    """What the time went into."""
    table = _table("Time (h:mm:ss)", [kind.value for kind in Kind])
    for name, outcome in simulation.outcomes.items():
        table.add_row(name.value, *map(_clock, totals(outcome.pieces).values()))
    return table


def _clock(seconds: float) -> str:
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


def _table(title: str, heads: list[str]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    table.add_column("policy")
    for name in heads:
        table.add_column(name, justify="right")
    return table
