"""The bound by counting is that of the simulator, which plays the takeover's own order."""

import pytest
from shadow_bound import last_ends_at, shadow_ends_at
from timed_jobs import Done

from megatron_bamboo.schedule.actions import COMPUTE_OPS, Op
from megatron_bamboo.schedule.costs import EQUAL_COSTS, Costs
from megatron_bamboo.schedule.generate import compute_schedule
from megatron_bamboo.schedule.lower import lower
from megatron_bamboo.schedule.redundancy import Redundancy, add_redundancy
from megatron_bamboo.schedule.rehearse import loss_at, rehearse
from megatron_bamboo.schedule.simulate import simulate

STAGES, MICROBATCHES = 4, 6
ROUNDING = 1e-9
COSTS = Costs(forward=(1.0, 1.25, 1.5, 1.75), backward=(2.0, 2.25, 2.5, 2.75))


@pytest.mark.parametrize("mode", [Redundancy.EAGER, Redundancy.LAZY, Redundancy.BUBBLE])
@pytest.mark.parametrize("victim", range(STAGES))
@pytest.mark.parametrize("num_mirrors", [0, 3])
def test_the_bound_is_the_simulators(mode: Redundancy, victim: int, num_mirrors: int) -> None:
    compute = compute_schedule(STAGES, 1, MICROBATCHES)
    schedule = lower(add_redundancy(compute, mode, COSTS, num_mirrors))
    undisturbed = simulate(schedule, COSTS)
    shadow = (victim - 1) % STAGES
    done = [
        Done(timed.action, f"node{rank}", 1, 0, timed.start, timed.end)
        for rank, row in enumerate(undisturbed.rows)
        for timed in row
        if timed.action.op in COMPUTE_OPS
    ]
    assert isinstance(COSTS.forward, tuple) and isinstance(COSTS.backward, tuple)
    seconds: dict[tuple[int, Op], float] = {}
    for stage, (forward, backward) in enumerate(zip(COSTS.forward, COSTS.backward, strict=True)):
        seconds |= {(stage, Op.F): float(forward), (stage, Op.B): float(backward)}  # type: ignore[arg-type]
    for moment in range(1, 11):
        kill = undisturbed.makespan * (moment - 0.37) / 10
        hit = rehearse(schedule, COSTS, loss_at(undisturbed, victim, kill))
        mirrored = [mirror.microbatch + 1 for mirror in hit.mirrors]
        ours = shadow_ends_at(
            done, kill, f"node{shadow}", shadow, victim, MICROBATCHES, seconds, *mirrored
        )
        assert ours == pytest.approx(hit.bound), (moment, kill)
        least = last_ends_at(hit, COSTS)
        assert ours <= least + ROUNDING and least <= hit.timeline.makespan + ROUNDING


def test_what_comes_after_the_shadows_last_work_counts() -> None:
    """Nothing of stage 1 is done at the loss: stage 0 runs one more backward after its shadow."""
    compute = compute_schedule(3, 1, 1)
    schedule = lower(add_redundancy(compute, Redundancy.LAZY, EQUAL_COSTS))
    hit = rehearse(schedule, EQUAL_COSTS, loss_at(simulate(schedule, EQUAL_COSTS), 2, 1.5))
    # Stage 1 ends its forward at 2, then it has 1 + 2 of stage 2 and 2 of its own to do.
    assert (hit.bound, last_ends_at(hit, EQUAL_COSTS), hit.timeline.makespan) == (7, 9, 9)
