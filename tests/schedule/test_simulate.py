from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_bamboo.schedule.actions import Action
from megatron_bamboo.schedule.costs import Costs
from megatron_bamboo.schedule.lower import lower
from megatron_bamboo.schedule.one_f_one_b import one_f_one_b
from megatron_bamboo.schedule.redundancy import Redundancy, add_redundancy
from megatron_bamboo.schedule.rehearse import loss_at, loss_before, rehearse
from megatron_bamboo.schedule.schedule import Schedule
from megatron_bamboo.schedule.simulate import simulate
from megatron_bamboo.schedule.tail import add_tail

COSTS = Costs(forward=1.0, backward=2.0)

# By mode and victim: what the hit iteration takes longer, for a loss at a quarter, half, three
# quarters and all of it. From an independent simulation of 8 stages and 16 microbatches.
STRETCHES = {
    ("eager", 0): (0.212, 0.212, 0.212, 0.376),
    ("eager", 3): (0.259, 0.259, 0.282, 0.376),
    ("eager", 7): (0.353, 0.353, 0.353, 0.376),
    ("bubble", 0): (0.391, 0.391, 0.391, 0.464),
    # The first is .525 where a worker sends again at once, in the middle of a backward.
    ("bubble", 3): (0.551, 0.536, 0.536, 0.478),
    ("bubble", 7): (0.652, 0.652, 0.652, 0.478),
    ("lazy", 0): (0.493, 0.493, 0.493, 0.696),
    ("lazy", 3): (0.612, 0.623, 0.638, 0.696),
    ("lazy", 7): (0.681, 0.681, 0.681, 0.696),
}

# The same by the shadow's work alone.
BOUNDS = {
    ("eager", 0): (0.212, 0.212, 0.212, 0.376),
    ("eager", 3): (0.212, 0.206, 0.235, 0.376),
    ("eager", 7): (0.212, 0.206, 0.212, 0.376),
    ("bubble", 0): (0.391, 0.391, 0.391, 0.464),
    ("bubble", 3): (0.467, 0.478, 0.478, 0.478),
    ("bubble", 7): (0.478, 0.478, 0.478, 0.478),
    ("lazy", 0): (0.493, 0.493, 0.493, 0.696),
    ("lazy", 3): (0.554, 0.565, 0.580, 0.696),
    ("lazy", 7): (0.507, 0.507, 0.507, 0.696),
}


def pipeline(num_stages: int, num_microbatches: int, mode: str) -> Schedule:
    return lower(add_redundancy(one_f_one_b(num_stages, num_microbatches), Redundancy(mode)))


@pytest.mark.parametrize(
    ("mode", "makespan"), [("none", 69), ("lazy", 69), ("bubble", 69), ("eager", 85)]
)
def test_known_makespans(mode: str, makespan: float) -> None:
    schedule = pipeline(8, 16, mode)
    assert simulate(schedule, COSTS).makespan == makespan
    assert simulate(add_tail(schedule, tied=True), COSTS).makespan == makespan


@given(st.integers(1, 8), st.integers(1, 12))
def test_equal_stages_take_the_textbook_time(num_stages: int, num_microbatches: int) -> None:
    timeline = simulate(lower(one_f_one_b(num_stages, num_microbatches)), COSTS)
    assert timeline.makespan == 3 * (num_microbatches + num_stages - 1)
    for rank in range(num_stages):
        assert timeline.busy(rank) == 3 * num_microbatches
        assert timeline.idle(rank) == 3 * (num_stages - 1)


def test_costs_of_their_own_for_each_stage() -> None:
    costs = Costs(forward=(1.0, 5.0), backward=(2.0, 7.0))
    assert simulate(lower(one_f_one_b(2, 1)), costs).makespan == 1 + 5 + 7 + 2


def test_each_message_takes_the_latency() -> None:
    costs = Costs(latency=0.25)
    assert simulate(lower(one_f_one_b(3, 1)), costs).makespan == 9 + 4 * 0.25
    assert simulate(lower(one_f_one_b(1, 1)), costs).makespan == 3


@pytest.mark.parametrize(("mode", "victim"), STRETCHES)
def test_takeovers_stretch_the_iteration_as_little_as_known(mode: str, victim: int) -> None:
    schedule = pipeline(8, 16, mode)
    timeline = simulate(schedule, COSTS)
    known = zip((0.25, 0.5, 0.75, 1.0), STRETCHES[mode, victim], BOUNDS[mode, victim], strict=True)
    for part, stretch, bound in known:
        hit = rehearse(schedule, COSTS, loss_at(timeline, victim, part * timeline.makespan))
        assert hit.timeline.makespan / timeline.makespan - 1 <= stretch + 0.001
        # The shadow finishes what it is in, which the known bound does not count.
        assert bound - 0.001 <= hit.bound / timeline.makespan - 1 <= bound + 0.007


def test_every_action_can_be_lost_before() -> None:
    schedule = pipeline(3, 3, "eager")
    timeline = simulate(schedule, COSTS)
    for rank, program in enumerate(schedule.programs):
        for place, action in enumerate(program):
            loss = loss_before(timeline, action)
            assert (loss.rank, loss.num_done) == (rank, place)
            hit = rehearse(schedule, COSTS, loss)
            assert hit.moved_stages == (rank,)
            assert hit.timeline.makespan >= loss.time


def test_nothing_of_the_victim_is_known_at_the_moment_of_its_loss() -> None:
    schedule = pipeline(3, 3, "lazy")
    timeline = simulate(schedule, COSTS)
    before_send = rehearse(schedule, COSTS, loss_before(timeline, Action.parse("1.0SEND_F0")))
    assert set(before_send.progress) == {0, 2}
    assert before_send.progress[2].received == frozenset()
    after_send = rehearse(schedule, COSTS, loss_before(timeline, Action.parse("1.0RECV_F1")))
    assert after_send.progress[2].received == {Action.parse("2.0RECV_F0")}


def test_a_late_loss_of_the_first_stage_is_not_redone_before_what_others_wait_for() -> None:
    """Its backwards are nobody's input, so they fill the shadow's gaps."""
    for mode, part in product(("lazy", "eager"), (0.25, 0.5, 0.75)):
        schedule = pipeline(4, 16, mode)
        timeline = simulate(schedule, COSTS)
        hit = rehearse(schedule, COSTS, loss_at(timeline, 0, part * timeline.makespan))
        shadow = hit.timeline.rows[3]
        gaps = sum(b.start - a.end for a, b in pairwise(shadow))
        assert gaps <= 3
