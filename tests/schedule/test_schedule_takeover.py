from dataclasses import dataclass, replace
from itertools import product
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from symbolic_run import SymbolicRun

from megatron_bamboo.schedule.actions import Action, Op
from megatron_bamboo.schedule.generate import compute_schedule
from megatron_bamboo.schedule.lower import lower
from megatron_bamboo.schedule.mirrors import covered_by
from megatron_bamboo.schedule.redundancy import Redundancy, add_redundancy, shadows_of
from megatron_bamboo.schedule.schedule import Schedule
from megatron_bamboo.schedule.tail import add_tail
from megatron_bamboo.schedule.takeover import (
    Progress,
    mirrors_used,
    surviving_progress,
    take_over,
)
from megatron_bamboo.schedule.validate import validate

MODES = [Redundancy.LAZY, Redundancy.BUBBLE, Redundancy.EAGER]


def protected(
    num_stages: int, num_chunks: int, num_microbatches: int, mode: Redundancy, num_mirrors: int = 0
) -> Schedule:
    compute = compute_schedule(num_stages, num_chunks, num_microbatches)
    return lower(add_redundancy(compute, mode, num_mirrors=num_mirrors))


@dataclass(frozen=True)
class Case:
    num_stages: int
    num_chunks: int
    num_microbatches: int
    mode: Redundancy
    num_mirrors: int
    max_deferred: int
    victim: int
    num_events: int
    seed: int

    def schedule(self) -> Schedule:
        sizes = (self.num_stages, self.num_chunks, self.num_microbatches)
        made = protected(*sizes, self.mode, self.num_mirrors)
        return replace(made, max_deferred=self.max_deferred)


@st.composite
def cases(draw: st.DrawFn, min_stages: int = 2) -> Case:
    num_stages = draw(st.integers(min_stages, 7))
    num_chunks = draw(st.integers(1, 3))
    num_microbatches = draw(st.integers(1, 9))
    return Case(
        num_stages,
        num_chunks,
        num_microbatches,
        draw(st.sampled_from(MODES)),
        draw(st.integers(0, 5)),
        draw(st.integers(0, 9)),
        draw(st.integers(0, num_stages - 1)),
        draw(st.integers(0, num_events_of(num_stages, num_chunks, num_microbatches))),
        draw(st.integers(0, 2**16)),
    )


def num_events_of(num_stages: int, num_chunks: int, num_microbatches: int) -> int:
    """About ten events for each stage, chunk and microbatch complete the iteration."""
    return 11 * num_stages * num_chunks * num_microbatches


def survivors_of(run: SymbolicRun, victim: int) -> list[int]:
    return [rank for rank in run.schedule.live_ranks if rank != victim]


def take_over_exactly(run: SymbolicRun, victim: int) -> None:
    """All survivors know each other's progress; what they get is valid and goes into force."""
    progress = {rank: run.progress(rank) for rank in survivors_of(run, victim)}
    remaining = take_over(run.schedule, victim, progress)
    known = surviving_progress(run.schedule, victim, progress)
    covered = covered_by(mirrors_used(run.schedule, victim, progress))
    validate(add_tail(remaining, tied=True), known.done | covered, known.received)
    expected = {
        (stage, chunk): first_left(run, stage, chunk)
        for stage in run.schedule.stages_of(victim)
        for chunk in range(run.schedule.num_chunks)
    }
    run.lose(victim)
    run.go_on(victim, dict.fromkeys(progress, remaining))
    assert expected == {place: run.first_backward(*place) for place in expected}


def first_left(run: SymbolicRun, stage: int, chunk: int) -> int:
    """The microbatch behind the newest mirror that a shadow has, with all that it stands for."""
    shadow = run.schedule.replicas[stage]
    assert shadow is not None
    inbox = run.inbox[shadow]
    gradients = [
        run.schedule.upstream(Action(stage, chunk, Op.B, m), Op.RECV_B)
        for m in range(run.schedule.num_microbatches)
    ]
    held = [a.microbatch or 0 for a in run.mirrors[shadow] if (a.stage, a.chunk) == (stage, chunk)]
    usable = [m for m in held if all(g is None or g in inbox for g in gradients[: m + 1])]
    return max(usable, default=-1) + 1


def assert_all_gradients(run: SymbolicRun) -> None:
    everything = list(range(run.schedule.num_microbatches))
    for stage, rank in enumerate(run.schedule.placement):
        for chunk in range(run.schedule.num_chunks):
            assert run.gradients[rank][stage, chunk] == everything, f"{stage}.{chunk} on {rank}"
    assert run.most_waiting <= run.schedule.max_deferred


def assert_only_redone(run: SymbolicRun, lost: set[int]) -> None:
    """Survivors ran nothing twice, and for a lost stage each piece of work once."""
    ran_by_live: dict[Action, int] = {}
    for (rank, action), times in run.ran.items():
        if rank in run.schedule.live_ranks:
            is_promoted = action.op is Op.RF and run.schedule.placement[action.stage] == rank
            counted = action.with_op(Op.F) if is_promoted else action
            ran_by_live[counted] = ran_by_live.get(counted, 0) + times
    assert set(ran_by_live.values()) <= {1}, "something ran twice"
    again = {action for action in run.covered if action in ran_by_live}
    assert all(action.op is Op.F for action in again), "a mirror holds what ran"
    shape = (run.schedule.num_chunks, run.schedule.num_microbatches)
    for stage, (chunk, microbatch) in product(lost, product(*map(range, shape))):
        for op in (Op.F, Op.B):
            action = Action(stage, chunk, op, microbatch)
            assert action in ran_by_live or action in run.covered


