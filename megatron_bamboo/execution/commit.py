"""The commit vector: everything that a step's commit makes known to all.

One slot for each unit's sum of squares and one for each microbatch's loss. Each slot is filled by
exactly one worker and is zero elsewhere, so that the sum over all workers is exact, and everyone
adds the slots in the same order: the gradient norm and the loss do not depend on who holds what.
One slot more counts the workers that were asked to end: all end after that step, or nobody.
In a step in which copies of the state are compared, each copy's digest has a slot after these: so
all know what differs, or nobody, as with all that a commit says.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from megatron_bamboo.planner.arrangement import unit_names
from megatron_bamboo.planner.trust import Copy, Kind


@dataclass(frozen=True, slots=True)
class CommitLayout:
    """Which slot is whose."""

    units: tuple[str, ...]  # of the whole model, in model order; a part for each tensor rank
    num_microbatches: int  # of a step

    @property
    def size(self) -> int:
        """Number of slots."""
        return len(self.units) + self.num_microbatches + 1

    def fill(
        self,
        squared_norms: Mapping[str, float],
        losses: Mapping[int, float],
        must_end: bool = False,
    ) -> list[float]:
        """One worker's contribution: the units that are its to give, the losses, which are by
        global microbatch, and whether it was asked to end after this step."""
        slots = [0.0] * self.size
        slots[-1] = float(must_end)
        for unit, value in squared_norms.items():
            slots[self.units.index(unit)] = value
        for microbatch, value in losses.items():
            slots[len(self.units) + microbatch] = value
        return slots

    def gradient_norm(self, vector: Sequence[float]) -> float:
        """The norm over each parameter once."""
        return math.sqrt(_ordered_sum(vector[: len(self.units)]))

    def loss(self, vector: Sequence[float]) -> float:
        """The mean over the step's microbatches."""
        losses = vector[len(self.units) : self.size - 1]
        return _ordered_sum(losses) / len(losses)

    def must_end(self, vector: Sequence[float]) -> bool:
        """Whether the training ends after this step, since some worker was asked to."""
        return vector[self.size - 1] > 0


@dataclass(frozen=True, slots=True)
class DigestLayout:
    """Which slot after the commit's own is which copy's digest."""

    copies: tuple[Copy, ...]

    @classmethod
    def of(cls, num_units: int, tensor_size: int, num_pipelines: int) -> "DigestLayout":
        """For each copy that there may be of each tensor rank's part of each unit of a GPT."""
        return cls(
            tuple(
                Copy(unit, rank, kind, pipeline, is_replica)
                for unit in unit_names(num_units)
                for rank, kind, pipeline, is_replica in product(
                    range(tensor_size), Kind, range(num_pipelines), (False, True)
                )
            )
        )

    def fill(self, digests: Mapping[Copy, int]) -> list[float]:
        """One worker's slots: zero for what it does not hold."""
        unknown = digests.keys() - set(self.copies)
        assert not unknown, f"no slot for {unknown}"
        return [float(digests.get(copy, 0)) for copy in self.copies]

    def read(self, slots: Sequence[float]) -> dict[Copy, int]:
        """The digest of each copy that there is."""
        digests = zip(self.copies, map(int, slots), strict=True)
        return {copy: digest for copy, digest in digests if digest}


def unit_parts(num_units: int, tensor_size: int) -> tuple[str, ...]:
    """Each tensor rank's part of each unit of a model, in model order."""
    return tuple(
        unit_part(unit, rank) for unit in unit_names(num_units) for rank in range(tensor_size)
    )


def unit_part(unit: str, tensor_rank: int) -> str:
    """The name of one tensor rank's part of a unit."""
    return f"{unit}/{tensor_rank}"


def to_hex(vector: Iterable[float]) -> tuple[str, ...]:
    """Exact text of a vector, for the store."""
    return tuple(float(value).hex() for value in vector)


def from_hex(texts: Iterable[str]) -> tuple[float, ...]:
    """The vector that ``to_hex`` wrote."""
    return tuple(float.fromhex(text) for text in texts)


def _ordered_sum(values: Iterable[float]) -> float:
    total = 0.0
    for value in values:
        total += value
    return total
