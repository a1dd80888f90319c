"""A small model, its policies and views, for tests of decisions."""

from collections.abc import Sequence

from megatron_bamboo.planner.layers import Unit, UnitBytes, UnitCosts
from megatron_bamboo.planner.plan import Plan
from megatron_bamboo.planner.propose import Planner
from megatron_bamboo.recovery.names import PolicyName
from megatron_bamboo.recovery.policy import Policy
from megatron_bamboo.recovery.prices import Prices
from megatron_bamboo.recovery.times import IterationTimes
from megatron_bamboo.recovery.view import History, Joined, View

STATE_BYTES = 1_000
PRICES = Prices(bandwidth=1_000.0)
QUIET = History(0.0)
"""Nothing has happened since the job began."""


def costs_of(num_units: int) -> UnitCosts:
    """Units that are all alike: a forward of one second and a backward of two."""
    size = UnitBytes(STATE_BYTES, 1)
    return UnitCosts(tuple(Unit(f"unit{n}", 1.0, 2.0, size) for n in range(num_units)))


def policy_of(
    name: PolicyName,
    num_units: int = 24,
    num_microbatches: int = 24,
    prices: Prices = PRICES,
    fault_tolerance: int = 1,
    least_stages: int = 2,
) -> Policy:
    """A policy for such a model."""
    costs = costs_of(num_units)
    planner = Planner(costs, least_stages)
    times = IterationTimes(costs)
    return Policy(name, planner, times, prices, num_microbatches, fault_tolerance)


def nodes_of(number: int) -> tuple[str, ...]:
    """The names of so many nodes."""
    return tuple(f"node{n}" for n in range(number))


def started(policy: Policy, nodes: Sequence[str]) -> Plan:
    """The plan with which a job of these nodes begins."""
    view = View(None, QUIET, tuple(nodes))
    decision, _ = policy.decide(view, Joined(tuple(nodes)), 0.0)
    return Plan(0, decision.pipelines, lost=(), decision=None, reason="start")
