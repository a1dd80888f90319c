"""A pipeline is cut anew for the nodes that it has, one that joins included.

After a takeover one node does the work of two. With as many stages as there are nodes, and the
units shared out evenly over them, the slowest does less; so it is with a standby for which no place
is vacant. Who takes which place is decided by the fewest bytes that have to move, and each unit
comes from any live holder, in whatever pipeline. It is a planned change like any other: in its step
the new holders get state and final gradients, and the passed commit puts the new cut in force.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_bamboo.membership.decision import StepDecision
from megatron_bamboo.planner.arrangement import Arrangement, StageSpan
from megatron_bamboo.planner.cut import Cutter
from megatron_bamboo.planner.healing import first_open_step, next_plan, protected
from megatron_bamboo.planner.holders import held_by
from megatron_bamboo.planner.placement import Holdings, place_nodes
from megatron_bamboo.planner.plan import Change, PipelinePlan, Plan
from megatron_bamboo.planner.rebalancing import Balance
from megatron_bamboo.planner.transfers import Links, UnitTransfer, plan_transfers

FEWEST_STAGES = 2
"""A pipeline of one stage has no shadows, and keeps a tied weight once and not twice."""


@dataclass(frozen=True, slots=True)
class NewCut:
    """The pipeline that is to be cut anew, and who joins it."""

    pipeline: int
    joining: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Proposal:
    """What all pipelines are with a new cut of one, and what moves for it."""

    wanted: NewCut
    pipelines: tuple[PipelinePlan, ...]
    moves: tuple[UnitTransfer, ...]
    ticks_before: int
    """What an iteration takes as it is."""
    ticks_healed: int
    """With replicas made anew and other shares of the batch, and with the cuts that there are."""
    ticks: int
    """With the new cut."""

    @property
    def gains(self) -> bool:
        """Whether an iteration takes less than it would with the cuts that there are."""
        return self.ticks < self.ticks_healed

    @property
    def pipeline(self) -> PipelinePlan:
        """The one that is cut anew."""
        return self.pipelines[self.wanted.pipeline]


@dataclass(frozen=True, slots=True)
class Rearranging:
    """Proposes new cuts of one model's pipelines.

    Args:
        balance: by what the batch is shared out, and how fast pipelines are.
        unit_bytes: by unit, of its state.
    """

    balance: Balance
    unit_bytes: tuple[int, ...]
    shares_state: bool = False
    """Whether each pipeline has a share of the optimizer's state, which no other one can give."""

    def shrunk(self, plan: Plan) -> Proposal | None:
        """The best new cut of a pipeline whose nodes run several stages; None if none gains."""
        hit = [n for n, p in enumerate(plan.pipelines) if len(set(p.stages)) < len(p.stages)]
        return self._best(plan, [NewCut(number) for number in hit])

    def widened(self, plan: Plan, node: str) -> Proposal | None:
        """The best new cut of a pipeline that a standby joins; None if none gains."""
        # Of pipelines that are alike each would gain alike.
        alike: dict[object, int] = {}
        for number, pipeline in enumerate(plan.pipelines):
            if pipeline.stages:
                alike.setdefault((pipeline.placement(), pipeline.shape), number)
        return self._best(plan, [NewCut(number, (node,)) for number in alike.values()])

    def begun(self, plan: Plan, number: int, nodes: Sequence[str]) -> Proposal | None:
        """A dissolved pipeline on fewer standbys than it had nodes; None if that gains nothing."""
        return self._best(plan, [NewCut(number, tuple(nodes))])

    def _best(self, plan: Plan, wanted: Sequence[NewCut]) -> Proposal | None:
        proposals = [self.propose(plan, one) for one in wanted]
        gaining = [proposal for proposal in proposals if proposal is not None and proposal.gains]
        return min(gaining, key=lambda proposal: proposal.ticks, default=None)

    def propose(self, plan: Plan, wanted: NewCut) -> Proposal | None:
        """One new cut, whatever it gains; None where the pipeline cannot have it."""
        before = plan.pipelines[wanted.pipeline]
        nodes = tuple(dict.fromkeys((*before.stages, *wanted.joining)))
        most = (before.shape.num_units - 2) // before.shape.num_chunks
        if not FEWEST_STAGES <= len(nodes) <= most:
            return None
        if before.stages and before.shape.num_stages < FEWEST_STAGES:
            return None
        after = self._placed(before, nodes)
        total = plan.arrangement.total_microbatches
        cut = (*plan.pipelines[: wanted.pipeline], after, *plan.pipelines[wanted.pipeline + 1 :])
        shares, healed = self.balance.best(cut, total), tuple(map(protected, plan.pipelines))
        pipelines = shares.apply(cut)
        needed, sources = held_by([after]), [before] if self.shares_state else plan.pipelines
        moves = plan_transfers(needed, held_by(sources), self._links)
        assert not moves.lost_units, "each unit of a plan in force has a live holder"
        return Proposal(
            wanted,
            pipelines,
            moves.transfers,
            self.balance.ticks(plan.pipelines),
            self.balance.best(healed, total).ticks,
            shares.ticks,
        )

    def _placed(self, before: PipelinePlan, nodes: tuple[str, ...]) -> PipelinePlan:
        spans = self._spans(len(nodes) * before.shape.num_chunks)
        shape = replace(before.shape, spans=spans)
        stay = {node: (0, stage) for stage, node in reversed([*enumerate(before.stages)])}
        holdings = Holdings(held_by([before]), self._links.unit_bytes, stay=stay)
        (placed,) = place_nodes(Arrangement((shape,)), nodes, holdings).pipelines
        return protected(PipelinePlan(placed, (None,) * len(placed), placed, shape))

    def _spans(self, num_parts: int) -> tuple[StageSpan, ...]:
        """The best cut in which each part, a stage or a chunk of one, has a layer."""
        first, *others = self.balance.works
        *others, last = others
        layers = [*others]
        layers[0] += first
        layers[-1] += last
        cuts = Cutter(layers).best(num_parts).spans
        # Of the units the embedding comes before the layers, and the head after them.
        ends = [past + 1 for _, past in cuts[:-1]]
        return tuple(zip([0, *ends], [*ends, len(layers) + 2], strict=True))

    @property
    def _links(self) -> Links:
        return Links(dict(enumerate(self.unit_bytes)))


