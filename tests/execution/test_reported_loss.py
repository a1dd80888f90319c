"""Which number of a loss function's report is the loss."""

import pytest
import torch

from megatron_bamboo.execution.compute import _loss_of
from megatron_bamboo.execution.errors import TrainingError


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
    assert _loss_of(reported) == loss


@pytest.mark.parametrize("reported", [{}, None, {"lm loss": "much"}, {"lm loss": torch.ones(3)}])
def test_a_report_without_a_loss_ends_the_training_with_a_line(reported: object) -> None:
    with pytest.raises(TrainingError, match="must report a loss"):
        _loss_of(reported)
