"""What is changed between two steps, when a step has passed and nodes are missing or have come.

Nothing here is urgent. Bamboo and ``auto`` plan changes whose state moves while the training goes
on; Oobleck stops for its rules, and a job with checkpoints alone starts anew if that pays.
"""

from dataclasses import dataclass

from megatron_bamboo.planner.healing import protected, vacancies, with_standby
from megatron_bamboo.planner.plan import PipelinePlan, Plan
from megatron_bamboo.planner.rebalancing import Balance
from megatron_bamboo.recovery.decision import Action, Decision, Reason, Verdict
from megatron_bamboo.recovery.names import PolicyName
from megatron_bamboo.recovery.outlook import Weighing, expected_seconds
from megatron_bamboo.recovery.prices import Prices
from megatron_bamboo.recovery.prospects import Prospect, Prospects, numbers_of
from megatron_bamboo.recovery.view import Event, View


@dataclass(frozen=True, slots=True)
class _Looked:
    """What there is to choose from for some plan and standbys."""

    plan: Plan
    standbys: tuple[str, ...]
    healed: Prospect | None
    others: tuple[Prospect, ...]


class BetweenSteps:
    """The answers of one policy; arguments as those of ``Policy``."""

    def __init__(self, name: PolicyName, prospects: Prospects, prices: Prices) -> None:
        self._name = name
        self._prospects = prospects
        self._prices = prices
        self._balance = Balance(prospects.works, name.redundancy)
        # Asked after each step, while for long nothing changes but the time.
        self._looked: _Looked | None = None

    def answer(self, view: View, plan: Plan, event: Event, now: float) -> Verdict:
        """What is planned now that no node of the plan is missing."""
        looked = self._look(view, plan)
        match self._name:
            case PolicyName.BAMBOO:
                return self._heal(looked, event)
            case PolicyName.OOBLECK:
                return self._take_in(looked, event)
            case PolicyName.CHECKPOINT:
                return self._start_anew(looked, view, event, now)
            case PolicyName.AUTO:
                return self._weigh(looked, view, event, now)

    def _look(self, view: View, plan: Plan) -> _Looked:
        last = self._looked
        if last is None or (last.plan, last.standbys) != (plan, view.standbys):
            last = self._looked = _Looked(plan, view.standbys, *self._find(view, plan))
        return last

    def _find(self, view: View, plan: Plan) -> tuple[Prospect | None, tuple[Prospect, ...]]:
        """How the pipelines can be healed, and which others there could be."""
        prospects = self._prospects
        match self._name:
            case PolicyName.BAMBOO:
                return self._healed(view, plan), ()
            case PolicyName.OOBLECK:
                found = [prospects.by_rules(view) if view.standbys else None]
            case PolicyName.CHECKPOINT:
                found = [prospects.afresh(view.nodes) if view.standbys else None]
            case PolicyName.AUTO:
                found = [prospects.by_rules(view), prospects.fastest(view)]
        healed = self._healed_at_once(view, plan) if self._name is PolicyName.AUTO else None
        return healed, tuple(p for p in found if p is not None)

    def _healed(self, view: View, plan: Plan) -> Prospect | None:
        """A standby in a victim's place, and all replicas that there can be; None if that is what
        there is."""
        pipelines = list(map(protected, plan.pipelines))
        words = "replicas are made anew"
        if view.standbys and (places := vacancies(plan)):
            number, rank, node = places[0].pipeline, places[0].rank, view.standbys[0]
            pipelines[number] = with_standby(plan.pipelines[number], rank, node)
            words = f"{node} takes stage {rank} of pipeline {number}"
        after = tuple(pipelines)
        if self._name is PolicyName.AUTO:
            after, words = self._balanced(plan, after, words)
        return None if after == plan.pipelines else self._prospects.healed(plan, after, words)

    def _healed_at_once(self, view: View, plan: Plan) -> Prospect | None:
        """As above, but where its state moves for longer than an iteration other shares of the
        batch come first: they move nothing."""
        healed = self._healed(view, plan)
        if healed is None or healed.move_seconds <= self._prospects.times.of(plan.pipelines):
            return healed
        alone, words = self._balanced(plan, plan.pipelines, "")
        return healed if alone == plan.pipelines else self._prospects.healed(plan, alone, words)

    def _balanced(
        self, plan: Plan, after: tuple[PipelinePlan, ...], words: str
    ) -> tuple[tuple[PipelinePlan, ...], str]:
        """With other shares of the batch if these make an iteration shorter, and the reason."""
        better = self._balance.better(after)
        if better is None:
            return after, words
        balanced, seconds = better.apply(after), self._prospects.times.of
        if seconds(balanced) >= seconds(after):
            return after, words
        return balanced, better.reason if after == plan.pipelines else f"{words}; {better.reason}"

    def _heal(self, looked: _Looked, event: Event) -> Verdict:
        """Bamboo."""
        if looked.healed is None:
            return _stay(event, "nothing can be healed")
        return _in_background(looked, looked.healed, event, None)

    def _weigh(self, looked: _Looked, view: View, event: Event, now: float) -> Verdict:
        """``auto``: other shares of the batch at once, else other pipelines where they pay more
        than healing does, else that."""
        expected, healed = expected_seconds(view.history, now), looked.healed
        before = self._prospects.times.of(looked.plan.pipelines)

        def weigh(prospect: Prospect) -> Weighing:
            after, moving = prospect.iteration_seconds, prospect.move_seconds
            return Weighing(expected, before, after, moving, self._prices.switch_seconds)

        if healed is not None and _is_rebalanced(looked) and healed.move_seconds <= before:
            return _in_background(looked, healed, event, weigh(healed))
        best = max(looked.others, key=lambda prospect: weigh(prospect).changed, default=None)
        least = 0.0 if healed is None else weigh(healed).changed
        if best is not None and weigh(best).pays and weigh(best).changed > least:
            return _in_background(looked, best, event, weigh(best))
        if healed is not None:
            return _in_background(looked, healed, event, weigh(healed))
        if best is None:
            return _stay(event, "there are no other pipelines")
        return _stay(event, "no other pipelines pay", best, weigh(best))

    def _take_in(self, looked: _Looked, event: Event) -> Verdict:
        """Oobleck: by the rules, whatever it costs, while all wait."""
        if not looked.others:
            return _stay(event, "nobody has come")
        (best,) = looked.others
        if _nodes(best.pipelines) == _nodes(looked.plan.pipelines):
            return _stay(event, best.why, best)
        decision = Decision(Action.RECONFIGURE, best.pipelines, best.move_seconds)
        return decision, Reason(f"{event}; {best.why}", numbers_of(best))

    def _start_anew(self, looked: _Looked, view: View, event: Event, now: float) -> Verdict:
        """A job with checkpoints alone: with newcomers, if that pays for doing steps again."""
        if not looked.others:
            return _stay(event, "nobody has come")
        (best,) = looked.others
        before = self._prospects.times.of(looked.plan.pipelines)
        pause = self._prices.restore_seconds + (view.step - view.saved_step) * before
        expected = expected_seconds(view.history, now)
        weighing = Weighing(expected, before, best.iteration_seconds, 0.0, pause)
        if not weighing.pays:
            return _stay(
                event, "it does not pay to start anew with those who have come", best, weighing
            )
        words = f"{event}; it pays to start anew: {best.why}, from step {view.saved_step}"
        return Decision(Action.RESTORE, best.pipelines), Reason(words, numbers_of(best, weighing))


