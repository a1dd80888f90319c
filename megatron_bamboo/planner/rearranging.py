"""Pipelines are cut anew for the nodes that they have, or get.

After a takeover one node does the work of two. With as many stages as there are nodes, and the
units shared out evenly over them, the slowest does less; so it is with a standby for which no place
is vacant, and with a node of another pipeline, which is cut anew for those who are left
(``lending.py``). Who takes which place is decided by the fewest bytes that have to move, and each
unit comes from any live holder, in whatever pipeline. It is a planned change like any other: in its
step the new holders get state and final gradients, and the passed commit puts the new cut in force.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from megatron_bamboo.membership.decision import StepDecision
from megatron_bamboo.planner.arrangement import Arrangement, PipelineShape, StageSpan
from megatron_bamboo.planner.cut import Cutter
from megatron_bamboo.planner.healing import first_open_step, next_plan, protected
from megatron_bamboo.planner.holders import held_by
from megatron_bamboo.planner.lending import lendings
from megatron_bamboo.planner.new_cut import FEWEST_STAGES, NewCut, crew_of
from megatron_bamboo.planner.placement import Holdings, place_nodes
from megatron_bamboo.planner.plan import Change, PipelinePlan, Plan, dissolved
from megatron_bamboo.planner.rebalancing import Balance
from megatron_bamboo.planner.transfers import Links, UnitTransfer, plan_transfers


@dataclass(frozen=True, slots=True)
class Proposal:
    """What all pipelines are with a new cut, and what moves for it."""

    wanted: NewCut
    pipelines: tuple[PipelinePlan, ...]
    moves: tuple[UnitTransfer, ...]
    joining: tuple[str, ...]
    """The nodes that have no place so far."""
    ticks_before: int
    """What an iteration takes as it is."""
    ticks_healed: int
    """With replicas made anew and other shares of the batch, and with the cuts that there are."""
    ticks: int
    """With the new cut."""
    num_alone: tuple[int, int]
    """How many pipelines one node alone runs, with the cuts that there are and with the new one."""
    is_needed: bool
    """Whether a pipeline gets nodes without which its stages should not be, or is no more."""

    @property
    def gains(self) -> bool:
        """Whether an iteration takes less than it would with the cuts that there are."""
        return self.ticks < self.ticks_healed

    @property
    def protects(self) -> bool:
        """Whether a pipeline gets shadows that has none."""
        before, after = self.num_alone
        return after < before

    @property
    def is_good(self) -> bool:
        """Whether it is good for anything; what that is worth is another question."""
        return self.gains or self.protects or self.is_needed

    @property
    def first(self) -> PipelinePlan:
        """The first one that is cut anew."""
        return self.pipelines[self.wanted.numbers[0]]


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
    least_nodes: int = FEWEST_STAGES
    """For fewer no pipeline begins again, and none gives a node away."""
    is_needed: bool = False
    """Whether one that has fewer must get some."""

    def shrunk(self, plan: Plan) -> Proposal | None:
        """The best new cut of a pipeline whose nodes run several stages; None if none gains."""
        hit = [n for n, p in enumerate(plan.pipelines) if len(set(p.stages)) < len(p.stages)]
        return self._best(plan, [NewCut.of(plan, number) for number in hit])

    def widened(self, plan: Plan, node: str) -> Proposal | None:
        """The best new cut of a pipeline that a standby joins; None if none gains."""
        # Of pipelines that are alike each would gain alike.
        alike: dict[object, int] = {}
        for number, pipeline in enumerate(plan.pipelines):
            if pipeline.stages:
                alike.setdefault((pipeline.placement(), pipeline.shape), number)
        return self._best(plan, [NewCut.of(plan, number, (node,)) for number in alike.values()])

    def begun(self, plan: Plan, number: int, nodes: Sequence[str]) -> Proposal | None:
        """A dissolved pipeline on fewer standbys than it had nodes; None if that gains nothing."""
        return self._best(plan, [NewCut.of(plan, number, nodes)])

    def lent(self, plan: Plan) -> tuple[Proposal, ...]:
        """The ways to share out anew the nodes that there are, the fastest first."""
        if self.shares_state:
            return ()  # nobody in another pipeline has the share of this one
        shape = plan.pipelines[plan.first_pipeline].shape
        return self._good(plan, lendings(plan, self.least_nodes, _most_stages(shape)))

    def _best(self, plan: Plan, wanted: Iterable[NewCut]) -> Proposal | None:
        return next(iter(self._good(plan, wanted)), None)

    def _good(self, plan: Plan, wanted: Iterable[NewCut]) -> tuple[Proposal, ...]:
        proposals = (self.propose(plan, one) for one in wanted)
        good = [proposal for proposal in proposals if proposal is not None and proposal.is_good]
        return tuple(sorted(good, key=lambda proposal: proposal.ticks))

    def propose(self, plan: Plan, wanted: NewCut) -> Proposal | None:
        """One new cut, whatever it gains; None where the pipelines cannot have it."""
        if not all(self._can_have(plan.pipelines[number], nodes) for number, nodes in wanted.crews):
            return None
        placed = self._placed(plan, wanted)
        cut = [placed.get(number, pipe) for number, pipe in enumerate(plan.pipelines)]
        total = plan.arrangement.total_microbatches
        if not self.balance.can_share(cut, total):
            return None
        shares, healed = self.balance.best(cut, total), tuple(map(protected, plan.pipelines))
        pipelines = shares.apply(cut)
        needed = held_by([pipelines[number] for number in wanted.numbers])
        moves = plan_transfers(needed, self._sources(plan, wanted.numbers), self._links)
        assert not moves.lost_units, "each unit of a plan in force has a live holder"
        return Proposal(
            wanted,
            pipelines,
            moves.transfers,
            tuple(n for _, nodes in wanted.crews for n in nodes if n not in plan.nodes),
            self.balance.ticks(plan.pipelines),
            self.balance.best(healed, total).ticks,
            shares.ticks,
            (_num_below(FEWEST_STAGES, healed), _num_below(FEWEST_STAGES, pipelines)),
            self.is_needed
            and _num_below(self.least_nodes, pipelines) < _num_below(self.least_nodes, healed),
        )

    def _can_have(self, before: PipelinePlan, nodes: Sequence[str]) -> bool:
        if before.stages and before.shape.num_stages < FEWEST_STAGES:
            return False
        keeps_all = bool(before.stages) and set(before.stages) <= set(nodes)
        # Who loses nobody goes on with those that run its stages already, however few.
        least = FEWEST_STAGES if keeps_all else self.least_nodes
        return not nodes or least <= len(nodes) <= _most_stages(before.shape)

    def _placed(self, plan: Plan, wanted: NewCut) -> dict[int, PipelinePlan]:
        """By number the pipelines on the nodes of their crews; these may be exchanged among them
        where fewer bytes move then."""
        before = {number: plan.pipelines[number] for number in wanted.numbers}
        shapes = {
            number: self._cut(before[number].shape, len(nodes))
            for number, nodes in wanted.crews
            if nodes
        }
        stay = {
            node: (place, stage)
            for place, number in enumerate(shapes)
            for stage, node in reversed([*enumerate(before[number].stages)])
        }
        held = self._sources(plan, wanted.numbers)
        nodes = [node for _, crew in wanted.crews for node in crew]
        holdings = Holdings(held, self._links.unit_bytes, stay=stay)
        placement = place_nodes(Arrangement(tuple(shapes.values())), nodes, holdings)
        after = {number: dissolved(pipeline) for number, pipeline in before.items()}
        for (number, shape), placed in zip(shapes.items(), placement.pipelines, strict=True):
            none: tuple[str | None, ...] = (None,) * len(placed)
            after[number] = protected(PipelinePlan(placed, none, placed, shape))
        return after

    def _cut(self, shape: PipelineShape, num_stages: int) -> PipelineShape:
        return replace(shape, spans=self._spans(num_stages * shape.num_chunks))

    def _sources(self, plan: Plan, numbers: Sequence[int]) -> dict[str, frozenset[int]]:
        """Who can give the state that some pipelines need."""
        own = [plan.pipelines[number] for number in numbers]
        return held_by(own if self.shares_state else plan.pipelines)

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
    """The next epoch's plan: in its first step that is not applied pipelines are cut anew.

    Args:
        decision: about the newest step.
        last_step: after it there is nothing to cut anew for.
    """
    before = plan.after(decision)
    follows, step = next_plan(before, decision), first_open_step(decision, last_step)
    proposal = rearranging.propose(before, wanted)
    if step > last_step or proposal is None or not proposal.is_good:
        return replace(follows, reason="nothing is left to change")
    change = Change(step, (), proposal.pipelines, proposal.moves, wanted.numbers)
    # Who joins takes part in the step, behind the ranks that there are; who changes the pipeline
    # does so in its old place.
    pipelines = tuple(
        now.with_joining([node for node in later.ranks if node in proposal.joining])
        for now, later in zip(before.pipelines, proposal.pipelines, strict=True)
    )
    return replace(follows, pipelines=pipelines, change=change, reason=_reason(before, proposal))


def _most_stages(shape: PipelineShape) -> int:
    """With each chunk of a stage a layer at least."""
    return (shape.num_units - 2) // shape.num_chunks


def _num_below(least: int, pipelines: Iterable[PipelinePlan]) -> int:
    """How many have nodes, and fewer than so many."""
    return sum(0 < len(crew_of(pipeline)) < least for pipeline in pipelines)


def _reason(before: Plan, proposal: Proposal) -> str:
    parts = [_what(before, proposal, number) for number in proposal.wanted.numbers]
    saved = 1 - proposal.ticks / proposal.ticks_healed
    words = (
        f"{'; '.join(parts)}, for which {len(proposal.moves)} units move; an iteration takes "
        f"{abs(saved):.0%} {'less' if saved >= 0 else 'more'} than without that"
    )
    shares = [
        [p.shape.num_microbatches for p in ps] for ps in (before.pipelines, proposal.pipelines)
    ]
    if shares[0] == shares[1]:
        return words
    old, new = (", ".join(map(str, numbers)) for numbers in shares)
    return f"{words}; microbatches {old} become {new}"


def _what(before: Plan, proposal: Proposal, number: int) -> str:
    """What becomes of one pipeline."""
    there, after = before.pipelines[number], proposal.pipelines[number]
    if not after.stages:
        return f"pipeline {number} is dissolved, and its nodes join others"
    new = [node for node in after.stages if node not in there.stages]
    joining = f" with {', '.join(new)}" if new and there.stages else ""
    what = f"is cut anew{joining}" if there.stages else "begins again"
    sizes = ", ".join(str(past - first) for first, past in after.shape.spans)
    return (
        f"pipeline {number} {what}: {', '.join(after.stages)} have stages of {sizes} units instead "
        f"of {there.shape.num_stages} stages"
    )
