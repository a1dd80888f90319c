"""Refuses a schedule that would compute something wrong or never end.

A worker runs its program in order, sends without waiting, and blocks in a receive. Under these
rules the schedule is run here once, symbolically. An error shows the programs around its place.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence

from megatron_bamboo.schedule.actions import (
    GATHER_OPS,
    RECEIVE_OPS,
    SEND_OPS,
    TAIL_OPS,
    Action,
    Op,
)
from megatron_bamboo.schedule.dependencies import Dependencies
from megatron_bamboo.schedule.mirrors import mirrored_microbatches, mirrors_left
from megatron_bamboo.schedule.render import marked_grid
from megatron_bamboo.schedule.schedule import NO_ACTIONS, Actions, Schedule, count_promoted
from megatron_bamboo.schedule.tail import tail_program

_WAITING_OPS = RECEIVE_OPS | GATHER_OPS | {Op.RECV_REFRESH, Op.TIE, Op.COMMIT}


class ScheduleError(ValueError):
    """A schedule that must not be run; the message has a grid with an arrow at the error."""

    def __init__(self, schedule: Schedule, rank: int, place: int, reason: str) -> None:
        grid = marked_grid(schedule.programs, rank, place)
        super().__init__(f"rank {rank}, action {place}: {reason}\n{grid}")


def validate(
    schedule: Schedule, done: Actions = NO_ACTIONS, received: Actions = NO_ACTIONS
) -> None:
    """Raise ScheduleError unless the lowered schedule completes the iteration, or evaluation.

    ``done`` and ``received`` are what live workers did before, as for ``lower``.
    """
    finished = count_promoted(schedule, done)
    _check_places(schedule)
    _check_once(schedule, finished | received)
    _check_complete(schedule, finished, received)
    _check_pairs(schedule, finished)
    _check_backward_order(schedule, finished)
    _run(schedule, finished, received)


def _positions(schedule: Schedule) -> Iterator[tuple[int, int, Action]]:
    for rank, program in enumerate(schedule.programs):
        for place, action in enumerate(program):
            yield rank, place, action


def _check_places(schedule: Schedule) -> None:
    for rank, place, action in _positions(schedule):
        if not _exists(schedule, action):
            raise ScheduleError(schedule, rank, place, f"{action} is outside of the schedule")
        owner = schedule.rank_of(action)
        if owner != rank:
            holder = "nobody" if owner is None else f"rank {owner}"
            raise ScheduleError(schedule, rank, place, f"{action} belongs to {holder}")


def _exists(schedule: Schedule, action: Action) -> bool:
    if action.stage >= schedule.num_stages:
        return False
    if schedule.forward_only and action.op not in (Op.F, Op.SEND_F, Op.RECV_F):
        return False
    if action.chunk is None or action.microbatch is None:
        return True
    if action.chunk >= schedule.num_chunks or action.microbatch >= schedule.num_microbatches:
        return False
    match action.op:
        case Op.SEND_F | Op.RECV_B:
            return schedule.downstream(action, Op.F) is not None
        case Op.RECV_F | Op.SEND_B:
            return schedule.upstream(action, Op.F) is not None
        case Op.SEND_MIRROR | Op.RECV_MIRROR:
            shape = (schedule.num_microbatches, schedule.num_mirrors)
            return action.microbatch in mirrored_microbatches(*shape)
        case _:
            return True


def _check_once(schedule: Schedule, before: Actions) -> None:
    seen: set[Action] = set()
    for rank, place, action in _positions(schedule):
        if action in before:
            raise ScheduleError(schedule, rank, place, f"{action} was done before")
        if action in seen:
            raise ScheduleError(schedule, rank, place, f"{action} is there twice")
        seen.add(action)


def _check_complete(schedule: Schedule, finished: Actions, received: Actions) -> None:
    present = {action for _, _, action in _positions(schedule)}
    for action in _expected(schedule, present, received):
        if action not in present and action not in finished:
            rank = schedule.rank_of(action)
            assert rank is not None
            end = len(schedule.programs[rank])
            raise ScheduleError(schedule, rank, end, f"{action} is missing")


def _expected(schedule: Schedule, present: set[Action], received: Actions) -> Iterator[Action]:
    """All forwards, backwards but in an evaluation, mirrors that have not come, the whole tail if
    there is any."""
    for receive in mirrors_left(schedule, received):
        yield from (schedule.send_of(receive), receive)
    for stage in range(schedule.num_stages):
        for chunk in range(schedule.num_chunks):
            for microbatch in range(schedule.num_microbatches):
                yield Action(stage, chunk, Op.F, microbatch)
                if not schedule.forward_only:
                    yield Action(stage, chunk, Op.B, microbatch)
    if any(action.op in TAIL_OPS for action in present):
        tie = any(action.op in (Op.TIE, Op.SEND_TIE) for action in present)
        sharded = any(action.op in GATHER_OPS for action in present)
        verifies = any(action.op is Op.VERIFY for action in present)
        for rank in schedule.live_ranks:
            yield from tail_program(schedule, rank, tie, sharded, verifies=verifies)


def _check_pairs(schedule: Schedule, finished: Actions) -> None:
    present = {action for _, _, action in _positions(schedule)}
    for rank, place, action in _positions(schedule):
        if action.op in SEND_OPS:
            pair = schedule.receive_of(action)
            if pair not in present:
                raise ScheduleError(schedule, rank, place, f"{action} is never received by {pair}")
        elif action.op in RECEIVE_OPS:
            pair = schedule.send_of(action)
            if pair not in present and pair not in finished:
                raise ScheduleError(schedule, rank, place, f"{action} is never sent by {pair}")
        else:
            continue
        if schedule.rank_of(pair) == rank:
            raise ScheduleError(schedule, rank, place, f"{pair} is on the same rank")


def _check_backward_order(schedule: Schedule, finished: Actions) -> None:
    """Gradients are summed in ascending order, so that a takeover changes no bit.

    Where a stage was taken over and has no replica, to which mirrors of a sum would go, some may
    wait for earlier ones.
    """
    done: dict[tuple[int, int | None], set[int]] = defaultdict(set)
    for action in finished:
        if action.op is Op.B:
            done[action.stage, action.chunk].add(_microbatch(action))
    for rank, place, action in _positions(schedule):
        if action.op not in (Op.B, Op.SEND_MIRROR):
            continue
        summed = done[action.stage, action.chunk]
        is_mirror = action.op is Op.SEND_MIRROR
        next_one, may_be_later = len(summed), False
        if _may_defer(schedule, action.stage):
            next_one = next(m for m in itertools.count() if m not in summed)
            may_be_later = sum(m > next_one for m in summed) < schedule.max_deferred
        ahead = _microbatch(action) - (next_one - is_mirror)
        if ahead < 0 or (ahead > 0 and not may_be_later):
            reason = f"{action} comes where microbatch {next_one} is next"
            raise ScheduleError(schedule, rank, place, reason)
        if not is_mirror:
            summed.add(_microbatch(action))


def _may_defer(schedule: Schedule, stage: int) -> bool:
    return schedule.placement[stage] != stage and schedule.replicas[stage] is None


def _microbatch(action: Action) -> int:
    assert action.microbatch is not None
    return action.microbatch


def _run(schedule: Schedule, finished: Actions, received: Actions) -> None:
    dependencies = Dependencies(schedule, received)
    complete = set(finished | received)
    places = [0] * len(schedule.programs)
    moving = True
    while moving:
        moving = False
        for rank, program in enumerate(schedule.programs):
            while places[rank] < len(program):
                needs = dependencies.needs(program[places[rank]])
                unmet = [need for need in needs if need not in complete]
                _check_reachable(schedule, rank, places[rank], needs, unmet)
                if unmet:
                    break
                complete.add(program[places[rank]])
                places[rank] += 1
                moving = True
    _check_ended(schedule, places)


def _check_reachable(
    schedule: Schedule, rank: int, place: int, needs: Sequence[Action], unmet: Sequence[Action]
) -> None:
    """What a worker needs must be its own and done, but for what it waits for in a message."""
    action = schedule.programs[rank][place]
    for need in needs:
        owner = schedule.rank_of(need)
        if owner == rank and need in unmet:
            raise ScheduleError(schedule, rank, place, f"{action} needs {need} before it")
        if owner != rank and action.op not in _WAITING_OPS:
            reason = f"{action} needs {need} of rank {owner} and does not receive it"
            raise ScheduleError(schedule, rank, place, reason)


def _check_ended(schedule: Schedule, places: Sequence[int]) -> None:
    waiting = [
        (rank, place, program[place])
        for rank, (place, program) in enumerate(zip(places, schedule.programs, strict=True))
        if place < len(program)
    ]
    if waiting:
        rank, place, _ = waiting[0]
        where = ", ".join(f"rank {r} in {action}" for r, _, action in waiting)
        raise ScheduleError(schedule, rank, place, f"deadlock: waiting are {where}")
