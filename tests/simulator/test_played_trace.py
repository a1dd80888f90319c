"""What becomes of jobs on traces: the time adds up, and each policy does what it says."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from playing import PRICES, nodes_of, play, traces
from test_spot_trace import PAPERS, needs_papers

from megatron_bamboo.recovery.decision import Action
from megatron_bamboo.recovery.names import PolicyName
from megatron_bamboo.recovery.prices import Prices
from megatron_bamboo.simulator.run import Outcome
from megatron_bamboo.simulator.timeline import Kind, totals
from megatron_bamboo.simulator.trace import HOUR, Moment, Trace, read_trace

AUTO, BAMBOO, OOBLECK, CHECKPOINT = PolicyName
ITERATION = 9 * (4 + 1)
"""Seconds, of two pipelines of two stages with 4 microbatches each."""
FIRST = PRICES.restore_seconds
"""When the first iteration begins."""


def calm(*moments: Moment, seconds: float = 1000.0, nodes: int = 4) -> Trace:
    return Trace(nodes_of(nodes), moments, seconds)


def actions(outcome: Outcome) -> list[Action]:
    return [decided.action for decided in outcome.decisions if decided.action is not Action.STAY]


@settings(max_examples=60)
@given(trace=traces(), name=st.sampled_from(list(PolicyName)), least=st.integers(1, 3))
def test_the_time_adds_up_and_no_iteration_counts_twice(
    trace: Trace, name: PolicyName, least: int
) -> None:
    outcome = play(trace, name, least_stages=least)
    assert sum(totals(outcome.pieces).values()) == pytest.approx(trace.seconds)
    end, trained = 0.0, 0
    for piece in outcome.pieces:
        assert piece.start == end
        end = piece.end
        if piece.kind is Kind.TRAINING:
            # It goes on with the step that was under way, or with the next.
            assert trained <= piece.first <= trained + 1
            assert piece.last >= piece.first
            trained = piece.last
        else:
            assert (piece.first, piece.last) == (0, 0)
    assert end == trace.seconds
    assert trained in (outcome.iterations, outcome.iterations + 1)
    assert outcome.lost_iterations >= 0
    assert all(decided.reason.words for decided in outcome.decisions)


@given(nodes=st.integers(0, 8), seconds=st.integers(1, 2000))
def test_without_events_all_policies_are_the_same(nodes: int, seconds: int) -> None:
    first, *others = (play(calm(seconds=seconds, nodes=nodes), name) for name in PolicyName)
    for other in others:
        assert other.pieces == first.pieces
        assert other.iterations == first.iterations


def test_iterations_and_checkpoints_take_their_time() -> None:
    outcome = play(calm(), AUTO)
    saves = (1000 - FIRST) // (4 * ITERATION + PRICES.save_seconds)
    assert totals(outcome.pieces)[Kind.SAVING] == saves * PRICES.save_seconds
    assert outcome.iterations == (1000 - FIRST - saves * PRICES.save_seconds) // ITERATION


@pytest.mark.parametrize("name", PolicyName)
def test_who_is_lost_while_waiting_for_a_place_is_no_loss(name: PolicyName) -> None:
    trace = calm(Moment(50.0, ("late",)), Moment(60.0, (), ("late",)))
    assert play(trace, name).pieces == play(calm(), name).pieces


def test_a_takeover_makes_its_iteration_longer_and_loses_nothing() -> None:
    middle = FIRST + ITERATION / 2
    outcome = play(calm(Moment(middle, (), ("node1",)), seconds=FIRST + 2 * ITERATION), BAMBOO)
    training, takeover, *_ = outcome.pieces[1:]
    assert (training.kind, training.end) == (Kind.TRAINING, middle)
    assert takeover.kind is Kind.TAKEOVER
    assert takeover.seconds > PRICES.takeover_seconds
    assert outcome.lost_iterations == 0
    assert actions(outcome) == [Action.RESTORE, Action.TAKE_OVER]


def test_oobleck_loses_the_iteration_and_waits_for_the_move() -> None:
    outcome = play(calm(Moment(FIRST + ITERATION / 2, (), ("node1",))), OOBLECK)
    lost, moving = outcome.pieces[1:3]
    assert (lost.kind, lost.seconds) == (Kind.LOST, ITERATION / 2)
    assert outcome.lost_iterations == 0.5
    assert moving.kind is Kind.RECONFIGURATION
    assert moving.seconds > PRICES.reconfigure_seconds
    assert actions(outcome) == [Action.RESTORE, Action.RECONFIGURE]


def test_with_checkpoints_alone_all_since_the_last_one_is_lost() -> None:
    moment = FIRST + 4 * ITERATION + PRICES.save_seconds + 1.5 * ITERATION
    outcome = play(calm(Moment(moment, (), ("node1",))), CHECKPOINT)
    assert outcome.lost_iterations == 1.5
    assert totals(outcome.pieces)[Kind.LOST] == 1.5 * ITERATION
    assert totals(outcome.pieces)[Kind.RESTORE] == 2 * FIRST


def test_a_loss_while_all_wait_begins_anew() -> None:
    first = FIRST + ITERATION / 2
    moments = (Moment(first, (), ("node1",)), Moment(first + 1, (), ("node2",)))
    outcome = play(calm(*moments), OOBLECK)
    assert actions(outcome) == [Action.RESTORE, Action.RECONFIGURE, Action.RECONFIGURE]
    # The two who are left have a stage each already.
    assert outcome.pieces[2].seconds == 1 + PRICES.reconfigure_seconds


def test_too_few_save_and_wait_for_others() -> None:
    moments = (Moment(120.0, (), nodes_of(4)[:3]), Moment(200.0, ("a", "b")))
    outcome = play(calm(*moments), BAMBOO)
    # Two nodes a pipeline: each has all state, so the last one saves the step that has passed.
    assert actions(outcome)[1:] == [Action.WAIT, Action.RESTORE]
    waited, saved = totals(outcome.pieces)[Kind.WAIT], totals(outcome.pieces)[Kind.SAVING]
    assert waited == 200 + PRICES.start_seconds - 120 - PRICES.save_seconds
    assert saved >= PRICES.save_seconds
    assert outcome.lost_iterations == pytest.approx(10 / ITERATION)


def test_a_standby_that_is_lost_before_its_change_changes_nothing() -> None:
    loss, arrival = Moment(100.0, (), ("node1",)), Moment(40.0, ("late",))
    slow = Prices(bandwidth=10.0, start_seconds=0.0)
    outcome = play(calm(arrival, loss, Moment(300.0, (), ("late",))), BAMBOO, slow)
    assert actions(outcome).count(Action.HEAL) == 1
    assert totals(outcome.pieces)[Kind.RECONFIGURATION] == 0


@needs_papers
@pytest.mark.parametrize("hour", [0, 4])
def test_policies_on_a_papers_trace(hour: int) -> None:
    text = (PAPERS / "p3-trace.csv").read_text()
    trace = read_trace(text).window(hour * HOUR, 2 * HOUR).at_most(12)
    assert trace.num_removed
    outcomes = {name: play(trace, name, Prices()) for name in PolicyName}
    done = {name: outcome.iterations for name, outcome in outcomes.items()}
    # Each answer more loses less, and so gets more done.
    assert done[AUTO] >= max(done[BAMBOO], done[OOBLECK])
    assert min(done[BAMBOO], done[OOBLECK]) > done[CHECKPOINT]
    lost = {name: outcome.lost_iterations for name, outcome in outcomes.items()}
    assert lost[AUTO] < lost[OOBLECK] < lost[CHECKPOINT]
    seconds = {name: totals(outcome.pieces) for name, outcome in outcomes.items()}
    assert {n for n in PolicyName if seconds[n][Kind.TAKEOVER]} == {AUTO, BAMBOO}
    assert seconds[CHECKPOINT][Kind.RESTORE] > 2 * seconds[BAMBOO][Kind.RESTORE]
    assert seconds[AUTO][Kind.RECONFIGURATION] < seconds[OOBLECK][Kind.RECONFIGURATION] / 2
