"""Mirrors: the gradient that a stage has summed so far, sent to its replica during the iteration.

Gradients of a chunk are summed in ascending order of the microbatches, so what a stage has after
the backward of microbatch m is a prefix of the whole sum, and a shadow that goes on from it gets
the same bits. A mirror is a copy, sent in the background: nobody waits for it within a pass.

A mirror up to m stands for the victim's forwards and backwards up to m if what these had produced
is where it is needed: the stage upstream has received the gradients up to m (else an older mirror
is used, or none), and the stage downstream is known to have done its own backwards up to m.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product, takewhile

from megatron_bamboo.schedule.actions import SEND_OPS, Action, Op
from megatron_bamboo.schedule.schedule import Actions, Program, Schedule

# By the rank of the receiver, and by how many of its actions they come behind, the mirrors.
_Places = Mapping[tuple[int, int], Sequence[Action]]

MIRRORS_KEPT = 2
"""Of each chunk: what the newest one stands for may be under way, or a worker of the same node
may not have it yet; then the one before it counts."""


def mirrored_microbatches(num_microbatches: int, num_mirrors: int) -> tuple[int, ...]:
    """The last microbatch in each mirror of a chunk, ascending.

    They are spread evenly up to the last backward but one. After the last one the reduction
    follows, which a mirror would only hold up; so a loss there costs one backward of each chunk.
    """
    before_last = num_microbatches - 1
    last = {-(-number * before_last // num_mirrors) - 1 for number in range(1, num_mirrors + 1)}
    return tuple(sorted(microbatch for microbatch in last if microbatch >= 0))


def add_mirrors(schedule: Schedule, done: Actions, received: Actions) -> Schedule:
    """The lowered schedule with the mirrors of its ``num_mirrors`` that have not arrived.

    ``done`` and ``received`` as for ``lower``. A mirror is sent right after the gradient for the
    stage upstream, and received behind what the same sender sent to the same worker before.
    """
    wanted = frozenset(mirrors_left(schedule, received))
    if not wanted:
        return schedule
    sending = tuple(
        (*_late_sends(schedule, rank, wanted, done), *_with_sends(schedule, program, wanted))
        for rank, program in enumerate(schedule.programs)
    )
    sent = frozenset(schedule.receive_of(a) for a in done if a.op is Op.SEND_MIRROR)
    places = _receives(schedule, sending, wanted & sent)
    programs = tuple(_with_receives(rank, program, places) for rank, program in enumerate(sending))
    return replace(schedule, programs=programs)


def mirrors_left(schedule: Schedule, received: Actions) -> Iterator[Action]:
    """The receives of mirrors that are still to come: one that came is no older than the last."""
    newest: dict[tuple[int, int | None], int] = {}
    for place, last in _arrived(received):
        newest[place] = max(last, newest.get(place, -1))
    microbatches = mirrored_microbatches(schedule.num_microbatches, schedule.num_mirrors)
    chunks = product(schedule.protected_stages, range(schedule.num_chunks))
    for (stage, chunk), microbatch in product(chunks, microbatches):
        if microbatch > newest.get((stage, chunk), -1):
            yield Action(stage, chunk, Op.RECV_MIRROR, microbatch)


def mirrors_to_use(
    schedule: Schedule, victim_rank: int, done: Actions, received: Actions
) -> tuple[Action, ...]:
    """The receives of those mirrors from which the shadow of a lost rank goes on, one a chunk.

    ``schedule`` is the one that the rank was lost from, the rest is the survivors' progress.
    """
    chosen = []
    for stage, chunk in product(schedule.stages_of(victim_rank), range(schedule.num_chunks)):
        until = _count_settled(schedule, stage, chunk, done, received)
        usable = [m for place, m in _arrived(received) if place == (stage, chunk) and m < until]
        if usable:
            chosen.append(Action(stage, chunk, Op.RECV_MIRROR, max(usable)))
    return tuple(chosen)


def covered_by(mirrors: Iterable[Action]) -> Actions:
    """The forwards and backwards that need not run again where these mirrors are used."""
    return frozenset(
        Action(mirror.stage, mirror.chunk, op, microbatch)
        for mirror in mirrors
        for microbatch in range(_microbatch(mirror) + 1)
        for op in (Op.F, Op.B)
    )


def _microbatch(mirror: Action) -> int:
    assert mirror.microbatch is not None
    return mirror.microbatch


def _arrived(received: Actions) -> Iterator[tuple[tuple[int, int | None], int]]:
    for action in received:
        if action.op is Op.RECV_MIRROR:
            yield (action.stage, action.chunk), _microbatch(action)


def _count_settled(
    schedule: Schedule, stage: int, chunk: int, done: Actions, received: Actions
) -> int:
    """How many microbatches, from the first on, the neighbours need nothing more for."""

    def is_settled(microbatch: int) -> bool:
        backward = Action(stage, chunk, Op.B, microbatch)
        gradient = schedule.upstream(backward, Op.RECV_B)
        after = schedule.downstream(backward, Op.B)
        is_delivered = gradient is None or bool({gradient, gradient.with_op(Op.B)} & known)
        return is_delivered and (after is None or after in known)

    known = done | received
    return sum(1 for _ in takewhile(is_settled, range(schedule.num_microbatches)))


def _late_sends(schedule: Schedule, rank: int, wanted: Actions, done: Actions) -> Iterator[Action]:
    """Mirrors of what was just summed when the programs were made."""
    for receive in sorted(wanted):
        send = schedule.send_of(receive)
        backward = receive.with_op(Op.B)
        following = replace(backward, microbatch=_microbatch(receive) + 1)
        is_due = backward in done and following not in done and send not in done
        if is_due and schedule.placement[receive.stage] == rank:
            yield send


def _with_sends(schedule: Schedule, program: Program, wanted: Actions) -> Iterator[Action]:
    waiting: Action | None = None
    for action in program:
        if waiting is not None and action.op is not Op.SEND_B:
            yield waiting
            waiting = None
        yield action
        if action.op is Op.B and action.with_op(Op.RECV_MIRROR) in wanted:
            waiting = action.with_op(Op.SEND_MIRROR)
    if waiting is not None:
        yield waiting


def _receives(schedule: Schedule, programs: Sequence[Program], under_way: Actions) -> _Places:
    """Where the receivers let mirrors come; those that were sent before come first."""
    places: defaultdict[tuple[int, int], list[Action]] = defaultdict(list)
    for receive in sorted(under_way):
        places[_receiver(schedule, receive), 0].append(receive)
    indices = [{action: index for index, action in enumerate(program)} for program in programs]
    for program in programs:
        behind: defaultdict[int, int] = defaultdict(int)  # by receiver
        for receive in (schedule.receive_of(a) for a in program if a.op in SEND_OPS):
            receiver = _receiver(schedule, receive)
            if receive.op is Op.RECV_MIRROR:
                places[receiver, behind[receiver]].append(receive)
            else:
                behind[receiver] = max(behind[receiver], indices[receiver][receive] + 1)
    return places


def _receiver(schedule: Schedule, receive: Action) -> int:
    rank = schedule.rank_of(receive)
    assert rank is not None, f"nobody runs {receive}"
    return rank


def _with_receives(rank: int, program: Program, places: _Places) -> Program:
    received = list(places.get((rank, 0), ()))
    for index, action in enumerate(program):
        received.append(action)
        received += places.get((rank, index + 1), ())
    return tuple(received)
