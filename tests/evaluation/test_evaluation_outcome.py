"""What is made of what microbatches have reported."""

import math

import pytest

from megatron_bamboo.evaluation.due import Kind
from megatron_bamboo.evaluation.outcome import (
    Evaluated,
    evaluation_line,
    mean_losses,
    reports_from_json,
    reports_to_json,
)


def outcome(kind: Kind = Kind.INTERVAL, **losses: float) -> Evaluated:
    texts = {name.replace("_", " "): value.hex() for name, value in losses.items()}
    return Evaluated(10, kind, 1, 0.5, texts)


def test_a_sum_is_divided_by_its_tokens_and_means_count_alike() -> None:
    batches = [
        {0: {"lm loss": (10.0, 4.0), "aux": (1.0, 1.0)}, 1: {"lm loss": (2.0, 1.0)}},
        {0: {"lm loss": (3.0, 5.0), "aux": (2.0, 1.0)}},
    ]
    assert mean_losses(batches) == {"lm loss": (1.5).hex(), "aux": (1.5).hex()}


def test_no_tokens_are_no_loss() -> None:
    assert mean_losses([{0: {"lm loss": (0.0, 0.0)}}]) == {"lm loss": (0.0).hex()}


def test_the_order_of_sums_is_that_of_all_microbatches_whoever_reports() -> None:
    values = [0.1, 1e16, -1e16, 0.3]
    losses = {number: {"lm loss": (value, 1.0)} for number, value in enumerate(values)}
    texts = [
        reports_to_json({number: losses[number] for number in share}).encode()
        for share in ((3, 1), (2, 0))
    ]
    expected = ((0.1 + 1e16) + -1e16 + 0.3) / 4
    assert mean_losses([reports_from_json(texts)]) == {"lm loss": expected.hex()}


def test_reports_keep_every_bit() -> None:
    reports = {7: {"lm loss": (0.1 + 0.2, 3.0), "other": (float("inf"), 1.0)}}
    assert reports_from_json([reports_to_json(reports).encode()]) == reports


def test_an_outcome_is_what_was_told() -> None:
    told = outcome(lm_loss=7.25)
    assert Evaluated.from_json(told.to_json()) == told
    assert told.main == ("lm loss", 7.25)
    assert outcome(my_loss=1.0, other=2.0).main == ("my loss", 1.0)


@pytest.mark.parametrize(
    ("kind", "where"),
    [
        (Kind.INTERVAL, "iteration 10"),
        (Kind.VALIDATION, "iteration 10 on validation set"),
        (Kind.TEST, "iteration 10 on test set"),
    ],
)
def test_the_line_is_megatrons(kind: Kind, where: str) -> None:
    assert evaluation_line(outcome(kind, lm_loss=2.5, aux=30.0)) == (
        f"validation loss at {where} | lm loss value: 2.500000E+00 | lm loss PPL: 1.218249E+01 | "
        "aux value: 3.000000E+01 | aux PPL: 4.851652E+08 |"
    )


def test_what_is_no_number_has_no_perplexity() -> None:
    assert "value: NAN | lm loss PPL: NAN" in evaluation_line(outcome(lm_loss=math.nan))
