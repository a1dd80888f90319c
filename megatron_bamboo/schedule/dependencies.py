"""What must have happened before an action can run.

One answer for the validator, the simulator and the order of a takeover.
"""

from itertools import takewhile

from megatron_bamboo.schedule.actions import RECEIVE_BEFORE, Action, Op
from megatron_bamboo.schedule.schedule import NO_ACTIONS, Actions, Schedule
from megatron_bamboo.schedule.tail import tied_pair


class Dependencies:
    """The needs of the actions of one schedule."""

    def __init__(self, schedule: Schedule, received: Actions = NO_ACTIONS) -> None:
        self.schedule = schedule
        self.received = received
        self.present = frozenset(a for program in schedule.programs for a in program)

    def needs(self, action: Action) -> tuple[Action, ...]:
        """The actions that must be complete before this one can run."""
        match action.op:
            case Op.F | Op.RF:
                return self._input_of(action)
            case Op.B:
                return (action.with_op(Op.F), *self._input_of(action))
            case Op.SEND_F:
                return (action.with_op(Op.F),)
            case Op.SEND_B | Op.SEND_MIRROR:
                return (action.with_op(Op.B),)
            case Op.RECV_MIRROR:
                return ()
            case Op.RECV_F | Op.RECV_B:
                return (self.schedule.send_of(action),)
            case _:
                return self._tail_needs(action)

    def needs_here(self, action: Action) -> tuple[Action, ...]:
        """The needs that are in some program; the others were met before (``validate`` checks)."""
        return tuple(need for need in self.needs(action) if need in self.present)

    def _input_of(self, action: Action) -> tuple[Action, ...]:
        """The receive of an action's input or, where that is local, its producer."""
        producer = self.schedule.producer_of(action)
        if producer is None:
            return ()
        if action.op in RECEIVE_BEFORE:
            receive = action.with_op(RECEIVE_BEFORE[action.op])
            if receive in self.present or receive in self.received:
                return (receive,)
        return (producer,)

    def _tail_needs(self, action: Action) -> tuple[Action, ...]:
        stage = action.stage
        reduce = Action(stage, None, Op.REDUCE, None)
        match action.op:
            case Op.REDUCE:
                return self._backwards_of(stage)
            case Op.SEND_TIE:
                return (reduce,)
            case Op.TIE:
                return (reduce, self._other_role(stage))
            case Op.SEND_REFRESH:
                tie = Action(stage, None, Op.TIE, None)
                return (reduce, tie) if tie in self.present else (reduce,)
            case Op.RECV_REFRESH:
                return (Action(stage, None, Op.SEND_REFRESH, None),)
            case Op.VERIFY:
                return ()
            case Op.COMMIT:
                return self._before_commit()
            case Op.GATHER | Op.RGATHER:
                return (self._step_before(action), *self._before_pair(action))
            case _:
                return (Action(stage, None, Op.COMMIT, None),)

    def _backwards_of(self, stage: int) -> tuple[Action, ...]:
        return tuple(
            Action(stage, chunk, Op.B, microbatch)
            for chunk in range(self.schedule.num_chunks)
            for microbatch in range(self.schedule.num_microbatches)
        )

    def _other_role(self, stage: int) -> Action:
        other = tied_pair(self.schedule, stage)
        placement = self.schedule.placement
        is_local = placement[other] == placement[stage]
        return Action(other, None, Op.REDUCE if is_local else Op.SEND_TIE, None)

    def _before_commit(self) -> tuple[Action, ...]:
        """The last action of each program before its commit: the commit is a barrier."""
        needs: list[Action] = []
        for program in self.schedule.programs:
            before = takewhile(lambda action: action.op is not Op.COMMIT, program)
            needs += tuple(before)[-1:]
        return tuple(needs)

    def _step_before(self, gather: Action) -> Action:
        rank = self.schedule.rank_of(gather)
        assert rank is not None, f"nobody holds what {gather} gathers"
        return Action(rank, None, Op.STEP, None)

    def _before_pair(self, gather: Action) -> tuple[Action, ...]:
        """What the other holder does just before it comes to the same gather, as both must."""
        pair = gather.with_op(Op.RGATHER if gather.op is Op.GATHER else Op.GATHER)
        for program in self.schedule.programs:
            if pair in program[1:]:
                return (program[program.index(pair) - 1],)
        return ()
