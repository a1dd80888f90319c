"""From what the units cost to arrangements of so many nodes, best first.

The formula of ``cut`` is exact for equal stages and too low otherwise: by up to a sixth with four
microbatches a stage, by any factor with fewer than one. So it says what is worth a look, and what
that takes is simulated, each pipeline with the 1F1B schedule and its own microbatches: the twenty
arrangements that are fastest by the formula, and the twenty that are fastest by what the slowest
stages must do at least, where these are others. Of two that take equally long the one is better for
which less state has to be moved, by a measure that the caller gives, then the one that the formula
had first.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from megatron_bamboo.planner.arrangement import Arrangement, PipelineShape
from megatron_bamboo.planner.infeasible import (
    Infeasible,
    Request,
    check_counts,
    counted,
    log_too_long,
    no_template,
)
from megatron_bamboo.planner.instantiate import Instantiator
from megatron_bamboo.planner.layers import UnitCosts
from megatron_bamboo.planner.makespan import one_f_one_b_seconds
from megatron_bamboo.planner.microbatches import Pace, split
from megatron_bamboo.planner.templates import (
    TemplateMaker,
    Templates,
    longest_useful,
)

SIMULATED = 20
"""How many of the fastest are simulated, by the formula and by the work of the slowest stage."""

StateMoved = Callable[[Arrangement], float]
"""How much state must move for an arrangement; only compared."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """An arrangement, and what its slowest pipeline takes for an iteration."""

    arrangement: Arrangement
    formula_seconds: float
    simulated_seconds: float
    moved: float
    formula_rank: int | None
    """Its place by the formula, from 1; None if it is not among the first."""


class Planner:
    """Arrangements of one model on any number of nodes.

    Args:
        costs: what each unit takes.
        least_stages: of a pipeline; with 2 or more a stage's replica can be on another node of it.
        most_stages: of a pipeline; as many as the model has units if not given.
        limit: bytes of memory that a worker has.

    Raises:
        Infeasible: no pipeline can be made at all.
    """

    def __init__(
        self,
        costs: UnitCosts,
        least_stages: int = 2,
        most_stages: int | None = None,
        limit: int | None = None,
    ) -> None:
        num_units = len(costs.units)
        sizes = range(least_stages, min(most_stages or num_units, num_units) + 1)
        if least_stages < 1 or not sizes:
            raise Infeasible(
                f"pipelines of {least_stages} to {most_stages or num_units} stages of a model of "
                f"{counted(num_units, 'unit')}: a stage needs a unit, a pipeline a stage"
            )
        self.costs = costs
        self.limit = limit
        self._works = costs.works()
        self._sizes = sizes
        self._maker = TemplateMaker(costs, limit)
        self._seconds = cache(self._simulate)

    def templates(self, request: Request) -> Templates:
        """By number of nodes the templates of use for so many.

        Raises:
            Infeasible: nothing fits into memory.
        """
        least = next((size for size in self._sizes if self._maker.make(size)), None)
        if least is None:
            assert self.limit is not None
            raise Infeasible(no_template(self.costs, self._sizes, self.limit))
        longest = longest_useful(request.num_nodes, least, request.fault_tolerance)
        last = min(max(longest, least), self._sizes[-1])
        return self._maker.make_all(range(least, last + 1))

    def propose(self, request: Request, moved: StateMoved | None = None) -> tuple[Proposal, ...]:
        """The best arrangements, ranked by simulation.

        Raises:
            Infeasible: there is none; the message says why and what to change.
        """
        templates = self.templates(request)
        check_counts(request, templates)
        by_formula = self._fastest({n: t.pace for n, t in templates.items()}, request)
        if not by_formula:
            raise Infeasible(log_too_long(templates, request))
        by_least = self._fastest({n: t.least for n, t in templates.items()}, request)
        ranks: dict[Arrangement, int | None] = dict.fromkeys(by_formula + by_least)
        ranks |= {arrangement: rank for rank, arrangement in enumerate(by_formula, 1)}
        proposals = [self._proposal(templates, *ranked, moved) for ranked in ranks.items()]
        return tuple(sorted(proposals, key=lambda p: (p.simulated_seconds, p.moved)))

    def seconds(self, ticks: int) -> float:
        """A time that templates count in ticks."""
        return self._works.seconds(ticks)

    def simulated_seconds(self, pipeline: PipelineShape) -> float:
        """What an iteration of one pipeline takes."""
        return self._seconds(pipeline)

    def _fastest(self, paces: Mapping[int, Pace], request: Request) -> list[Arrangement]:
        """The arrangements with the least time by these paces."""
        numbers = request.num_nodes, request.fault_tolerance, request.num_microbatches
        found = Instantiator(paces, *numbers).best(SIMULATED)
        return [self._arrange(one.sizes, paces, request.num_microbatches) for one in found]

    def _arrange(
        self, sizes: Sequence[int], paces: Mapping[int, Pace], num_microbatches: int
    ) -> Arrangement:
        numbers = split([paces[size] for size in sizes], num_microbatches)
        made = self._maker.make_all(set(sizes))
        pairs = zip(sizes, numbers, strict=True)
        return Arrangement(tuple(PipelineShape(made[n].cut.spans, number) for n, number in pairs))

    def _proposal(
        self,
        templates: Templates,
        arrangement: Arrangement,
        rank: int | None,
        moved: StateMoved | None,
    ) -> Proposal:
        pipelines = arrangement.pipelines
        ticks = max(templates[p.num_stages].pace.time(p.num_microbatches) for p in pipelines)
        return Proposal(
            arrangement,
            self._works.seconds(ticks),
            max(map(self._seconds, pipelines)),
            0.0 if moved is None else moved(arrangement),
            rank,
        )

    def _simulate(self, pipeline: PipelineShape) -> float:
        units = [self.costs.units[first:past] for first, past in pipeline.spans]
        return one_f_one_b_seconds(
            [sum(unit.forward for unit in stage) for stage in units],
            [sum(unit.backward for unit in stage) for stage in units],
            pipeline.num_microbatches,
        )
