"""When a run evaluates, and on which samples: by the step alone."""

from hypothesis import given
from hypothesis import strategies as st

from megatron_bamboo.evaluation.due import Evaluation, EvaluationPlan, Kind

PLAN = EvaluationPlan(interval=10, num_batches=3, train_iters=25)


def test_evaluations_go_on_in_the_validation_samples() -> None:
    due = [evaluation for step in range(1, 26) for evaluation in PLAN.after_step(step)]
    assert due == [
        Evaluation(10, Kind.INTERVAL, first_batch=0, num_batches=3),
        Evaluation(20, Kind.INTERVAL, first_batch=3, num_batches=3),
    ]
    assert PLAN.after_training(has_test=True) == (
        Evaluation(25, Kind.VALIDATION, first_batch=6, num_batches=3),
        Evaluation(25, Kind.TEST, first_batch=0, num_batches=3),
    )
    assert PLAN.after_training(has_test=False) == PLAN.after_training(has_test=True)[:1]


def test_they_have_names_of_their_own() -> None:
    (evaluation,) = PLAN.after_step(10)
    assert evaluation.key == "10/interval"
    assert str(evaluation) == "the interval evaluation of step 10"


def test_without_an_interval_or_batches_there_are_none() -> None:
    for plan in (EvaluationPlan(None, 0, 25), EvaluationPlan(10, 0, 25)):
        assert plan.is_empty
        assert not any(plan.after_step(step) for step in range(1, 26))
        assert plan.after_training(has_test=True) == ()
        assert plan.validation_batches == plan.test_batches == 0


@given(st.integers(1, 20), st.integers(1, 5), st.integers(1, 60))
def test_all_take_as_many_samples_as_megatron_prepares(
    interval: int, num_batches: int, train_iters: int
) -> None:
    plan = EvaluationPlan(interval, num_batches, train_iters)
    due = [e for step in range(1, train_iters + 1) for e in plan.after_step(step)]
    due += plan.after_training(has_test=False)
    taken = [e.first_batch + batch for e in due for batch in range(e.num_batches)]
    assert taken == list(range((train_iters // interval + 1) * num_batches))
    assert plan.validation_batches == len(taken)
