"""Where mirrors are placed, which of them a takeover uses, and what they spare."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_bamboo.schedule.actions import Action, Op
from megatron_bamboo.schedule.costs import EQUAL_COSTS
from megatron_bamboo.schedule.generate import compute_schedule
from megatron_bamboo.schedule.lower import lower
from megatron_bamboo.schedule.mirrors import covered_by, mirrored_microbatches
from megatron_bamboo.schedule.redundancy import Redundancy, add_redundancy
from megatron_bamboo.schedule.rehearse import loss_at, rehearse
from megatron_bamboo.schedule.schedule import Program, Schedule
from megatron_bamboo.schedule.simulate import simulate
from megatron_bamboo.schedule.tail import add_tail
from megatron_bamboo.schedule.takeover import Progress, mirrors_used, take_over
from megatron_bamboo.schedule.validate import ScheduleError, validate

MODES = [Redundancy.LAZY, Redundancy.BUBBLE, Redundancy.EAGER]


def mirrored(
    num_stages: int, num_chunks: int, num_microbatches: int, mode: Redundancy, num_mirrors: int
) -> Schedule:
    compute = compute_schedule(num_stages, num_chunks, num_microbatches)
    return lower(add_redundancy(compute, mode, num_mirrors=num_mirrors))


SMALL = mirrored(3, 1, 4, Redundancy.LAZY, 2)


def actions(text: str) -> Program:
    return tuple(map(Action.parse, text.split()))


@pytest.mark.parametrize(
    ("num_microbatches", "num_mirrors", "last"),
    [
        (16, 0, ()),
        (16, 1, (14,)),
        (16, 2, (7, 14)),
        (16, 8, (1, 3, 5, 7, 9, 11, 13, 14)),
        (4, 2, (1, 2)),
        (4, 3, (0, 1, 2)),
        (4, 99, (0, 1, 2)),
        (2, 5, (0,)),
        (1, 5, ()),
    ],
)
def test_the_mirrors_of_a_chunk(
    num_microbatches: int, num_mirrors: int, last: tuple[int, ...]
) -> None:
    assert mirrored_microbatches(num_microbatches, num_mirrors) == last


@given(st.integers(2, 200), st.integers(1, 40))
def test_they_are_spread_evenly_up_to_the_last_backward_but_one(
    num_microbatches: int, num_mirrors: int
) -> None:
    last = mirrored_microbatches(num_microbatches, num_mirrors)
    assert len(last) == min(num_mirrors, num_microbatches - 1)
    assert last[-1] == num_microbatches - 2
    gaps = {second - first for first, second in pairwise((-1, *last))}
    assert max(gaps) - min(gaps) <= 1


def test_a_mirror_leaves_after_the_gradient_and_is_let_in_where_that_arrives() -> None:
    texts = [" ".join(map(str, program)) for program in SMALL.programs]
    assert "1.0B1 1.0SEND_B1 1.0SEND_MIRROR1 1.0RECV_F3" in texts[1]
    assert "0.0RECV_B1 1.0RECV_MIRROR1 0.0B1 0.0SEND_MIRROR1" in texts[0]
    # Nothing comes from the first stage to the last one before.
    assert texts[2].startswith("0.0RECV_MIRROR1 0.0RECV_MIRROR2 2.0RECV_F0")


@given(
    st.integers(2, 6),
    st.integers(1, 3),
    st.integers(1, 9),
    st.sampled_from(MODES),
    st.integers(0, 9),
)
def test_mirrors_are_valid_cost_no_time_and_come_in_the_order_of_their_sending(
    num_stages: int, num_chunks: int, num_microbatches: int, mode: Redundancy, num_mirrors: int
) -> None:
    sizes = (num_stages, num_chunks, num_microbatches)
    schedule = mirrored(*sizes, mode, num_mirrors)
    validate(add_tail(schedule, tied=True))
    without = mirrored(*sizes, mode, 0)
    assert simulate(schedule, EQUAL_COSTS).makespan == simulate(without, EQUAL_COSTS).makespan, (
        "nobody waits for a mirror"
    )
    for stage, shadow in enumerate(schedule.replicas):
        assert shadow is not None
        sent = [
            schedule.receive_of(a)
            for a in schedule.programs[stage]
            if a.op in (Op.SEND_B, Op.SEND_MIRROR, Op.SEND_F)
        ]
        to_shadow = [receive for receive in sent if schedule.rank_of(receive) == shadow]
        taken = [a for a in schedule.programs[shadow] if a in set(to_shadow)]
        mirrors = [a for a in to_shadow if a.op is Op.RECV_MIRROR]
        assert [a for a in taken if a.op is Op.RECV_MIRROR] == mirrors
        for mirror in mirrors:
            before = set(to_shadow[: to_shadow.index(mirror)])
            assert before <= set(taken[: taken.index(mirror)]), f"{mirror} overtakes"
        assert len(mirrors) == num_chunks * min(num_mirrors, num_microbatches - 1)


@pytest.mark.parametrize(
    ("rank", "old", "new", "reason"),
    [
        (1, "1.0SEND_MIRROR1", "", "1.0SEND_MIRROR1 is missing"),
        (0, "1.0RECV_MIRROR1", "", "1.0RECV_MIRROR1 is missing"),
        (1, "1.0SEND_MIRROR1", "1.0SEND_MIRROR0", "1.0SEND_MIRROR0 is outside of the schedule"),
        (0, "1.0RECV_MIRROR1", "0.0RECV_MIRROR1", "0.0RECV_MIRROR1 belongs to rank 2"),
        (1, "1.0B1", "1.0SEND_MIRROR1 1.0B1", "1.0SEND_MIRROR1 comes where microbatch 1 is next"),
        (1, "1.0B2", "1.0B2 1.0SEND_MIRROR1", "1.0SEND_MIRROR1 comes where microbatch 3 is next"),
    ],
)
def test_mirrors_that_are_not_as_they_must_be_are_refused(
    rank: int, old: str, new: str, reason: str
) -> None:
    text = " ".join(map(str, SMALL.programs[rank])) + " "
    words = new.split()
    moved = [word for word in words if "SEND_MIRROR1" in word and f"{word} " in text]
    for word in moved if len(words) > 1 else []:
        text = text.replace(f"{word} ", "", 1)
    edited = actions(text.replace(f"{old} ", f"{new} ", 1))
    programs = (*SMALL.programs[:rank], edited, *SMALL.programs[rank + 1 :])
    with pytest.raises(ScheduleError) as raised:
        validate(replace(SMALL, programs=programs))
    assert reason in str(raised.value)


def progress_of(text: str, received: str = "") -> Progress:
    return Progress(frozenset(actions(text)), frozenset(actions(received)))


DONE_BY_LAST = "2.0F0 2.0B0 2.0F1 2.0B1 2.0F2 2.0B2"
GRADIENTS = "0.0RECV_B0 0.0RECV_B1"


@pytest.mark.parametrize(
    ("received", "done_by_last", "used"),
    [
        (f"{GRADIENTS} 1.0RECV_MIRROR1", DONE_BY_LAST, "1.0RECV_MIRROR1"),
        (
            f"{GRADIENTS} 0.0RECV_B2 1.0RECV_MIRROR1 1.0RECV_MIRROR2",
            DONE_BY_LAST,
            "1.0RECV_MIRROR2",
        ),
        # The gradient of microbatch 2 was lost on its way, so its backward has to run again.
        (f"{GRADIENTS} 1.0RECV_MIRROR1 1.0RECV_MIRROR2", DONE_BY_LAST, "1.0RECV_MIRROR1"),
        ("0.0RECV_B0 1.0RECV_MIRROR1", DONE_BY_LAST, ""),
        # What the last stage says is older than what it has done.
        (f"{GRADIENTS} 1.0RECV_MIRROR1", "2.0F0 2.0B0 2.0F1", ""),
        (GRADIENTS, DONE_BY_LAST, ""),
    ],
)
def test_a_mirror_counts_where_nobody_needs_what_else_it_stands_for(
    received: str, done_by_last: str, used: str
) -> None:
    """Rank 1 is lost; rank 0 is its shadow and has its gradients."""
    progress = {0: progress_of("0.0F0 0.0F1 0.0F2", received), 2: progress_of(done_by_last)}
    mirrors = mirrors_used(SMALL, 1, progress)
    assert " ".join(map(str, mirrors)) == used
    covered = covered_by(mirrors)
    remaining = {a for program in take_over(SMALL, 1, progress).programs for a in program}
    again = {a for a in remaining if a.stage == 1 and a.op in (Op.F, Op.B)}
    whole = {Action(1, 0, op, m) for op in (Op.F, Op.B) for m in range(4)}
    assert again == whole - covered


def test_what_a_mirror_covers_is_counted() -> None:
    assert covered_by(actions("1.0RECV_MIRROR1")) == set(actions("1.0F0 1.0B0 1.0F1 1.0B1"))


def test_a_mirror_that_is_due_leaves_before_the_sum_goes_on() -> None:
    """Rank 0 is lost as rank 2 has summed two gradients and not yet told rank 1, its shadow."""
    done = {
        1: progress_of("1.0F0 1.0F1 1.0F2 1.0B0"),
        2: progress_of("2.0F0 2.0B0 2.0SEND_B0 2.0F1 2.0B1 2.0SEND_B1"),
    }
    remaining = take_over(SMALL, 0, done)
    of_stage = [a for a in remaining.programs[2] if a.stage == 2]
    summed = [str(a) for a in of_stage if a.op in (Op.B, Op.SEND_MIRROR)]
    assert summed[:3] == ["2.0SEND_MIRROR1", "2.0B2", "2.0SEND_MIRROR2"]
    first_two = [a for program in remaining.programs[:2] for a in program]
    assert not any(a.op is Op.SEND_MIRROR for a in first_two), "their replicas are gone"


def test_a_mirror_under_way_is_still_let_in() -> None:
    done = {
        1: progress_of("1.0F0 1.0F1 1.0F2 1.0B0", "1.0RECV_B0 1.0RECV_B1"),
        2: progress_of("2.0F0 2.0B0 2.0SEND_B0 2.0F1 2.0B1 2.0SEND_B1 2.0SEND_MIRROR1"),
    }
    remaining = take_over(SMALL, 0, done)
    assert remaining.programs[1][0] == Action.parse("2.0RECV_MIRROR1")
    assert Action.parse("2.0SEND_MIRROR1") not in remaining.programs[2]


def test_without_replicas_there_is_nothing_to_mirror_to() -> None:
    with pytest.raises(ValueError, match="mirrored gradients go to replicas"):
        mirrored(2, 1, 2, Redundancy.NONE, 1)
    with pytest.raises(ValueError, match="-1 mirrored gradients: it must be 0 or above"):
        mirrored(2, 1, 2, Redundancy.LAZY, -1)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("victim", [0, 3, 7])
def test_a_loss_at_the_end_costs_little(victim: int, mode: Redundancy) -> None:
    schedule = mirrored(8, 1, 16, mode, 8)
    undisturbed = simulate(schedule, EQUAL_COSTS)
    loss = loss_at(undisturbed, victim, undisturbed.makespan)
    hit = rehearse(schedule, EQUAL_COSTS, loss)
    assert hit.timeline.makespan <= 1.05 * undisturbed.makespan
    again = [a for program in hit.remaining.programs for a in program if a.op is Op.B]
    assert again == [Action(victim, 0, Op.B, 15)]