def rearrange(
    plan: Plan,
    decision: StepDecision | None,
    last_step: int,
    wanted: NewCut,
    rearranging: Rearranging,
) -> Plan:
    """The next epoch's plan: in its first step that is not applied a pipeline is cut anew.

    Args:
        decision: about the newest step.
        last_step: after it there is nothing to cut anew for.
    """
    before = plan.after(decision)
    follows, step = next_plan(before, decision), first_open_step(decision, last_step)
    proposal = rearranging.propose(before, wanted)
    if step > last_step or proposal is None or not proposal.gains:
        return replace(follows, reason="nothing is left to change")
    number = wanted.pipeline
    change = Change(step, (), proposal.pipelines, proposal.moves, (number,))
    # Who joins takes part in the step, behind the ranks that there are.
    joined = before.pipelines[number].with_joining(proposal.pipeline)
    pipelines = (*before.pipelines[:number], joined, *before.pipelines[number + 1 :])
    return replace(follows, pipelines=pipelines, change=change, reason=_reason(before, proposal))


def _reason(before: Plan, proposal: Proposal) -> str:
    number, after = proposal.wanted.pipeline, proposal.pipeline
    there = before.pipelines[number]
    sizes = ", ".join(str(past - first) for first, past in after.shape.spans)
    joining = "".join(f" with {node}" for node in proposal.wanted.joining if there.stages)
    what = f"is cut anew{joining}" if there.stages else "begins again"
    saved = 1 - proposal.ticks / proposal.ticks_healed
    words = (
        f"pipeline {number} {what}: {', '.join(after.stages)} have stages of {sizes} units instead "
        f"of {there.shape.num_stages} stages, for which {len(proposal.moves)} units move; an "
        f"iteration takes {saved:.0%} less than without that"
    )
    shares = [
        [p.shape.num_microbatches for p in ps] for ps in (before.pipelines, proposal.pipelines)
    ]
    if shares[0] == shares[1]:
        return words
    old, new = (", ".join(map(str, numbers)) for numbers in shares)
    return f"{words}; microbatches {old} become {new}"
