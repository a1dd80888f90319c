"""Inserts the messages that a placement needs.

Generators and the takeover order computation only. Messages follow from who computes what and
from what has already arrived, so they are never merged by hand.
"""

from dataclasses import replace

from megatron_bamboo.schedule.actions import COMPUTE_OPS, RECEIVE_BEFORE, SEND_AFTER, Action, Op
from megatron_bamboo.schedule.mirrors import add_mirrors
from megatron_bamboo.schedule.schedule import (
    NO_ACTIONS,
    Actions,
    Program,
    Schedule,
    count_promoted,
)


def lower(
    schedule: Schedule, done: Actions = NO_ACTIONS, received: Actions = NO_ACTIONS
) -> Schedule:
    """The schedule, so far without messages, with a send after each producer and a receive before
    each consumer on another worker, and the mirrors that it is to have.

    ``done`` holds what live workers have computed and sent this iteration, ``received`` the
    receives whose message has arrived. What was computed and not sent goes first, from the log.
    """
    finished = count_promoted(schedule, done)
    wanted = frozenset(
        receive
        for program in schedule.programs
        for action in program
        if (receive := _receive_for(schedule, action)) is not None and receive not in received
    )
    from_log = sorted(
        send
        for send in map(schedule.send_of, wanted)
        if send not in done and _computation_of(send) in finished
    )
    programs = []
    for rank, program in enumerate(schedule.programs):
        again = tuple(send for send in from_log if schedule.placement[send.stage] == rank)
        programs.append(again + _with_messages(schedule, program, wanted))
    return add_mirrors(replace(schedule, programs=tuple(programs)), done, received)


def without_messages(program: Program) -> Program:
    """Only the computation of a program."""
    return tuple(action for action in program if action.op in COMPUTE_OPS)


def _with_messages(schedule: Schedule, program: Program, wanted: Actions) -> Program:
    lowered: list[Action] = []
    for action in program:
        receive = _receive_for(schedule, action)
        if receive in wanted:
            lowered.append(receive)
        lowered.append(action)
        send = _send_for(schedule, action)
        if send is not None and schedule.receive_of(send) in wanted:
            lowered.append(send)
    return tuple(lowered)


def _receive_for(schedule: Schedule, action: Action) -> Action | None:
    """The receive of what an action takes from another worker."""
    producer = schedule.producer_of(action)
    if action.op not in RECEIVE_BEFORE or producer is None:
        return None
    if schedule.placement[producer.stage] == schedule.placement[action.stage]:
        return None
    return action.with_op(RECEIVE_BEFORE[action.op])


def _send_for(schedule: Schedule, action: Action) -> Action | None:
    """The send of an action's result, wherever it is taken."""
    match action.op:
        case Op.F:
            consumer = schedule.downstream(action, Op.F)
        case Op.B:
            consumer = schedule.upstream(action, Op.B)
        case _:
            consumer = None
    return None if consumer is None else action.with_op(SEND_AFTER[action.op])


def _computation_of(send: Action) -> Action:
    return send.with_op(Op.F if send.op is Op.SEND_F else Op.B)
