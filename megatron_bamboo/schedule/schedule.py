"""All workers' programs of one pipeline for one iteration, and how its stages are joined.

Programs are by pipeline rank, the stage that a worker held at the start; who runs a stage now is
``placement``. So a takeover changes the placement and no name of any worker or action.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from megatron_bamboo.schedule.actions import RECEIVE_OPS, SEND_OPS, Action, Op

Program = tuple[Action, ...]
Actions = frozenset[Action]
NO_ACTIONS: Actions = frozenset()

# What a message's tag can tell apart; the microbatches are those of one pipeline.
MAX_STAGES = 256
MAX_CHUNKS = 32
MAX_MICROBATCHES = 16384


@dataclass(frozen=True, slots=True)
class Schedule:
    """Programs by rank (a dead rank's is empty), and where each stage and its replica are."""

    programs: tuple[Program, ...]
    placement: tuple[int, ...]
    replicas: tuple[int | None, ...]
    num_chunks: int
    num_microbatches: int
    num_mirrors: int = 0
    """How often a stage sends its replica the gradient of each chunk so far."""
    max_deferred: int = MAX_MICROBATCHES
    """Of a stage that was taken over, how many gradients of a chunk may wait for earlier ones."""
    forward_only: bool = False
    """An evaluation's: it has no backward passes."""

    @property
    def num_stages(self) -> int:
        return len(self.placement)

    @property
    def live_ranks(self) -> tuple[int, ...]:
        """The ranks that run some stage, ascending."""
        return tuple(sorted(set(self.placement)))

    @property
    def protected_stages(self) -> tuple[int, ...]:
        """The stages that have a replica, ascending."""
        return tuple(stage for stage, holder in enumerate(self.replicas) if holder is not None)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank runs as primary, ascending."""
        return tuple(stage for stage, holder in enumerate(self.placement) if holder == rank)

    def replicas_of(self, rank: int) -> tuple[int, ...]:
        """The stages whose replica a rank holds, ascending."""
        return tuple(stage for stage, holder in enumerate(self.replicas) if holder == rank)

    def rank_of(self, action: Action) -> int | None:
        """The rank that runs an action; None for work on a replica that nobody holds."""
        match action.op:
            case Op.RF | Op.RECV_MIRROR | Op.RECV_REFRESH | Op.RGATHER | Op.RMEND:
                return self.replicas[action.stage]
            case Op.VERIFY | Op.COMMIT | Op.STEP:
                return action.stage
            case _:
                return self.placement[action.stage]

    def next_virtual(self, stage: int, chunk: int) -> tuple[int, int] | None:
        """The stage and chunk that take this one's output; None after the last."""
        if stage + 1 < self.num_stages:
            return stage + 1, chunk
        return (0, chunk + 1) if chunk + 1 < self.num_chunks else None

    def previous_virtual(self, stage: int, chunk: int) -> tuple[int, int] | None:
        """The stage and chunk whose output this one takes; None before the first."""
        if stage > 0:
            return stage - 1, chunk
        return (self.num_stages - 1, chunk - 1) if chunk > 0 else None

    def upstream(self, action: Action, op: Op) -> Action | None:
        """``op`` of the same microbatch at the previous virtual stage."""
        assert action.chunk is not None
        return self._at(self.previous_virtual(action.stage, action.chunk), action, op)

    def downstream(self, action: Action, op: Op) -> Action | None:
        """``op`` of the same microbatch at the next virtual stage."""
        assert action.chunk is not None
        return self._at(self.next_virtual(action.stage, action.chunk), action, op)

    def _at(self, place: tuple[int, int] | None, action: Action, op: Op) -> Action | None:
        return None if place is None else Action(place[0], place[1], op, action.microbatch)

    def producer_of(self, action: Action) -> Action | None:
        """The computation whose result a computation or a receive takes from a neighbour."""
        match action.op:
            case Op.F | Op.RF | Op.RECV_F:
                return self.upstream(action, Op.F)
            case Op.B | Op.RECV_B:
                return self.downstream(action, Op.B)
            case _:
                return None

    def receive_of(self, send: Action) -> Action:
        """The receive that is the pair of a send."""
        match send.op:
            case Op.SEND_F:
                pair = self.downstream(send, Op.RECV_F)
            case Op.SEND_B:
                pair = self.upstream(send, Op.RECV_B)
            case _:
                pair = send.with_op(Op.RECV_MIRROR)
        assert send.op in SEND_OPS and pair is not None, f"{send} has no receiver"
        return pair

    def send_of(self, receive: Action) -> Action:
        """The send that is the pair of a receive."""
        match receive.op:
            case Op.RECV_F:
                pair = self.upstream(receive, Op.SEND_F)
            case Op.RECV_B:
                pair = self.downstream(receive, Op.SEND_B)
            case _:
                pair = receive.with_op(Op.SEND_MIRROR)
        assert receive.op in RECEIVE_OPS and pair is not None, f"{receive} has no sender"
        return pair


def check_shape(num_stages: int, num_chunks: int, num_microbatches: int) -> None:
    """Refuse a shape that has nothing to schedule.

    Raises:
        ValueError: one of the numbers is below 1.
    """
    if min(num_stages, num_chunks, num_microbatches) < 1:
        raise ValueError(
            "a schedule needs at least one stage, one chunk and one microbatch, not "
            f"{num_stages} stages, {num_chunks} chunks and {num_microbatches} microbatches"
        )


def one_stage_a_rank(
    programs: tuple[Program, ...], num_chunks: int, num_microbatches: int
) -> Schedule:
    """A schedule as it starts: the program of each stage on the rank of its number, no replicas."""
    return Schedule(
        programs=programs,
        placement=tuple(range(len(programs))),
        replicas=(None,) * len(programs),
        num_chunks=num_chunks,
        num_microbatches=num_microbatches,
    )


def no_work(num_stages: int, num_chunks: int) -> Schedule:
    """That of a pipeline which has no microbatches yet."""
    return one_stage_a_rank(((),) * num_stages, num_chunks, 0)


def count_promoted(schedule: Schedule, done: Iterable[Action]) -> Actions:
    """``done`` with each redundant forward of a promoted replica counted as the stage's forward.

    A stage that lost its shadow has no replica either, but the redundant forwards done for it
    died with the shadow: ``done`` is what live workers did.
    """
    done = frozenset(done)
    redundant = (action for action in done if action.op is Op.RF)
    return done | {a.with_op(Op.F) for a in redundant if schedule.replicas[a.stage] is None}
