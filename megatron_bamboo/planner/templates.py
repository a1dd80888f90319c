"""Pipeline templates: one best cut of the model for each number of nodes that a pipeline may have.

At least f + 1 pipelines must run, so that f losses leave one whole; n0 is the fewest nodes of a
pipeline. Any number of nodes from (f + 1) n0 on must be some pipelines' nodes together (Oobleck,
section 4.1.1), which bounds the longest template that is needed from below. More templates cost
nothing but the time to find them, and let a better arrangement be found.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from megatron_bamboo.planner.cut import Cut, Cutter
from megatron_bamboo.planner.fitting import Fitter
from megatron_bamboo.planner.layers import UnitCosts
from megatron_bamboo.planner.microbatches import Pace


@dataclass(frozen=True, slots=True)
class Template:
    """A pipeline of so many nodes as the cut has stages."""

    cut: Cut
    pace: Pace
    """By the formula."""
    least: Pace
    """What an iteration takes at least, by the work of the slowest stage."""
    is_proven: bool
    """Whether it is the fastest by the formula of all cuts that fit."""

    @property
    def num_nodes(self) -> int:
        return self.cut.num_stages


Templates = Mapping[int, Template]
"""By number of nodes."""


class TemplateMaker:
    """The templates of one model, each made when it is first asked for.

    Args:
        limit: bytes of memory that a worker has; None if it is free.

    Raises:
        ValueError: there is a limit, and the costs have no bytes.
    """

    def __init__(self, costs: UnitCosts, limit: int | None = None) -> None:
        self._cutter = Cutter(costs.works().ticks)
        self._fitter = None if limit is None else Fitter(costs, limit)
        self._made: dict[int, Template | None] = {}

    def make(self, num_nodes: int) -> Template | None:
        """The template for so many nodes; None if no cut was found that fits.

        Raises:
            ValueError: the model has fewer units.
        """
        if num_nodes not in self._made:
            self._made[num_nodes] = self._make(num_nodes)
        return self._made[num_nodes]

    def make_all(self, sizes: Iterable[int]) -> Templates:
        """Those that there are for some numbers of nodes."""
        made = ((size, self.make(size)) for size in sizes)
        return {size: template for size, template in made if template is not None}

    def _make(self, num_nodes: int) -> Template | None:
        cut, is_proven, most = self._cutter.best(num_nodes), True, None
        if self._fitter is not None:
            fitted = self._fitter.best(num_nodes, cut)
            if fitted.cut is None:
                return None
            cut, is_proven = fitted.cut, fitted.is_proven
            most = self._fitter.most_microbatches(cut)
        each = cut.work_of_slowest
        pace, least = Pace(cut.time_before, each, most), Pace(cut.least_before, each, most)
        return Template(cut, pace, least, is_proven)


def longest_needed(num_nodes: int, least: int, fault_tolerance: int) -> int:
    """The least n_max with which pipelines can have any number of nodes together up to this one.

    That is, from the fewest nodes on, which are (f + 1) n0.
    """
    by_least = -(-((fault_tolerance + 2) * least - 1) // (fault_tolerance + 1))
    return min(by_least, -(-num_nodes // (fault_tolerance + 1)))


def longest_useful(num_nodes: int, least: int, fault_tolerance: int) -> int:
    """The nodes of a pipeline when all others have as few as they may: no longer one can be."""
    return num_nodes - fault_tolerance * least
