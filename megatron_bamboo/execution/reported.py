"""What a script's loss function has reported of a microbatch, as numbers.

Newer scripts report a sum and the number of tokens in it, older ones a mean.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from megatron_bamboo.evaluation.outcome import Weighed
from megatron_bamboo.execution.errors import TrainingError

_UNNAMED = "loss"


def loss_of(reported: Any) -> float:
    """The loss of a microbatch: "lm loss" or the first value, whatever else is reported.

    Raises:
        TrainingError: there is no such value.
    """
    if isinstance(reported, Mapping):
        name = "lm loss" if "lm loss" in reported else next(iter(reported), "lm loss")
        reported = {name: reported.get(name)}
    ((total, weight),) = losses_of(reported).values()
    return total / weight if weight else 0.0


def losses_of(reported: Any) -> dict[str, Weighed]:
    """By name each loss: a sum, and what it is to be divided by. What is no mapping has no name.

    Raises:
        TrainingError: it holds no loss, or something else beside.
    """
    try:
        named = reported if isinstance(reported, Mapping) else {_UNNAMED: reported}
        losses = {str(name): _weighed(value) for name, value in named.items()}
        if not losses:
            raise ValueError("nothing is reported")
        return losses
    except (TypeError, ValueError, RuntimeError) as error:
        raise TrainingError(
            f"the loss function reported {reported!r}: it must report a loss, like "
            '{"lm loss": tensor}'
        ) from error


def _weighed(value: Any) -> Weighed:
    if isinstance(value, tuple | list) or (isinstance(value, Tensor) and value.numel() == 2):
        total, weight = (float(part) for part in value)
        return total, weight
    return float(value), 1.0
