from collections import Counter
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from megatron_bamboo.schedule.actions import Action, Op
from megatron_bamboo.schedule.costs import Costs
from megatron_bamboo.schedule.generate import compute_schedule
from megatron_bamboo.schedule.lower import lower
from megatron_bamboo.schedule.mirrors import covered_by
from megatron_bamboo.schedule.redundancy import Redundancy, add_redundancy
from megatron_bamboo.schedule.rehearse import Rehearsal, loss_at, rehearse
from megatron_bamboo.schedule.schedule import Schedule
from megatron_bamboo.schedule.simulate import simulate
from megatron_bamboo.schedule.takeover import surviving_progress
from megatron_bamboo.schedule.validate import validate

MODES = [Redundancy.LAZY, Redundancy.BUBBLE, Redundancy.EAGER]


@dataclass(frozen=True)
class Case:
    num_stages: int
    num_chunks: int
    num_microbatches: int
    mode: Redundancy
    costs: Costs
    num_mirrors: int
    victim: int
    part: float

    def schedule(self) -> Schedule:
        compute = compute_schedule(self.num_stages, self.num_chunks, self.num_microbatches)
        return lower(add_redundancy(compute, self.mode, self.costs, self.num_mirrors))

    def rehearsal(self) -> Rehearsal:
        schedule = self.schedule()
        timeline = simulate(schedule, self.costs)
        loss = loss_at(timeline, self.victim, self.part * timeline.makespan)
        return rehearse(schedule, self.costs, loss)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num_stages, num_chunks = draw(st.integers(2, 6)), draw(st.integers(1, 3))
    by_stage = st.tuples(*[st.tuples(*[st.floats(0.1, 10)] * num_chunks)] * num_stages)
    return Case(
        num_stages,
        num_chunks,
        draw(st.integers(1, 8)),
        draw(st.sampled_from(MODES)),
        Costs(draw(by_stage), draw(by_stage), draw(st.floats(0, 3))),
        draw(st.integers(0, 4)),
        draw(st.integers(0, num_stages - 1)),
        draw(st.floats(0, 1)),
    )


def work_of_survivors(hit: Rehearsal) -> Counter[Action]:
    """What they ran in the whole iteration; redundant forwards of the lost stage are forwards."""
    ran: Counter[Action] = Counter()
    for timeline in (hit.before, hit.timeline):
        for rank, row in enumerate(timeline.rows):
            actions = [timed.action for timed in row if rank != hit.loss.rank]
            promoted = [a for a in actions if a.op is Op.RF and a.stage in hit.moved_stages]
            ran.update(action for action in actions if action.op in (Op.F, Op.B))
            ran.update(action.with_op(Op.F) for action in promoted)
    return ran


@given(cases())
def test_whatever_the_costs_and_the_moment_the_iteration_ends_with_each_work_done_once(
    case: Case,
) -> None:
    hit = case.rehearsal()
    known = surviving_progress(hit.schedule, case.victim, hit.progress)
    covered = covered_by(hit.mirrors)
    validate(hit.remaining, known.done | covered, known.received)
    expected = {
        Action(stage, chunk, op, microbatch)
        for stage in range(case.num_stages)
        for chunk in range(case.num_chunks)
        for op in (Op.F, Op.B)
        for microbatch in range(case.num_microbatches)
    }
    ran = work_of_survivors(hit)
    assert set(ran) | covered == expected
    assert set(ran.values()) == {1}
    assert all(action.op is Op.F for action in covered if action in ran)
    # And no sooner than the shadow has done its part, however that is ordered.
    assert hit.timeline.makespan >= hit.bound * (1 - 1e-9)