@given(cases())
def test_any_loss_is_taken_over_and_only_what_the_victim_had_is_redone(case: Case) -> None:
    run = SymbolicRun(case.schedule(), Random(case.seed))
    run.run(case.num_events)
    take_over_exactly(run, case.victim)
    run.run_to_end()
    assert_all_gradients(run)
    assert_only_redone(run, {case.victim})


@given(cases(), st.randoms(use_true_random=False))
def test_views_of_others_that_are_too_old_still_fit_together(case: Case, ages: Random) -> None:
    run = SymbolicRun(replace(case, num_mirrors=0).schedule(), Random(case.seed))
    run.run(case.num_events)
    survivors = survivors_of(run, case.victim)
    views = {}
    for asking in survivors:
        progress = {rank: ages.choice(run.history[rank]) for rank in survivors}
        progress[asking] = run.progress(asking)
        views[asking] = take_over(run.schedule, case.victim, progress)
    run.lose(case.victim)
    run.go_on(case.victim, views)
    run.run_to_end()
    assert_all_gradients(run)
    assert_only_redone(run, {case.victim})


@given(cases(), st.integers(0, 60))
def test_what_is_done_after_progress_was_published_is_not_done_again(
    case: Case, num_more: int
) -> None:
    """Nothing comes from the victim any more, but its survivors work on until they take over."""
    run = SymbolicRun(case.schedule(), Random(case.seed))
    run.run(case.num_events)
    published = {rank: run.progress(rank) for rank in survivors_of(run, case.victim)}
    run.lose(case.victim)
    run.run(num_more)
    remaining = take_over(run.schedule, case.victim, published)
    run.go_on(case.victim, dict.fromkeys(published, remaining))
    run.run_to_end()
    assert_all_gradients(run)
    assert_only_redone(run, {case.victim})


def test_what_is_next_in_the_sum_anyway_is_not_put_apart() -> None:
    """Others wait for all backwards of a stage that had done none: one may be early, two not."""
    case = Case(4, 2, 7, Redundancy.LAZY, 0, 1, 0, 0, 0)
    run = SymbolicRun(case.schedule(), Random(case.seed))
    take_over_exactly(run, case.victim)


@given(cases(min_stages=4), st.data())
def test_a_second_loss_elsewhere_in_the_same_iteration(case: Case, data: st.DataObject) -> None:
    run = SymbolicRun(case.schedule(), Random(case.seed))
    run.run(case.num_events)
    take_over_exactly(run, case.victim)
    shape = (case.num_stages, case.num_chunks, case.num_microbatches)
    run.run(data.draw(st.integers(0, num_events_of(*shape))))
    second = data.draw(st.sampled_from(run.schedule.live_ranks))
    if any(run.schedule.replicas[stage] is None for stage in run.schedule.stages_of(second)):
        with pytest.raises(ValueError, match="has no live replica"):
            take_over(run.schedule, second, {})
        return
    take_over_exactly(run, second)
    run.run_to_end()
    assert_all_gradients(run)
    assert_only_redone(run, {case.victim, second})


@given(cases(min_stages=4), st.data())
def test_a_loss_in_an_iteration_that_began_degraded(case: Case, data: st.DataObject) -> None:
    degraded = take_over(case.schedule(), case.victim, {})
    protected = [
        rank
        for rank in degraded.live_ranks
        if all(degraded.replicas[stage] is not None for stage in degraded.stages_of(rank))
    ]
    run = SymbolicRun(degraded, Random(case.seed))
    run.run(case.num_events)
    second = data.draw(st.sampled_from(protected))
    take_over_exactly(run, second)
    run.run_to_end()
    assert_all_gradients(run)
    assert_only_redone(run, {second})


@settings(max_examples=30)
@given(cases())
def test_without_progress_it_is_the_schedule_of_the_following_iterations(case: Case) -> None:
    degraded = take_over(case.schedule(), case.victim, {})
    validate(add_tail(degraded, tied=True))
    assert take_over(case.schedule(), case.victim, {case.victim: Progress()}) == degraded
    assert degraded.programs[case.victim] == ()
    assert degraded.placement[case.victim] == shadows_of(range(case.num_stages))[case.victim]


def test_two_stages_end_up_on_one_worker_without_messages() -> None:
    for victim, num_chunks in product((0, 1), (1, 2)):
        schedule = protected(2, num_chunks, 3, Redundancy.EAGER)
        remaining = take_over(schedule, victim, {})
        assert {a.op for program in remaining.programs for a in program} == {Op.F, Op.B}
        assert remaining.placement == (1 - victim, 1 - victim)
        assert remaining.replicas == (None, None)


def test_a_lost_neighbour_of_a_loss_is_named() -> None:
    schedule = protected(4, 1, 4, Redundancy.LAZY)
    degraded = take_over(schedule, 2, {})
    with pytest.raises(ValueError, match="stage 3 has no live replica: rank 3 alone had it"):
        take_over(degraded, 3, {})
    with pytest.raises(ValueError, match="stage 2 has no live replica: rank 1 alone had it"):
        take_over(degraded, 1, {})
    with pytest.raises(ValueError, match="rank 2 runs no stage"):
        take_over(degraded, 2, {})


def test_sends_to_the_victim_are_forgotten_and_no_others() -> None:
    schedule = protected(4, 1, 4, Redundancy.LAZY)
    texts = ["1.0F0", "1.0SEND_F0", "1.0B0", "1.0SEND_B0"]
    made = Progress(done=frozenset(map(Action.parse, texts)))
    kept = surviving_progress(schedule, 2, {1: made})
    assert made.done - kept.done == {Action.parse("1.0SEND_F0")}
