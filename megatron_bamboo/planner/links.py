"""Links that are broken between nodes which live, and which node is given up for it.

Two nodes may both reach the coordinator and not each other. Then somebody waits in vain, and with
it by and by everybody. Who waits for what another has long sent is at the end of a broken link; so
is somebody in a collective that all have entered and that does not end. A wait for who still works,
or waits itself for a third, shows nothing: it may rightly take as long as a takeover does. Neither
does a wait in what is done unit by unit in several groups: it does not say in which.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron_bamboo.membership.waits import Wait
from megatron_bamboo.membership.workers import node_of
from megatron_bamboo.planner.plan import Plan
from megatron_bamboo.schedule.actions import GATHER_OPS, MEND_OPS, RECEIVE_OPS, Action, Op
from megatron_bamboo.schedule.tail import gather_turn

_MESSAGES = RECEIVE_OPS | {
    *(Op.TIE, Op.RECV_REFRESH, Op.RECV_STATE),
    *(Op.RECV_UNIT, Op.RECV_UNIT_GRADIENT),
}
# The waits of a step in their order; those for the messages of its passes come first.
_TURNS = {
    **{Op.REDUCE: 1, Op.TIE: 2, Op.RECV_REFRESH: 2, Op.RECV_STATE: 2, Op.COMMIT: 3},
    **{Op.RECV_UNIT: 2, Op.RECV_UNIT_GRADIENT: 2},
    **{Op.GATHER: 4, Op.RGATHER: 4, Op.MEND: 5, Op.RMEND: 5},
}
# Mends have groups of their own; the others have several for a stage if pipelines are cut apart.
_BY_UNIT = GATHER_OPS | {Op.REDUCE}


@dataclass(frozen=True, slots=True)
class BrokenLink:
    """One of these nodes, at least, is at the end of a broken link."""

    nodes: tuple[str, ...]
    evidence: str


@dataclass(frozen=True, slots=True)
class Fence:
    """The node that is given up, and why."""

    node: str
    reason: str


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a worker waits: of two, the one in the later turn has done all that came before."""

    turn: tuple[int, ...]
    op: Op

    @classmethod
    def of(cls, wait: Wait, num_stages: int) -> "_Place | None":
        """None where it waits in what is no action."""
        try:
            action = Action.parse(wait.action)
        except ValueError:
            return None
        # All take the stages in one order, of reductions and of gathers.
        order: tuple[int, ...] = ()
        if action.op is Op.REDUCE:
            order = (action.stage,)
        elif action.op in GATHER_OPS:
            order = gather_turn(action.stage, num_stages)
        return cls((wait.step, _TURNS.get(action.op, 0), *order), action.op)


_Known = Mapping[str, tuple[Wait, _Place]]


def broken_links(
    waits: Sequence[Wait], plan: Plan, least_seconds: float = 0.0
) -> tuple[BrokenLink, ...]:
    """All that these waits show to be broken, each link once.

    Args:
        waits: those that have lasted for long and still do; any other worker may be at work.
        plan: the one in force.
        least_seconds: what has not lasted so long shows nothing.
    """
    known = _with_places(waits, len(plan.pipelines[plan.first_pipeline].stages))
    found: dict[tuple[str, ...], BrokenLink] = {}
    several = MEND_OPS if plan.arrangement.is_cut_alike else _BY_UNIT
    for wait, place in known.values():
        if place.op in several:
            continue
        judge = _judge_message if place.op in _MESSAGES else _judge_collective
        where = f"{wait.action} of step {wait.step}, epoch {plan.epoch}"
        for link in judge(wait, known, least_seconds, where):
            found.setdefault(link.nodes, link)
    return tuple(found.values())


def _with_places(waits: Sequence[Wait], num_stages: int) -> _Known:
    placed = ((wait, _Place.of(wait, num_stages)) for wait in waits)
    return {wait.worker: (wait, place) for wait, place in placed if place is not None}


def _judge_message(
    wait: Wait, known: _Known, least_seconds: float, where: str
) -> Iterator[BrokenLink]:
    """Who waits for what was sent, though its sender has long had nothing else to do."""
    for sender in (known[worker][0] for worker in wait.waiting.awaits if worker in known):
        nodes, seconds = _nodes(wait, sender), min(wait.seconds, sender.seconds)
        receive = Action.parse(wait.action)
        has_sent = any(s.includes(wait.worker, wait.step, receive) for s in sender.waiting.sent)
        if has_sent and len(nodes) == 2 and seconds > max(wait.limit_seconds, least_seconds):
            yield BrokenLink(
                nodes,
                f"the link between {' and '.join(nodes)} is broken: {node_of(wait.worker)} has "
                f"waited for {seconds:.1f} s in {where}, for what {node_of(sender.worker)} "
                "has sent",
            )


def _judge_collective(
    wait: Wait, known: _Known, least_seconds: float, where: str
) -> Iterator[BrokenLink]:
    """Who is in what all others have entered, or left already."""
    others = [known.get(worker) for worker in wait.waiting.awaits]
    present = [other for other in others if other is not None]
    turn = known[wait.worker][1].turn
    if not present or len(present) < len(others) or min(p.turn for _, p in present) < turn:
        return
    seconds = min(wait.seconds, *(other.seconds for other, _ in present))
    if seconds > max(wait.limit_seconds, least_seconds):
        nodes = _nodes(wait, *(other for other, place in present if place.turn == turn))
        yield BrokenLink(
            nodes,
            f"a link is broken: {' and '.join(nodes)} did not come out of {where}, in "
            f"{seconds:.1f} s since all had entered it",
        )


def whom_to_fence(broken: Sequence[BrokenLink], plan: Plan) -> Fence:
    """The node to give up, of those that are known best to be at the end of a broken link.

    Rather one without which the job goes on, since another node holds its stages; of these one with
    the most broken links; of these the last one in the plan.
    """
    fewest = min(len(link.nodes) for link in broken)
    best = [link for link in broken if len(link.nodes) == fewest]
    numbers = Counter(node for link in best for node in link.nodes)
    spared = [node for node in numbers if _is_dispensable(node, plan)] or list(numbers)
    most = max(numbers[node] for node in spared)
    worst = [node for node in spared if numbers[node] == most]
    why = ["another node holds its stages"] * (len(spared) < len(numbers))
    why += [f"it has {most} such links"] * (len(worst) < len(spared))
    why += ["it comes last in the plan"] * (len(worst) > 1)
    node = max(worst, key=lambda node: plan.nodes.index(node) if node in plan.nodes else -1)
    link = next(link for link in best if node in link.nodes)
    given_up = " and ".join(why) or "all others have gone on"
    return Fence(node, f"{link.evidence}; it is given up since {given_up}")


def _is_dispensable(node: str, plan: Plan) -> bool:
    """Whether every stage that a node runs has another holder."""
    return all(
        replica is not None
        for pipeline in plan.pipelines
        for primary, replica in zip(pipeline.stages, pipeline.replicas, strict=True)
        if primary == node
    )


def _nodes(*waits: Wait) -> tuple[str, ...]:
    return tuple(sorted({node_of(wait.worker) for wait in waits}))