def _in_background(
    looked: _Looked, prospect: Prospect, event: Event, weighing: Weighing | None
) -> Verdict:
    """A planned change, named by what it changes most."""
    pipelines = prospect.pipelines
    if prospect is not looked.healed:
        action = Action.RECONFIGURE
    else:
        action = Action.HEAL if prospect.moved_bytes else Action.REBALANCE
    decision = Decision(action, pipelines, prospect.move_seconds, in_background=True)
    return decision, Reason(f"{event}; {prospect.why}", numbers_of(prospect, weighing))


def _stay(
    event: Event, words: str, prospect: Prospect | None = None, weighing: Weighing | None = None
) -> Verdict:
    numbers = {} if prospect is None else numbers_of(prospect, weighing)
    return Decision(Action.STAY), Reason(f"{event}; {words}", numbers)


def _nodes(pipelines: tuple[PipelinePlan, ...]) -> set[frozenset[str]]:
    return {frozenset(pipeline.stages) for pipeline in pipelines}


def _is_rebalanced(looked: _Looked) -> bool:
    """Whether healing shares the batch out anew."""
    assert looked.healed is not None
    pairs = zip(looked.plan.pipelines, looked.healed.pipelines, strict=True)
    return any(a.shape.num_microbatches != b.shape.num_microbatches for a, b in pairs)
