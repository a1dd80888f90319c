"""Which number of a loss function's report is the loss."""

import pytest
import torch

from megatron_bamboo.execution.errors import TrainingError
from megatron_bamboo.execution.reported import loss_of, losses_of


@pytest.mark.parametrize(
    ("reported", "loss"),
    [
        ({"lm loss": torch.tensor(2.5)}, 2.5),
        ({"aux": torch.tensor(0.0), "lm loss": torch.tensor(2.5)}, 2.5),
        ({"my loss": torch.tensor([2.5])}, 2.5),
        ({"lm loss": torch.tensor([10.0, 4.0])}, 2.5),
        ({"lm loss": (torch.tensor(10.0), torch.tensor(4))}, 2.5),
        ({"lm loss": torch.tensor([0.0, 0.0])}, 0.0),
        ({"lm loss": 2.5}, 2.5),
        (torch.tensor(2.5), 2.5),
    ],
)
def test_the_loss_is_found(reported: object, loss: float) -> None:
    assert loss_of(reported) == loss


@pytest.mark.parametrize("reported", [{}, None, {"lm loss": "much"}, {"lm loss": torch.ones(3)}])
def test_a_report_without_a_loss_ends_the_training_with_a_line(reported: object) -> None:
    with pytest.raises(TrainingError, match="must report a loss"):
        loss_of(reported)


def test_all_that_is_reported_is_evaluated() -> None:
    reported = {"lm loss": torch.tensor([10.0, 4.0]), "sop loss": torch.tensor([0.5])}
    assert losses_of(reported) == {"lm loss": (10.0, 4.0), "sop loss": (0.5, 1.0)}
    assert losses_of(torch.tensor(2.5)) == {"loss": (2.5, 1.0)}


def test_what_is_no_loss_disturbs_an_evaluation_and_no_training() -> None:
    reported = {"lm loss": torch.tensor(2.5), "histogram": torch.ones(3)}
    assert loss_of(reported) == 2.5
    with pytest.raises(TrainingError, match="must report a loss"):
        losses_of(reported)
