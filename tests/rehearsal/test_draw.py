"""Faults by lot: the same for the same seed, of all kinds, survivable but for both holders."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_bamboo.agent.job import Injection, JobShape, WriteFault
from megatron_bamboo.membership.lives import first_life
from megatron_bamboo.planner.arrangement import equal_pipelines
from megatron_bamboo.rehearsal.draw import (
    KINDS,
    VERIFIED_KINDS,
    Drawn,
    Lottery,
    OnCoordinator,
)
from megatron_bamboo.rehearsal.fault import LOSSES, How, Nth
from megatron_bamboo.schedule.actions import Action, Op

STAGES = 4
SHAPE = JobShape(equal_pipelines(STAGES, 2, 4), "lazy", train_iters=60, global_batch_size=8)
LOTTERY = Lottery(SHAPE, LOSSES, per_run=4, apart=12)
LONG = Lottery(
    JobShape(equal_pipelines(3, 2, 4), "lazy", train_iters=600, global_batch_size=8),
    KINDS,
    per_run=14,
    apart=30,
    num_standbys=2,
    respawns=True,
)


EVERY = 3
VERIFIED = replace(LONG, kinds=VERIFIED_KINDS, verified_every=EVERY)


def test_a_seed_replays() -> None:
    assert LOTTERY.run(7, 3) == LOTTERY.run(7, 3)
    assert len({LOTTERY.run(seed, number) for seed in range(5) for number in range(5)}) > 20


def kinds_of(drawn: Drawn) -> list[str]:
    """What strikes, by kind."""
    on_coordinator = [OnCoordinator.KILL] * len(drawn.write_faults)
    on_coordinator += [OnCoordinator.STOP] * len(drawn.stops)
    return [*(one.fault.how for one in drawn.injections), *on_coordinator]


@pytest.mark.parametrize("seed", [1, 2])
def test_all_kinds_come_about_equally_often(seed: int) -> None:
    drawn = Counter(kind for n in range(200) for kind in kinds_of(LONG.run(seed, n)))
    assert drawn.keys() == set(KINDS)
    assert max(drawn.values()) < 1.5 * min(drawn.values())


@given(st.integers(0, 10**6), st.integers(2, 5), st.integers(1, 3), st.integers(1, 6))
def test_no_run_asks_for_what_cannot_be(seed: int, stages: int, pipes: int, per_run: int) -> None:
    shape = JobShape(
        equal_pipelines(stages, pipes, 4), "lazy", train_iters=40, global_batch_size=4 * pipes
    )
    faults = Lottery(shape, LOSSES, per_run, apart=5).run(seed, 1).injections
    nodes = [one.node for one in faults]
    assert len(set(nodes)) == len(nodes) <= 2 * per_run
    assert set(nodes) <= {f"node{number}" for number in range(stages * pipes)}
    assert all(1 <= step_of(one) <= 40 and isinstance(one.fault.moment, Nth) for one in faults)
    assert [*map(step_of, faults)] == sorted(map(step_of, faults))


@given(st.integers(0, 10**6))
def test_a_loss_spares_the_neighbours_of_those_just_before_it(seed: int) -> None:
    """But for a stage's two holders, which go in the same step."""
    for one, next_one in pairwise(LOTTERY.run(seed, 1).injections):
        if 0 < step_of(next_one) - step_of(one) < LOTTERY.apart:
            assert not are_neighbours(one.node, next_one.node)


@given(st.integers(0, 10**6), st.integers(1, 3))
def test_after_a_stages_two_holders_the_job_has_time_to_heal_or_ends(seed: int, pipes: int) -> None:
    shape = JobShape(equal_pipelines(STAGES, pipes, 4), "lazy", 60, 4 * pipes)
    drawn = replace(LOTTERY, shape=shape).run(seed, 1).injections
    for (one, next_one), (_, after) in pairwise(pairwise((*drawn, None))):
        assert one is not None and next_one is not None
        if step_of(one) == step_of(next_one) and are_neighbours(one.node, next_one.node):
            assert after is None or pipes > 1
            assert after is None or step_of(after) - step_of(one) >= LOTTERY.apart


def test_both_holders_are_not_the_last_where_there_is_another_pipeline() -> None:
    def goes_on_after_both(number: int) -> bool:
        drawn = LONG.run(1, number).injections
        pairs = [
            one
            for one, next_one in pairwise(drawn[:-1])
            if step_of(one) == step_of(next_one)
            and first_life(one.node) == one.node
            and {one.node, next_one.node} in ({"node0", "node1"}, {"node3", "node4"})
        ]
        return bool(pairs)

    assert any(map(goes_on_after_both, range(100)))


