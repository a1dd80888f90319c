"""What comes of an evaluation: losses, each a sum over microbatches in their order.

As in Megatron each loss is the sum of what was reported, divided by the number of tokens in it, or
by the number of microbatches where a mean was reported. Summed is in the order of all microbatches,
so that the bits depend on nobody's share. Text forms are exact: they go through the store.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from megatron_bamboo.evaluation.due import Kind

Weighed = tuple[float, float]
"""A sum, and how many values are in it."""
Reports = Mapping[int, Mapping[str, Weighed]]
"""By global microbatch what its loss function reported, by name."""

_LARGEST_EXPONENT = 20.0
_MAIN = "lm loss"


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The outcome of one evaluation: the value of ``evaluated/<step>/<kind>``."""

    step: int
    kind: Kind
    epoch: int
    """Of the plan under which it ended."""
    seconds: float
    losses: Mapping[str, str]
    """By name, as hexadecimal floats."""

    @property
    def main(self) -> tuple[str, float]:
        """The name and the value of the loss that counts, where several are reported."""
        name = _MAIN if _MAIN in self.losses else next(iter(self.losses))
        return name, float.fromhex(self.losses[name])

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """The outcome that ``to_json`` wrote."""
        return cls.from_fields(json.loads(text))

    @classmethod
    def from_fields(cls, values: Mapping[str, Any]) -> Self:
        """The outcome with the fields that ``asdict`` gives, and maybe others beside them."""
        kept = {name: values[name] for name in ("step", "epoch", "seconds", "losses")}
        return cls(**kept, kind=Kind(values["kind"]))


def mean_losses(batches: Sequence[Reports]) -> dict[str, str]:
    """Each loss over all microbatches of all batches, in their order."""
    sums: dict[str, Weighed] = {}
    for batch in batches:
        for number in sorted(batch):
            for name, (value, weight) in batch[number].items():
                total, weights = sums.get(name, (0.0, 0.0))
                sums[name] = (total + value, weights + weight)
    return {name: _mean(weighed).hex() for name, weighed in sums.items()}


def _mean(weighed: Weighed) -> float:
    total, weights = weighed
    return total / weights if weights else 0.0


def reports_to_json(reports: Reports) -> str:
    """Exact text, for the store."""
    return json.dumps(
        {
            number: {name: [part.hex() for part in weighed] for name, weighed in losses.items()}
            for number, losses in reports.items()
        }
    )


def reports_from_json(texts: Iterable[bytes]) -> Reports:
    """What several pipelines have reported of one batch."""
    together: dict[int, dict[str, Weighed]] = {}
    for text in texts:
        for number, losses in json.loads(text).items():
            together[int(number)] = {
                name: (float.fromhex(value), float.fromhex(weight))
                for name, (value, weight) in losses.items()
            }
    return together


def evaluation_line(evaluated: Evaluated) -> str:
    """An evaluation as Megatron logs it, with the perplexity, which ends at e to the 20th."""
    where = f"iteration {evaluated.step}"
    if evaluated.kind is not Kind.INTERVAL:
        where += f" on {evaluated.kind} set"
    parts = [f"validation loss at {where}"]
    for name, text in evaluated.losses.items():
        value = float.fromhex(text)
        perplexity = math.exp(min(value, _LARGEST_EXPONENT))
        parts += [f"{name} value: {value:.6E}", f"{name} PPL: {perplexity:.6E}"]
    return " | ".join(parts) + " |"
