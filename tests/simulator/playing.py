"""Traces and jobs for tests of the simulator."""

from collections.abc import Iterator

from hypothesis import strategies as st

from megatron_bamboo.planner.layers import Unit, UnitBytes, UnitCosts
from megatron_bamboo.planner.propose import Planner
from megatron_bamboo.recovery.names import PolicyName
from megatron_bamboo.recovery.policy import Policy
from megatron_bamboo.recovery.prices import Prices
from megatron_bamboo.recovery.times import IterationTimes
from megatron_bamboo.simulator.run import Outcome, run_through
from megatron_bamboo.simulator.trace import Moment, Trace

COSTS = UnitCosts(tuple(Unit(f"unit{n}", 1.0, 2.0, UnitBytes(1_000, 1)) for n in range(6)))
TIMES = IterationTimes(COSTS)
PRICES = Prices(
    bandwidth=1_000.0,
    takeover_seconds=1.0,
    switch_seconds=0.5,
    reconfigure_seconds=2.0,
    start_seconds=30.0,
    restore_seconds=20.0,
    save_seconds=5.0,
    save_interval=4,
)


def play(trace: Trace, name: PolicyName, prices: Prices = PRICES, least_stages: int = 2) -> Outcome:
    """A model of six units, 8 microbatches and fault tolerance 1, under one policy."""
    policy = Policy(name, Planner(COSTS, least_stages), TIMES, prices, 8, 1)
    return run_through(trace, policy, TIMES, prices)


def nodes_of(number: int) -> tuple[str, ...]:
    """The names of so many nodes."""
    return tuple(f"node{n}" for n in range(number))


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Up to six nodes at the beginning, and up to twelve moments in 600 seconds."""
    present = nodes_of(draw(st.integers(0, 6)))
    times = draw(st.lists(st.integers(1, 599), unique=True, max_size=12).map(sorted))
    return Trace(present, tuple(_moments(draw, present, times)), 600.0)


def _moments(draw: st.DrawFn, present: tuple[str, ...], times: list[int]) -> Iterator[Moment]:
    alive = list(present)
    number = len(present)
    for time in times:
        gone = draw(st.sets(st.sampled_from(alive), max_size=3)) if alive else set()
        more = draw(st.integers(0 if gone else 1, 3))
        added = tuple(f"node{number + n}" for n in range(more))
        number += more
        alive = [node for node in alive if node not in gone] + list(added)
        yield Moment(float(time), added, tuple(sorted(gone)))
