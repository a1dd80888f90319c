"""Small shapes of interleaved pipelines, and which of them Megatron-core accepts.

Its ``forward_backward_pipelining_with_interleaving`` sends microbatches through a chunk in groups
of ``microbatch_group_size_per_vp_stage``, by default as many as there are stages. It refuses a
group that is smaller than the number of stages or larger than the number of microbatches, and a
last group that is smaller than the number of stages.
"""

from dataclasses import dataclass, replace
from itertools import product

MOST_MICROBATCHES = 8


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """P stages of C chunks, D pipelines, and M microbatches in each."""

    num_stages: int
    num_chunks: int
    num_pipelines: int
    num_microbatches: int = 1

    @property
    def family(self) -> str:
        """All but the number of microbatches."""
        return f"P{self.num_stages}-C{self.num_chunks}-D{self.num_pipelines}"

    def __str__(self) -> str:
        return f"{self.family}-M{self.num_microbatches}"

    @property
    def group_sizes(self) -> tuple[int, ...]:
        """The sizes of groups with which Megatron accepts it, its default first; maybe none."""
        sizes = range(1, MOST_MICROBATCHES + 1)
        return tuple(n for n in sizes if refusal(self.num_stages, self.num_microbatches, n) is None)

    @property
    def is_refused_by_default(self) -> bool:
        """Whether Megatron refuses it, unless told how large its groups are."""
        return refusal(self.num_stages, self.num_microbatches, self.num_stages) is not None


def refusal(num_stages: int, num_microbatches: int, group_size: int) -> type[Exception] | None:
    """What Megatron's interleaved schedule raises, None where it accepts the numbers."""
    if not num_stages <= group_size <= num_microbatches:
        return ValueError
    if 0 < num_microbatches % group_size < num_stages:
        return RuntimeError
    return None


def families() -> tuple[Shape, ...]:
    """Stages, chunks and pipelines of the grid: what the ranks of one Megatron can train."""
    return tuple(Shape(p, c, d) for d, p, c in product((1, 2), (2, 3, 4), (2, 3)))


def short_families() -> tuple[Shape, ...]:
    """Those that CI has time for."""
    return tuple(Shape(*sizes) for sizes in ((2, 2, 2), (3, 3, 1)))


def accepted(family: Shape) -> tuple[Shape, ...]:
    """The shapes of a family that Megatron accepts, with one size of groups or another."""
    return tuple(shape for shape in _members(family) if shape.group_sizes)


def refused_by_default(family: Shape) -> tuple[Shape, ...]:
    """The shapes of a family that Megatron refuses, unless told how large its groups are."""
    return tuple(shape for shape in _members(family) if shape.is_refused_by_default)


def _members(family: Shape) -> tuple[Shape, ...]:
    counts = range(1, MOST_MICROBATCHES + 1)
    return tuple(replace(family, num_microbatches=count) for count in counts)
