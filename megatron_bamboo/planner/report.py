"""What ``bamboo plan`` has to say about a proposal, as data: for tables, programs and pictures."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from megatron_bamboo.planner.arrangement import PipelineShape, StageSpan
from megatron_bamboo.planner.infeasible import Request, covered_nodes
from megatron_bamboo.planner.layers import UnitCosts
from megatron_bamboo.planner.memory import Memory
from megatron_bamboo.planner.placement import Holdings, Placement, place_nodes
from megatron_bamboo.planner.propose import Planner, Proposal
from megatron_bamboo.planner.templates import Template, longest_needed


@dataclass(frozen=True, slots=True)
class ShownTemplate:
    """One template in seconds and bytes."""

    spans: tuple[StageSpan, ...]
    slowest_seconds: float
    planned_seconds: float
    is_proven: bool
    memory: tuple[int, ...] | None
    """By stage, with the microbatches that cuts are planned for; None if it is not known."""


@dataclass(frozen=True, slots=True)
class ShownPipeline:
    """One pipeline in seconds and bytes."""

    shape: PipelineShape
    stage_seconds: tuple[float, ...]
    """Forward and backward of one microbatch."""
    formula_seconds: float
    simulated_seconds: float
    memory: tuple[int, ...] | None
    """By stage, once its node has taken over the next one."""


@dataclass(frozen=True, slots=True)
class Report:
    """A request, and the best that there is for it."""

    request: Request
    templates: tuple[ShownTemplate, ...]
    pipelines: tuple[ShownPipeline, ...]
    best: Proposal
    num_simulated: int
    uncovered: tuple[int, ...]
    """From the fewest nodes that can be on, the numbers that the templates do not add up to."""
    longest_needed: int
    """Longer templates are only there for better arrangements."""
    placement: Placement | None
    """None without zones."""

    @property
    def fewest_nodes(self) -> int:
        """With fewer there are not so many pipelines as asked."""
        return len(self.templates[0].spans) * (self.request.fault_tolerance + 1)

    def groups(self) -> Iterator[tuple[range, ShownPipeline]]:
        """Pipelines that are alike, by their numbers; equal ones are next to each other."""
        first = 0
        for pipeline, alike in groupby(self.pipelines):
            count = len(list(alike))
            yield range(first, first + count), pipeline
            first += count


def make_report(
    planner: Planner, request: Request, zones: Mapping[str, str] | None = None
) -> Report:
    """Propose, and work out what there is to be said.

    Args:
        zones: by name of each node its zone, if they have zones.

    Raises:
        Infeasible: there is no arrangement.
    """
    ranked = planner.propose(request)
    best = ranked[0]
    templates = planner.templates(request)
    least, f = min(templates), request.fault_tolerance
    covered = covered_nodes(request, templates, request.num_nodes)
    return Report(
        request=request,
        templates=tuple(_template(planner, template) for template in templates.values()),
        pipelines=tuple(
            _pipeline(planner, shape, templates[shape.num_stages])
            for shape in best.arrangement.pipelines
        ),
        best=best,
        num_simulated=len(ranked),
        uncovered=tuple(sorted({*range(least * (f + 1), request.num_nodes)} - {*covered})),
        longest_needed=longest_needed(request.num_nodes, least, f),
        placement=None if zones is None else _place(planner.costs, best, zones),
    )


def run_lengths(spans: Sequence[StageSpan]) -> str:
    """How many units each stage has, in few words: ``5, 4 x3, 6``."""
    words = []
    for size, stages in groupby(past - first for first, past in spans):
        count = len(list(stages))
        words.append(str(size) if count == 1 else f"{size} x{count}")
    return ", ".join(words)


def _template(planner: Planner, template: Template) -> ShownTemplate:
    cut = template.cut
    planned = cut.planned_microbatches
    return ShownTemplate(
        cut.spans,
        planner.seconds(cut.work_of_slowest),
        planner.seconds(cut.planned_time),
        template.is_proven,
        _memory(planner.costs, cut.spans, planned),
    )


def _pipeline(planner: Planner, shape: PipelineShape, template: Template) -> ShownPipeline:
    return ShownPipeline(
        shape,
        tuple(planner.seconds(work) for work in template.cut.works),
        planner.seconds(template.pace.time(shape.num_microbatches)),
        planner.simulated_seconds(shape),
        _memory(planner.costs, shape.spans, shape.num_microbatches),
    )


def _memory(
    costs: UnitCosts, spans: Sequence[StageSpan], num_microbatches: int
) -> tuple[int, ...] | None:
    if not costs.has_bytes:
        return None
    return tuple(node.total(num_microbatches) for node in Memory(costs).of_cut(spans))


def _place(costs: UnitCosts, best: Proposal, zones: Mapping[str, str]) -> Placement:
    """Places for nodes that hold nothing yet."""
    sizes = {n: 1 if u.bytes is None else u.bytes.state for n, u in enumerate(costs.units)}
    return place_nodes(best.arrangement, list(zones), Holdings({}, sizes, zones))