@given(st.integers(0, 10**6))
def test_where_places_are_taken_again_the_new_nodes_are_struck_too(seed: int) -> None:
    nodes = [one.node for one in LONG.run(seed, 1).injections]
    assert len(set(nodes)) == len(nodes)
    assert {first_life(node) for node in nodes} <= {f"node{number}" for number in range(8)}


@given(st.integers(0, 10**6))
def test_who_came_in_at_the_same_time_as_another_is_lost_alone(seed: int) -> None:
    """Which of two places each of two standbys takes depends on what the seed does not know."""
    losses = LONG.run(seed, 1).injections
    groups = [[losses[0]]]
    for one, next_one in pairwise(losses):
        if step_of(next_one) - step_of(one) < LONG.apart:
            groups[-1].append(next_one)
        else:
            groups.append([next_one])
    # Two standbys at first: they come in together at the first two losses, or one after the other.
    if len(groups[0]) > 1:
        (together,) = [[g for g in groups if {"node6", "node7"} & {one.node for one in g}]]
        assert all(len(group) == 1 for group in together)


def test_a_stages_two_holders_never_both_raise() -> None:
    """Both in one step would be the script's own error, which no node's loss is."""
    lottery = Lottery(SHAPE, [How.RAISE], per_run=1, apart=12)
    pairs = [run for n in range(300) if len(run := lottery.run(1, n).injections) > 1]
    assert pairs
    assert all([one.fault.how for one in run] == [How.RAISE, How.KILL] for run in pairs)


def test_some_are_struck_in_a_later_life() -> None:
    nodes = {one.node for n in range(50) for one in LONG.run(1, n).injections}
    assert {"node6", "node0.2"} <= nodes


@given(st.integers(0, 10**6))
def test_each_coordinator_dies_at_a_write_that_is_still_to_come(seed: int) -> None:
    drawn = LONG.run(seed, 1)
    epochs = [epoch_of(fault) for fault in drawn.write_faults]
    assert epochs == sorted(set(epochs))
    assert list(drawn.stops) == sorted(set(drawn.stops))


def epoch_of(fault: WriteFault) -> int:
    """The epoch that ends with the write."""
    what, _, number = fault.key.partition("/")
    return int(number) - (what == "plan")


def step_of(injection: Injection) -> int:
    assert injection.fault.step is not None
    return injection.fault.step


def are_neighbours(first: str, second: str) -> bool:
    numbers = [divmod(int(node.removeprefix("node")), STAGES) for node in (first, second)]
    (pipe, stage), (other_pipe, other_stage) = numbers
    return pipe == other_pipe and (stage - other_stage) % STAGES in (1, 3)


@given(st.integers(0, 10**6), st.integers(1, 20))
def test_bits_flip_alone_in_a_step_in_which_they_are_found(seed: int, number: int) -> None:
    drawn = VERIFIED.run(seed, number).injections
    nodes = [one.node for one in drawn]
    assert len(set(nodes)) == len(nodes)
    ranks = {f"node{n}": n % 3 for n in range(6)}
    for one, next_one in pairwise((*drawn, *drawn[-1:])):
        if one.fault.how is not How.FLIP:
            continue
        assert step_of(one) % EVERY == 0
        assert one.fault.what == "replica/exp_avg"
        moment = one.fault.moment
        assert isinstance(moment, Action) and moment.op is Op.VERIFY
        if one.node in ranks:
            assert moment.stage == ranks[one.node]
        assert next_one is one or step_of(next_one) > step_of(one) + 1
    for one, flip in pairwise(drawn):
        if flip.fault.how is How.FLIP and one.fault.how is not How.FLIP:
            assert step_of(flip) - step_of(one) >= LONG.apart


def test_where_copies_are_compared_bits_flip_as_often_as_all_else_happens() -> None:
    drawn = Counter(kind for n in range(200) for kind in kinds_of(VERIFIED.run(1, n)))
    assert drawn.keys() == set(VERIFIED_KINDS)
    assert max(drawn.values()) < 1.5 * min(drawn.values())


@given(st.integers(0, 10**6))
def test_coordinators_die_at_epochs_that_end_where_bits_flip_too(seed: int) -> None:
    drawn = VERIFIED.run(seed, 1)
    num_losses = sum(one.fault.how is not How.FLIP for one in drawn.injections)
    assert all(
        epoch_of(fault) <= num_losses + len(drawn.write_faults) for fault in drawn.write_faults
    )


@given(st.integers(0, 10**6))
def test_a_run_goes_on_while_there_are_steps(seed: int) -> None:
    """Where nobody can be spared the next loss waits until the job is whole again."""
    assert len(kinds_of(LONG.run(seed, 1))) >= LONG.per_run - 3
