"""A node dies while gradients are reduced, replicas refreshed, or the step committed or applied."""

from dataclasses import replace

import pytest
from in_ci import several_in_ci
from moments import FATAL_STEP, MODES
from scenario_runner import ScenarioRunner
from tiny_gpt import Shape

from megatron_bamboo.observe.compare import compare_runs, format_comparison
from megatron_bamboo.schedule.actions import Action, Op

pytestmark = pytest.mark.multiprocess

NUM_STAGES = 3


def tail_actions() -> list[tuple[int, Action]]:
    """The tail of each stage's node."""
    found = []
    for stage in range(NUM_STAGES):
        ties = [(stage, Op.SEND_TIE), (stage, Op.TIE)] if stage in (0, NUM_STAGES - 1) else []
        refreshes = [(stage, Op.SEND_REFRESH), ((stage + 1) % NUM_STAGES, Op.RECV_REFRESH)]
        ends = [(stage, Op.COMMIT), (stage, Op.STEP)]
        for number, op in ((stage, Op.REDUCE), *ties, *refreshes, *ends):
            found.append((stage, Action(number, None, op, None)))
    return found


LATE = Shape(2, 2, 2, num_steps=6, variant="late", tensor_size=2, num_layers=4)
CASES = [
    (stage, action, MODES[number % 2], number % 3 + 1)
    for number, (stage, action) in enumerate(tail_actions())
]


@pytest.mark.parametrize(
    ("stage", "action", "redundancy", "num_pipelines"),
    several_in_ci(CASES, *CASES[::3]),
    ids=str,
)
def test_a_loss_in_the_tail_changes_no_bit(
    scenarios: ScenarioRunner, stage: int, action: Action, redundancy: str, num_pipelines: int
) -> None:
    shape = Shape(NUM_STAGES, num_pipelines)
    victim = shape.node(num_pipelines - 1, stage)
    injection = f"{victim}@iter{FATAL_STEP}:{action}"
    assert scenarios.survive(shape, redundancy, [victim], injection) == []


@pytest.mark.slow
def test_workers_of_a_node_that_find_a_loss_in_different_units_go_on_together(
    scenarios: ScenarioRunner,
) -> None:
    job = scenarios.run(LATE, "lazy")
    assert job.result.status == 0, job.result.message
    assert [node for node, _ in job.result.lost] == ["node2"], job.result.lost
    whole = scenarios.undisturbed(replace(LATE, variant="sequence-parallel-alone"))
    comparison = compare_runs(whole, job.job_dir)
    assert comparison.equal, format_comparison(comparison)
