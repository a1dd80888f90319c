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
from megatron_bamboo.planner.memory import Memory, most_microbatches
from megatron_bamboo.planner.microbatches import Pace


@dataclass(frozen=True, slots=True)
class Template:
    """A pipeline of so many nodes as the cut has stages."""

    cut: Cut
    pace: Pace
    is_proven: bool
    """Whether it is the fastest by the formula of all cuts that fit."""

    @property
    def num_nodes(self) -> int:
        return self.cut.num_stages


Templates = Mapping[int, Template]
"""By number of nodes."""


def make_templates(costs: UnitCosts, sizes: Iterable[int], limit: int | None = None) -> Templates:
    """The templates that there are for some numbers of nodes.

    Args:
        sizes: those with more nodes than the model has units have no template.
        limit: bytes of memory that a worker has; what does not fit has no template either.

    Raises:
        ValueError: there is a limit, and the costs have no bytes.
    """
    cutter = Cutter(costs.works().ticks)
    possible = [size for size in sizes if size <= cutter.num_units]
    if limit is None:
        return {size: _free(cutter.best(size)) for size in possible}
    memory, fitter, templates = Memory(costs), Fitter(costs, limit), {}
    for size in possible:
        fitted = fitter.best(size, cutter.best(size))
        if fitted.cut is not None:
            most = most_microbatches(memory.of_cut(fitted.cut.spans), limit)
            pace = Pace(fitted.cut.time_before, fitted.cut.work_of_slowest, most)
            templates[size] = Template(fitted.cut, pace, fitted.is_proven)
    return templates


def _free(cut: Cut) -> Template:
    return Template(cut, Pace(cut.time_before, cut.work_of_slowest), is_proven=True)


def is_coverable(num_nodes: int, least: int, most: int, fault_tolerance: int) -> bool:
    """Whether so many nodes are at least f + 1 pipelines of ``least`` to ``most`` nodes each."""
    fewest_pipelines = max(fault_tolerance + 1, -(-num_nodes // most))
    return fewest_pipelines <= num_nodes // least


def longest_needed(num_nodes: int, least: int, fault_tolerance: int) -> int:
    """The least n_max with which all numbers of nodes up to ``num_nodes`` are coverable.

    That is, from the fewest nodes on, which are (f + 1) n0.
    """
    by_least = -(-((fault_tolerance + 2) * least - 1) // (fault_tolerance + 1))
    return min(by_least, -(-num_nodes // (fault_tolerance + 1)))


def longest_useful(num_nodes: int, least: int, fault_tolerance: int) -> int:
    """The nodes of a pipeline when all others have as few as they may: no longer one can be."""
    return num_nodes - fault_tolerance * least
