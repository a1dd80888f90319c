"""A shadow takes over the stage of a lost worker in the middle of an iteration.

The victim's stage is given to its shadow, what survivors have done counts as done, what remains is
ordered and lowered again. Nothing that a survivor has computed is thrown away. The victim's
accumulated gradient is gone, so its backwards run again, but for those that a mirror covers. Those
whose gradient is upstream already are only missing in the sum: nobody waits for them, and backwards
that others wait for may run before them.

All survivors call ``take_over`` with the same published progress and so get the same schedule. It
may be older than the truth: then more remains in the schedule than need be, in an order that still
holds, and messages that arrive twice are dropped by their receiver.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from megatron_bamboo.schedule.actions import RECEIVE_OPS, SEND_OPS, Action, Op
from megatron_bamboo.schedule.generate import stage_program
from megatron_bamboo.schedule.lower import lower, without_messages
from megatron_bamboo.schedule.merge import merge_streams
from megatron_bamboo.schedule.mirrors import covered_by, mirrors_to_use
from megatron_bamboo.schedule.schedule import (
    NO_ACTIONS,
    Actions,
    Program,
    Schedule,
    count_promoted,
)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far one rank has come in the iteration, earlier epochs included.

    ``done``: the F, B, RF and sends that it executed, and what it need not execute since a mirror
    covers it. ``received``: the receives whose message has arrived, consumed or not, and is kept.
    """

    done: Actions = NO_ACTIONS
    received: Actions = NO_ACTIONS


def take_over(schedule: Schedule, victim_rank: int, progress: Mapping[int, Progress]) -> Schedule:
    """What remains for every survivor, lowered; a tail has to be added again.

    ``schedule`` is the one in force in this iteration, whole or what an earlier takeover left.
    Without progress the result is the schedule of the iterations that follow.
    """
    placed = _give_to_shadow(schedule, victim_rank)
    known = surviving_progress(schedule, victim_rank, progress)
    done = known.done | covered_by(mirrors_used(schedule, victim_rank, progress))
    finished = count_promoted(placed, done)
    streams = [
        _streams_of(schedule, placed, rank, finished, known) for rank in range(len(placed.programs))
    ]
    turns = {action: before for own in streams for action, before in _turns(own)}
    merged = replace(placed, programs=merge_streams(placed, streams, known.received, turns))
    return lower(merged, done, known.received)


def mirrors_used(
    schedule: Schedule, victim_rank: int, progress: Mapping[int, Progress]
) -> tuple[Action, ...]:
    """The receives of the mirrors from which the takeover goes on; arguments as its own.

    What they cover counts as done by the shadow from then on.
    """
    if not schedule.num_mirrors:
        return ()  # others wait for a takeover: nothing is asked in vain
    known = surviving_progress(schedule, victim_rank, progress)
    return mirrors_to_use(schedule, victim_rank, known.done, known.received)


def surviving_progress(
    schedule: Schedule, victim_rank: int, progress: Mapping[int, Progress]
) -> Progress:
    """What still holds of the survivors' progress, together, once the victim is lost.

    ``schedule`` is the one that the victim was lost from. A message sent to the victim is gone. A
    worker goes on with what this leaves of its own progress, since after a second loss a send from
    before the first proves nothing.
    """
    survivors = set(schedule.live_ranks) - {victim_rank}
    alive = [made for rank, made in progress.items() if rank in survivors]
    done = NO_ACTIONS.union(*(made.done for made in alive))
    received = NO_ACTIONS.union(*(made.received for made in alive))
    assert all(action.op in RECEIVE_OPS for action in received)
    sends = (action for action in done if action.op in SEND_OPS)
    gone = {send for send in sends if schedule.rank_of(schedule.receive_of(send)) == victim_rank}
    return Progress(done - gone, received)


def _give_to_shadow(schedule: Schedule, victim_rank: int) -> Schedule:
    """The placement after the loss, programs unchanged."""
    moved = schedule.stages_of(victim_rank)
    if not moved:
        raise ValueError(f"rank {victim_rank} runs no stage: live are {schedule.live_ranks}")
    placement = list(schedule.placement)
    for stage in moved:
        shadow = schedule.replicas[stage]
        if shadow is None:
            raise ValueError(f"stage {stage} has no live replica: rank {victim_rank} alone had it")
        placement[stage] = shadow
    replicas = tuple(
        None if stage in moved or shadow == victim_rank else shadow
        for stage, shadow in enumerate(schedule.replicas)
    )
    return replace(schedule, placement=tuple(placement), replicas=replicas)


def _streams_of(
    schedule: Schedule, placed: Schedule, rank: int, finished: Actions, known: Progress
) -> tuple[Program, ...]:
    """What remains for a rank: of stages that it takes over, what others wait for and what only
    the sum lacks, then its own program."""
    taken = [s for s in placed.stages_of(rank) if schedule.placement[s] != rank]
    shape = (placed.num_stages, placed.num_chunks, placed.num_microbatches)
    moved = [
        part
        for stage in taken
        for part in _parts_of(schedule, stage_program(stage, *shape), finished, known)
    ]
    own = () if rank not in placed.live_ranks else without_messages(schedule.programs[rank])
    return tuple(
        tuple(a for a in stream if a not in finished and placed.rank_of(a) == rank)
        for stream in (*moved, own)
    )


def _parts_of(
    schedule: Schedule, program: Program, finished: Actions, known: Progress
) -> tuple[Program, Program]:
    """A moved stage's program: what others wait for before its turn in the sum, and the rest."""
    delivered = known.done | known.received
    awaited, deferred = set(), Counter[int | None]()
    # The chunks with an earlier backward that nobody waits for.
    summed_late: set[int | None] = set()
    for action in program:
        if action.op is not Op.B or action in finished:
            continue
        if _is_upstream(schedule, action, delivered):
            summed_late.add(action.chunk)
        elif action.chunk in summed_late and deferred[action.chunk] < schedule.max_deferred:
            deferred[action.chunk] += 1
            awaited |= {action, action.with_op(Op.F)}
    first = tuple(action for action in program if action in awaited)
    return first, tuple(action for action in program if action not in awaited)


def _turns(streams: tuple[Program, ...]) -> Iterator[tuple[Action, Action]]:
    """Backwards of moved stages' rest, each with an awaited one that is summed before it: so no
    more come early than are put apart for it."""
    for first, rest in zip(streams[:-1:2], streams[1:-1:2], strict=True):
        for action in rest:
            earlier = [a for a in first if a.op is action.op is Op.B and _is_before(a, action)]
            if earlier:
                yield action, earlier[-1]


def _is_before(one: Action, other: Action) -> bool:
    assert one.microbatch is not None and other.microbatch is not None
    return one.chunk == other.chunk and one.microbatch < other.microbatch


def _is_upstream(schedule: Schedule, backward: Action, delivered: Actions) -> bool:
    """Whether the stage that waits for a backward's gradient has it, or there is none."""
    receive = schedule.upstream(backward, Op.RECV_B)
    return receive is None or bool({receive, receive.with_op(Op.B)} & delivered)
