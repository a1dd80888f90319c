"""A job as it goes through a trace: what its policy decides happens, and takes what it takes.

The plans are those of the runtime, and what follows a loss is worked out by the same functions.
Here iterations pass, and whatever is under way when nodes come or are taken is carried out, broken
off or begun anew as the policy says.
"""

from contextlib import suppress
from dataclasses import dataclass

from megatron_bamboo.planner.plan import Plan
from megatron_bamboo.recovery.decision import Action, Decision, Reason
from megatron_bamboo.recovery.policy import Policy
from megatron_bamboo.recovery.prices import Prices
from megatron_bamboo.recovery.times import IterationTimes
from megatron_bamboo.recovery.view import Event, Joined, Lost, Passed
from megatron_bamboo.simulator.timeline import Kind, Piece
from megatron_bamboo.simulator.trace import Trace
from megatron_bamboo.simulator.world import Over, World


@dataclass(frozen=True, slots=True)
class Decided:
    """A decision, when it was made, and why."""

    seconds: float
    event: Event
    action: Action
    reason: Reason


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a job under one policy."""

    pieces: tuple[Piece, ...]
    iterations: int
    """That count in the end."""
    lost_iterations: float
    """That had to be done again, and parts of such."""
    decisions: tuple[Decided, ...]
    """But for those that nothing changes, of which only the first after a change is here."""


@dataclass(frozen=True, slots=True)
class _Planned:
    """A change whose state is on its way."""

    decision: Decision
    plan: Plan
    """In which it was decided."""
    due: float


def run_through(trace: Trace, policy: Policy, times: IterationTimes, prices: Prices) -> Outcome:
    """The whole trace under one policy; the job begins when its first nodes have started."""
    run = _Run(trace, policy, times, prices)
    with suppress(Over):
        run.begin()
        while True:
            run.iterate()
    return run.outcome()


class _Run:
    """Where the job is."""

    def __init__(self, trace: Trace, policy: Policy, times: IterationTimes, prices: Prices) -> None:
        self._world = World(trace, prices.start_seconds)
        self._policy = policy
        self._times = times
        self._prices = prices
        self._planned: _Planned | None = None
        self._step = self._saved_step = 0
        self._lost_iterations = 0.0
        self._decisions: list[Decided] = []

    def begin(self) -> None:
        """Wait until those who are starting have started, and make the first plan of them."""
        world = self._world
        while world.starting or not world.standbys:
            world.wait()
            world.admit()
        self._recover(self._decide(Joined(tuple(world.standbys))))

    def iterate(self) -> None:
        """One iteration, and what comes between it and the next."""
        assert self._world.plan is not None
        seconds = self._times.of(self._world.plan.pipelines)
        if self._carry_out(Kind.TRAINING, seconds):
            self._step += 1
            self._between_steps()

    def outcome(self) -> Outcome:
        """What has become of the job so far."""
        decisions = tuple(self._decisions)
        return Outcome(self._world.pieces, self._step, self._lost_iterations, decisions)

    def _between_steps(self) -> None:
        if self._step % self._prices.save_interval == 0:
            if not self._carry_out(Kind.SAVING, self._prices.save_seconds):
                return
            self._saved_step = self._step
        if not self._make_planned():
            return
        self._world.admit()
        if self._planned is None:
            decision, plan = self._decide(Passed(self._step)), self._world.plan
            if decision.in_background:
                assert plan is not None
                due = self._world.now + decision.move_seconds
                self._planned = _Planned(decision, plan, due)
            else:
                self._recover(decision)

    def _make_planned(self) -> bool:
        """Make the change that is due, if one is; False if training was broken off."""
        planned = self._planned
        if planned is None or not self._is_possible(planned):
            self._planned = None
        elif planned.due <= self._world.now:
            self._planned = None
            if not self._carry_out(Kind.RECONFIGURATION, self._prices.switch_seconds):
                return False
            if self._is_possible(planned):
                self._world.adopt(planned.decision.pipelines)
        return True

    def _is_possible(self, planned: _Planned) -> bool:
        """Whether nothing has come between."""
        world = self._world
        return planned.plan is world.plan and _nodes(planned.decision) <= {*world.nodes}

    def _carry_out(self, kind: Kind, seconds: float) -> bool:
        """Something that takes so long, with takeovers on the way; False if it was broken off."""
        left, longer = seconds, 0.0
        step = self._step + 1 if kind is Kind.TRAINING else 0
        while left or longer:
            if longer:
                elapsed, hit = self._world.spend(Kind.TAKEOVER, longer)
                longer -= elapsed
            else:
                elapsed, hit = self._world.spend(kind, left, step)
                left -= elapsed
            if not hit:
                continue
            decision = self._decide(Lost(hit))
            if decision.action is not Action.TAKE_OVER:
                if kind is Kind.TRAINING:
                    self._lost_iterations += 1 - left / seconds
                    self._world.forget(self._step)
                self._recover(decision)
                return False
            longer += self._prices.takeover_seconds
            if kind is Kind.TRAINING:
                longer += self._stretch(seconds - left)
            self._world.adopt(decision.pipelines)
        return True

    def _stretch(self, elapsed: float) -> float:
        """How much longer an iteration takes in which shadows take over."""
        assert self._world.plan is not None
        return self._times.stretch(self._world.plan.pipelines, self._world.lost, elapsed)

    def _recover(self, decision: Decision) -> None:
        """What the policy decides, and decides anew where nodes are lost meanwhile, until training
        can go on."""
        self._planned = self._planned if decision.action is Action.STAY else None
        while decision.action is not Action.STAY:
            self._world.awaited = frozenset(_nodes(decision))
            kind, seconds = Kind.RECONFIGURATION, self._prices.reconfigure_seconds
            match decision.action:
                case Action.WAIT:
                    decision = self._decide(self._wait(decision.saves))
                    continue
                case Action.RESTORE:
                    self._roll_back()
                    kind, seconds = Kind.RESTORE, self._prices.restore_seconds
                case _:
                    assert decision.action is Action.RECONFIGURE, decision
                    seconds += decision.move_seconds
            _, hit = self._world.spend(kind, seconds)
            if not hit:
                self._world.adopt(decision.pipelines)
                break
            decision = self._decide(Lost(hit))
        self._world.awaited = frozenset()

    def _wait(self, saves: bool) -> Event:
        """For other nodes; those who have all state save it first."""
        if saves:
            _, hit = self._world.spend(Kind.SAVING, self._prices.save_seconds)
            if hit:
                return Lost(hit)
            self._saved_step = self._step
        lost = self._world.wait()
        return Lost(lost) if lost else Joined(self._world.admit())

    def _roll_back(self) -> None:
        """All are free to start anew, and what came after the checkpoint is to be done again."""
        self._world.dissolve()
        self._lost_iterations += self._step - self._saved_step
        self._step = self._saved_step
        self._world.forget(self._step)

    def _decide(self, event: Event) -> Decision:
        world, decisions = self._world, self._decisions
        view = world.view(self._step, self._saved_step)
        decision, reason = self._policy.decide(view, event, world.now)
        is_change = decision.action is not Action.STAY
        if is_change or (decisions and decisions[-1].action is not Action.STAY):
            decisions.append(Decided(world.now, event, decision.action, reason))
        return decision


def _nodes(decision: Decision) -> set[str]:
    """Who has a place once it is carried out."""
    return {node for pipeline in decision.pipelines for node in pipeline.stages}
