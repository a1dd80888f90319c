"""Layers that sleep: a takeover changes no bit of what they compute, and each takes its time."""

import itertools
from collections import defaultdict

import pytest
from forked_jobs import FinishedJob
from scenario_runner import ScenarioRunner
from tiny_gpt import Shape

from megatron_bamboo.schedule.actions import COMPUTE_OPS, Action, Op

pytestmark = pytest.mark.multiprocess

PLAIN = Shape(3, 1, num_steps=4, variant="emulated")
SHARED = Shape(2, 1, num_steps=3, variant="emulated", tensor_size=2)
SECONDS = {Op.F: 0.004, Op.RF: 0.004, Op.B: 0.008}


@pytest.mark.parametrize(
    ("shape", "redundancy", "injection"),
    [
        (PLAIN, "eager", "node1@iter2:1.0B2"),
        (PLAIN, "bubble", "node2@iter2:2.0F3"),
        (SHARED, "lazy", "node0@iter2:0.0B1"),
    ],
    ids=str,
)
def test_a_loss_changes_no_bit(
    scenarios: ScenarioRunner, shape: Shape, redundancy: str, injection: str
) -> None:
    victim = injection.partition("@")[0]
    assert scenarios.survive(shape, redundancy, [victim], injection) == []


def computations(job: FinishedJob) -> dict[str, list[tuple[float, float, Action]]]:
    """By worker, when it computed what."""
    spans = defaultdict(list)
    for event in job.events("action"):
        if (action := Action.parse(event["action"])).op in COMPUTE_OPS:
            spans[event["source"]].append((event["start"], event["end"], action))
    return spans


def test_a_node_computes_one_thing_at_a_time_and_takes_the_time(scenarios: ScenarioRunner) -> None:
    by_node = computations(scenarios.run(PLAIN, "eager"))
    assert len(by_node) == PLAIN.num_nodes
    for spans in by_node.values():
        assert len(spans) == PLAIN.num_steps * PLAIN.num_microbatches * len(SECONDS)
        for start, end, action in spans:
            assert end - start >= SECONDS[action.op]
        for (_, end, _), (start, _, _) in itertools.pairwise(sorted(spans)):
            assert start >= end


def test_workers_of_a_node_take_turns_on_its_device(scenarios: ScenarioRunner) -> None:
    by_worker = computations(scenarios.run(SHARED, "lazy"))
    assert len(by_worker) == SHARED.num_nodes * SHARED.tensor_size
    for node in range(SHARED.num_nodes):
        both = [s for worker, spans in by_worker.items() if f"node{node}" in worker for s in spans]
        # Each worker's time on the device is its own: together they take the sum.
        busy = sum(SECONDS[action.op] for _, _, action in both)
        assert busy <= _covered([(start, end) for start, end, _ in both])


def _covered(spans: list[tuple[float, float]]) -> float:
    """How long at least one of the spans lasts."""
    total, until = 0.0, 0.0
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total
