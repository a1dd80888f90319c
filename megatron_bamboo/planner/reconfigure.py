"""Which pipeline each live node belongs to, after losses, notices and arrivals: Oobleck's rules.

Every pipeline takes the template for the nodes that it has. One with too few borrows from the
largest that can spare a node; where none can, pipelines merge. Nodes that are free fill gaps before
anyone is borrowed, then make new pipelines or join the smallest. No node changes its pipeline that
need not. Who runs which stage, and what moves for it, is for ``placement`` and ``transfers``.
"""

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from enum import StrEnum

from megatron_bamboo.planner.arrangement import StageSpan
from megatron_bamboo.planner.places import Place
from megatron_bamboo.planner.regroup import Applied, Draft, PipelineNodes, Sizes


class Protection(StrEnum):
    """Whether the model survives the losses that it should."""

    PROTECTED = "protected"
    UNPROTECTED = "unprotected"
    TOO_FEW = "too few"


@dataclass(frozen=True, slots=True)
class Reconfiguration:
    """The new pipelines, who waits, what was done, and what it is worth."""

    pipelines: tuple[PipelineNodes, ...]
    before: tuple[int | None, ...]
    """By new pipeline the number that it had; None: it is new."""
    standbys: tuple[str, ...]
    applied: tuple[Applied, ...]
    protection: Protection
    reason: str

    def spans(
        self, template: Callable[[int], tuple[StageSpan, ...]]
    ) -> tuple[tuple[StageSpan, ...], ...]:
        """By pipeline its stages, from the template for its number of nodes."""
        return tuple(template(pipeline.num_stages) for pipeline in self.pipelines)

    def stay(self, old: Sequence[PipelineNodes]) -> dict[str, Place]:
        """By node of a pipeline that goes on its place there, as far as that is still one."""
        return {
            node: (number, old[before].nodes.index(node))
            for number, (pipeline, before) in enumerate(
                zip(self.pipelines, self.before, strict=True)
            )
            if before is not None
            for node in pipeline.nodes
            if node in old[before].nodes
        }


def reconfigure(
    old: Sequence[PipelineNodes],
    sizes: Sizes,
    leaving: Set[str] = frozenset(),
    free: Sequence[str] = (),
) -> Reconfiguration:
    """The pipelines of those who stay.

    Args:
        leaving: nodes that are lost, and those that go because of a notice.
        free: newcomers and standbys, as many as may be used.
    """
    named = [node for pipeline in old for node in pipeline.nodes] + [*free]
    assert len(set(named)) == len(named), "a node has one pipeline, or is free"
    draft = Draft(sizes, [node for node in free if node not in leaving])
    draft.drop(old, leaving)
    draft.merge()
    draft.fill()
    draft.shorten()
    draft.split()
    draft.grow()
    draft.resize(old)
    protection, reason = _protection(draft)
    return Reconfiguration(
        tuple(PipelineNodes(tuple(p.nodes), len(p.nodes)) for p in draft.pipelines),
        tuple(pipeline.before for pipeline in draft.pipelines),
        tuple(draft.free),
        tuple(draft.applied),
        protection,
        reason,
    )


def _protection(draft: Draft) -> tuple[Protection, str]:
    has, least = draft.num_nodes, draft.sizes.least
    needed = draft.sizes.fault_tolerance + 1
    number = len(draft.pipelines)
    if number >= needed:
        return Protection.PROTECTED, f"{number} pipelines, {needed} are needed"
    if not number:
        return (
            Protection.TOO_FEW,
            f"{has} live nodes do not hold the model: add {least - has} for one pipeline",
        )
    return (
        Protection.UNPROTECTED,
        f"{number} of {needed} pipelines: {has} live nodes, "
        f"add {needed * least - has} to survive {needed - 1} lost",
    )
