"""A worker's view of its pipeline: which schedule is in force, and what a plan changes in it.

No communication happens here; everything follows from the plan, the options and the progress.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from megatron_bamboo.execution.epochs import StepProgress
from megatron_bamboo.planner.arrangement import PipelineShape
from megatron_bamboo.planner.holders import units_held
from megatron_bamboo.planner.plan import Change, PipelinePlan, Plan, Transfer
from megatron_bamboo.schedule.actions import SEND_OPS, Action, Op
from megatron_bamboo.schedule.costs import Costs
from megatron_bamboo.schedule.generate import compute_schedule
from megatron_bamboo.schedule.mirrors import covered_by, mirrored_microbatches
from megatron_bamboo.schedule.redundancy import Redundancy
from megatron_bamboo.schedule.schedule import (
    MAX_MICROBATCHES,
    Program,
    Schedule,
    count_promoted,
    no_work,
)
from megatron_bamboo.schedule.steady import steady_schedule
from megatron_bamboo.schedule.tail import (
    NO_HANDOVER,
    Handover,
    Move,
    gather_program,
    mend_program,
    state_sends,
    tail_program,
)
from megatron_bamboo.schedule.takeover import (
    Progress,
    mirrors_used,
    surviving_progress,
    take_over,
)


@dataclass(frozen=True, slots=True)
class _Loss:
    """A victim, and what survivors had done then."""

    victim: int
    published: Mapping[int, StepProgress]

    def progress_in(self, step: int, attempt: int) -> dict[int, Progress]:
        """By rank, the progress of those who were in this attempt at a step."""
        return {
            rank: made.progress
            for rank, made in self.published.items()
            if (made.step, made.attempt) == (step, attempt)
        }


@dataclass(frozen=True, slots=True)
class _Foreseen:
    """A takeover that was worked out before it was asked for."""

    schedule: Schedule
    victim: int
    known: Mapping[int, Progress]
    remaining: Schedule


@dataclass(frozen=True, slots=True)
class _Awaited:
    """The messages that a schedule has for this worker where a plan has placed its stages."""

    schedule: Schedule
    pipeline: PipelinePlan
    moving: tuple[tuple[Move, ...], Mapping[int, str], tuple[int, ...]]
    """The moves, what is fetched, and the units that are taken."""
    senders: tuple[tuple[Action, str], ...]


class PipelineView:
    """The pipeline that one worker belongs to, as it stands."""

    def __init__(
        self,
        node: str,
        plan: Plan,
        redundancy: Redundancy,
        costs: Costs,
        tied: bool,
        sharded: bool,
        num_mirrors: int = 0,
        max_deferred: int = MAX_MICROBATCHES,
        verifies_in: Callable[[int], bool] = lambda step: False,
    ) -> None:
        self.node = node
        self._is_tied = tied
        self.sharded = sharded
        self._redundancy = redundancy
        self._costs = costs
        self._num_mirrors = num_mirrors
        self._max_deferred = max_deferred
        self._verifies_in = verifies_in
        self.moving_step = 0
        """The newest step in which state moves, in any pipeline; 0: there has been none."""
        self.recut_step = 0
        """The newest step in which pipelines are cut anew."""
        self._redone = (0, 0)
        """The newest step that was begun anew, and in which epoch."""
        self._changed_after = 0
        """Up to this step another schedule was in force: what was done in it counts no more."""
        self.adopted: tuple[Action, ...] = ()
        """The receives of the mirrors from which this worker goes on since the newest plan."""
        self.set_plan(plan)
        self._begin_anew()

    @property
    def shape(self) -> PipelineShape:
        """What the stages of this pipeline are."""
        return self.pipeline.shape

    @property
    def tied(self) -> bool:
        """Whether the first stage and the last one have a weight in common."""
        return self._is_tied and len(self.pipeline.stages) > 1

    @property
    def _own_program(self) -> Program:
        """Of the forward and backward passes; none for who joins while another has its rank."""
        programs = self.in_force.programs
        return programs[self.rank] if self.rank < len(programs) else ()

    def begin_step(self, step: int) -> Program:
        """The program of a step, tail included.

        Where others were already in this step when a node was lost, what they had done in it
        counts: the takeover is then one in the middle of this step.
        """
        hit: Schedule | None = None
        for loss in self._losses:
            made = loss.progress_in(step, self.attempt(step))
            if made or hit is not None:
                hit = take_over(hit or self._steady, loss.victim, made)
            self._steady = take_over(self._steady, loss.victim, {})
        self.in_force = hit or self._steady
        self._losses.clear()
        needed = (*self.state_sends(step), *self.state_needed(step))
        return (*needed, *self._own_program, *self.tail(step))

    def tail(self, step: int) -> Program:
        """The tail of a step under the placement in force."""
        moves, verifies = self.moves(step), self._verifies_in(step)
        alike = self.arrangement.is_cut_alike
        # A pipeline that only begins needs its state no sooner.
        fetched = self.fetched(step) if self.pipeline.begins else ()
        more = moves, verifies, alike, fetched, self.handover(step)
        return tail_program(self.in_force, self.rank, self.tied, self.sharded, *more)

    def collectives(self) -> Program:
        """What this worker does together with others in a step, in its order."""
        commit = Action(self.rank, None, Op.COMMIT, None)
        stages = self.in_force.stages_of(self.rank)
        reduces = (Action(stage, None, Op.REDUCE, None) for stage in stages)
        return (*reduces, commit, *self.gathers())

    def gathers(self) -> Program:
        """What is gathered after a step, under the placement in force."""
        if not self.sharded:
            return ()
        return gather_program(self.in_force, self.rank, self.arrangement.is_cut_alike)

    def mends(self, stages: Collection[int]) -> Program:
        """How these stages' right state is given or got, after the gathers of a step."""
        return mend_program(self.in_force, self.rank, stages, self.arrangement.is_cut_alike)

    def moves(self, step: int) -> tuple[Move, ...]:
        """The state that moves within this pipeline in a step."""
        return self._moves if step == self.moving_step else ()

    def fetched(self, step: int) -> dict[int, str]:
        """By stage whose state comes here from another pipeline in a step, who sends it."""
        return self._fetched if step == self.moving_step else {}

    def state_needed(self, step: int) -> Program:
        """The receives of the state without which nothing can be computed in a step."""
        stages = () if self.pipeline.begins else sorted(self.fetched(step))
        return tuple(Action(stage, None, Op.RECV_STATE, None) for stage in stages)

    def given(self, stage: int, step: int) -> tuple[str, ...]:
        """To whom this worker sends a stage's state in a step, in whatever pipeline."""
        return tuple(self._given.get(stage, ())) if step == self.moving_step else ()

    def unit_targets(self, unit: int) -> tuple[str, ...]:
        """To whom this worker sends a unit, in the step in which pipelines are cut anew."""
        return tuple(self._unit_targets.get(unit, ()))

    def unit_source(self, unit: int) -> str | None:
        """Who sends a unit to this worker then; None where it holds it itself."""
        return self._unit_sources.get(unit)

    def handover(self, step: int) -> Handover:
        """What this worker gives and takes in a step since pipelines are cut anew."""
        if step != self.recut_step:
            return NO_HANDOVER
        return Handover(tuple(sorted(self._unit_targets)), self._units_taken)

    def state_sends(self, step: int) -> Program:
        """What is to be sent first in a step in which state moves."""
        stages = self._given if step == self.moving_step else ()
        return state_sends(stages, self.handover(step).given)

    def refreshed(self, stage: int, step: int) -> tuple[str, ...]:
        """The nodes that need a stage's final gradient: its replica's and its new holders'."""
        moving = [self.pipeline.ranks[m.target] for m in self.moves(step) if m.stage == stage]
        replica = self.pipeline.replicas[stage]
        return tuple(moving if replica is None else [replica, *moving])

    def remaining(self, done: Sequence[Action] = ()) -> Program:
        """What takeovers left for this worker, without tail and without what it has done since."""
        finished = count_promoted(self.in_force, done)
        return tuple(
            action
            for action in self._own_program
            if action not in finished and _consumer_of(action) not in finished
        )

    def awaited(self, step: int) -> tuple[tuple[Action, str], ...]:
        """The actions left for this worker that take a message from another node, and which node.

        From one undisturbed step to the next they are the same.
        """
        held, handover = self._awaited, self.handover(step)
        moving = self.moves(step), self.fetched(step), handover.taken
        if (
            held is None
            or held.schedule is not self.in_force
            or held.pipeline is not self.pipeline
            or held.moving != moving
        ):
            program = (*self.state_needed(step), *self.remaining(), *self.tail(step))
            senders = ((a, self.sender_of(a)) for a in program)
            others = tuple((action, node) for action, node in senders if node != self.node)
            held = self._awaited = _Awaited(self.in_force, self.pipeline, moving, others)
        return held.senders

    def victims(self, plan: Plan) -> tuple[int, ...]:
        """The ranks of this pipeline that a plan says are lost, and that ran some stage."""
        rank_of = self.pipeline.ranks.index
        return tuple(sorted(rank_of(node) for node in plan.lost if node in self.pipeline.stages))

    def survivors(self, plan: Plan) -> tuple[int, ...]:
        """The live ranks of this pipeline under a plan, this worker's included."""
        return tuple(sorted(set(plan.pipelines[self.number].placement())))

    def prepare(
        self, victims: Sequence[int], published: Mapping[int, StepProgress], step: int
    ) -> None:
        """Work out a takeover that is soon to be followed; from another thread.

        If anything has changed by then, or there are several victims, it is worked out anew.
        """
        schedule, known = self.in_force, self._known(published, step)
        known.setdefault(self.rank, Progress())
        for victim in victims[:1]:
            remaining = take_over(schedule, victim, known)
            self._foreseen = _Foreseen(schedule, victim, known, remaining)

    def follow(
        self,
        victims: Sequence[int],
        published: Mapping[int, StepProgress],
        step: int,
        done: Sequence[Action],
    ) -> list[Action]:
        """Take over from the victims, in this step and in all that follow.

        What the later ones are is asked only when the next begins: now others wait.

        All survivors do so from the same published progress, so that each knows the others'
        programs, also when a second loss follows. Returns what still holds of what this worker has
        ``done``, which may be more than it published: a message to a victim is gone. What mirrors
        cover that are here is added.
        """
        known = self._known(published, step)
        known[self.rank] = _without_gone_sends(known.get(self.rank, Progress()), done)
        exact = Progress(done=frozenset(done))
        adopted: list[Action] = []
        for victim in victims:
            self._losses.append(_Loss(victim, published))
            before = self.in_force
            self.in_force = self._take_over(before, victim, known)
            mirrors = mirrors_used(before, victim, known)
            adopted += [mirror for mirror in mirrors if before.rank_of(mirror) == self.rank]
            known = {r: surviving_progress(before, victim, {r: known[r]}) for r in known}
            exact = surviving_progress(before, victim, {self.rank: exact})
        self.adopted = tuple(adopted)
        return [a for a in done if a in exact.done] + sorted(covered_by(adopted))

    def _known(self, published: Mapping[int, StepProgress], step: int) -> dict[int, Progress]:
        if step <= self._changed_after:
            return {}
        return _Loss(-1, published).progress_in(step, self.attempt(step))

    def attempt(self, step: int) -> int:
        """The epoch in which a step was begun anew; 0: it was not."""
        redone, epoch = self._redone
        return epoch if step == redone else 0

    def last_mirrors(self, stage: int) -> tuple[Action, ...]:
        """Of each chunk of a stage the receive of the last mirror in a step, if there are any."""
        schedule = self.in_force
        if schedule.replicas[stage] != self.rank:  # it comes here in this step only
            return ()
        ends = mirrored_microbatches(schedule.num_microbatches, schedule.num_mirrors)[-1:]
        chunks = range(schedule.num_chunks)
        return tuple(Action(stage, c, Op.RECV_MIRROR, end) for c in chunks for end in ends)

    def _take_over(
        self, schedule: Schedule, victim: int, known: Mapping[int, Progress]
    ) -> Schedule:
        ahead, self._foreseen = self._foreseen, None
        asked = (schedule, victim, known)
        if ahead is not None and asked == (ahead.schedule, ahead.victim, ahead.known):
            return ahead.remaining
        return take_over(schedule, victim, known)

    def set_plan(self, plan: Plan) -> None:
        """Who holds what from now on, and what moves in which step."""
        self.number = plan.pipeline_of(self.node)
        """Of this worker's pipeline; a change may give it another one."""
        self.pipeline = plan.pipelines[self.number]
        self.rank = self.pipeline.rank_of(self.node)
        self.arrangement = plan.arrangement
        if plan.redone is not None and self.number in plan.redoing:
            self._redone = (plan.redone, plan.epoch)
        self.is_first = self.number == plan.first_pipeline
        """Whether this pipeline speaks for all where one is enough."""
        self._moves = ()
        self._fetched: dict[int, str] = {}
        self._given: dict[int, list[str]] = {}
        self._unit_targets: dict[int, list[str]] = {}
        self._unit_sources: dict[int, str] = {}
        self._units_taken: tuple[int, ...] = ()
        if plan.change is not None:
            self.moving_step = plan.change.step
            self._set_transfers(plan.change.transfers)
            self._set_new_cut(plan.change, plan.pipeline_after(self.node))

    def _set_transfers(self, transfers: Sequence[Transfer]) -> None:
        ranks, moves = self.pipeline.ranks, []
        for transfer in transfers:
            if transfer.source == self.node:
                self._given.setdefault(transfer.stage, []).append(transfer.target)
            if transfer.pipeline != self.number:
                continue
            if transfer.source in ranks:
                move = (ranks.index(transfer.source), ranks.index(transfer.target))
                moves.append(Move(transfer.stage, *move))
            elif transfer.target == self.node:
                self._fetched[transfer.stage] = transfer.source
        self._moves = tuple(moves)

    def _set_new_cut(self, change: Change, number: int) -> None:
        if not change.recut:
            return
        self.recut_step = change.step
        for move in change.moves:
            if move.source == self.node:
                self._unit_targets.setdefault(move.unit, []).append(move.target)
            if move.target == self.node:
                self._unit_sources[move.unit] = move.source
        if number in change.recut:
            self._units_taken = units_held(change.pipelines[number], self.node)

    def make_change(self, plan: Plan, step: int) -> None:
        """Begin whole steps under a plan whose change was made in a step."""
        self._changed_after = step
        self.set_plan(plan)
        self._begin_anew()

    def begin_again(self, plan: Plan) -> None:
        """Begin the step that is open anew, with the nodes and microbatches that a plan gives."""
        self.set_plan(plan)
        self._begin_anew()

    def _begin_anew(self) -> None:
        pipeline, shape = self.pipeline, self.shape
        # The schedule of whole steps, before the losses below.
        steady = steady_schedule(
            compute_schedule(shape.num_stages, shape.num_chunks, shape.num_microbatches)
            if shape.num_microbatches
            else no_work(len(pipeline.stages), shape.num_chunks),
            pipeline.placement(),
            pipeline.replica_ranks(),
            self._redundancy,
            self._costs,
            self._num_mirrors,
        )
        self._steady = replace(steady, max_deferred=self._max_deferred)
        self.in_force = self._steady
        self._losses: list[_Loss] = []  # since the last step began
        self._awaited: _Awaited | None = None
        self._foreseen: _Foreseen | None = None

    def runs_last_stage(self) -> bool:
        """Whether the model's end is computed here."""
        return self.pipeline.stages[-1:] == (self.node,)

    def sender_of(self, action: Action) -> str:
        """The node whose message an action waits for; this node itself where none is sent."""
        match action.op:
            case Op.RECV_F | Op.RECV_B:
                return self.pipeline.stages[self.in_force.send_of(action).stage]
            case Op.RECV_STATE if action.stage in self._fetched:
                return self._fetched[action.stage]
            case Op.RECV_UNIT | Op.RECV_UNIT_GRADIENT:
                return self._unit_sources.get(action.stage, self.node)
            case Op.RECV_MIRROR | Op.RECV_REFRESH | Op.RECV_STATE:
                return self.pipeline.stages[action.stage]
            case Op.TIE:
                return self.pipeline.stages[len(self.pipeline.stages) - 1 - action.stage]
            case _:
                return self.node


def _without_gone_sends(published: Progress, done: Sequence[Action]) -> Progress:
    """A worker's own progress without messages to an earlier victim.

    When a second loss follows at once it publishes progress before it has acted upon the first,
    and so names sends that have gone with the first victim.
    """
    gone = {action for action in published.done if action.op in SEND_OPS} - set(done)
    return replace(published, done=published.done - gone)


def _consumer_of(action: Action) -> Action | None:
    """The computation for which a receive waits."""
    match action.op:
        case Op.RECV_F:
            return action.with_op(Op.F)
        case Op.RECV_B:
            return action.with_op(Op.B)
        case _:
            return None
