"""What a cut takes of each node's memory, once the node has taken over the stage after its own.

That is when it holds most, and it may happen to any node, so every node must have room for it.
Counted for the node of stage s, of S stages in a ring, are

* the state of stage s, which it runs: parameters, gradients and optimizer state;
* the state of stage s + 1, its replica, which it runs now as well;
* the state of stage s + 2, which it shadows from the next step on (not if S is 2: it has all);
* the activations of both stages that it runs, of as many microbatches as 1F1B has in flight there:
  S - s of stage s; where units are in one stage, what they give to each other is saved, too;
* the message log of both stages: of every microbatch what went to and came from each neighbour,
  and what was sent to it in the step before.

A pipeline of one stage has no such ring: its node's state is that of any other one like it, so a
data-parallel peer takes over, with no more state and the activations of two microbatches.

Against the prediction of a run after a takeover (``schedule/footprint.py``) that is never too
little, and in the tests' cases at most a tenth too much.

Not counted: redundant forwards that are kept for a takeover (``eager`` and ``bubble`` with
``--bamboo-replica-memory device``), mirrors, copies of gradients on their way at the end of a step
(activations are gone by then), what an action needs while it runs, and the allocator.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_bamboo.planner.arrangement import StageSpan
from megatron_bamboo.planner.layers import UnitCosts, prefix_sums

NO_UNITS: StageSpan = (0, 0)
_LOGGED = 3
"""Messages of a microbatch and a neighbour: one each way, and one more of the step before."""


@dataclass(frozen=True, slots=True)
class NodeMemory:
    """Bytes of one worker of a node."""

    state: int
    replica: int
    next_replica: int
    activations: int
    log_a_microbatch: int

    @property
    def fixed(self) -> int:
        """What does not grow with the microbatches."""
        return self.state + self.replica + self.next_replica + self.activations

    def total(self, num_microbatches: int) -> int:
        """All, when the pipeline has so many microbatches."""
        return self.fixed + self.log_a_microbatch * num_microbatches


class Memory:
    """What units take, wherever they are cut.

    Raises:
        ValueError: the costs have no bytes.
    """

    def __init__(self, costs: UnitCosts) -> None:
        sizes = [unit.bytes for unit in costs.units if unit.bytes is not None]
        if not costs.has_bytes:
            raise ValueError("it is not known what the units take of memory")
        self._state = prefix_sums([size.state for size in sizes])
        self._activations = prefix_sums([size.activations for size in sizes])
        self._message = costs.message_bytes

    @property
    def state(self) -> int:
        """Of the whole model."""
        return self._state[-1]

    def of_cut(self, spans: Sequence[StageSpan]) -> tuple[NodeMemory, ...]:
        """By stage what its node needs."""
        size = len(spans)
        return tuple(
            self.of_node(size, s, spans[s], spans[(s + 1) % size], spans[(s + 2) % size])
            for s in range(size)
        )

    def of_node(
        self, num_stages: int, stage: int, own: StageSpan, after: StageSpan, next_after: StageSpan
    ) -> NodeMemory:
        """What the node of a stage needs, by the units of it and of the two after it."""
        if num_stages == 1:
            return NodeMemory(self.state_of(own), 0, 0, 2 * self.saved_by(own), 0)
        follower = (stage + 1) % num_stages
        activations = (num_stages - stage) * self.saved_by(own)
        activations += (num_stages - follower) * self.saved_by(after)
        neighbours = sum((s > 0) + (s < num_stages - 1) for s in (stage, follower))
        return NodeMemory(
            state=self.state_of(own),
            replica=self.state_of(after),
            next_replica=self.state_of(next_after) if num_stages > 2 else 0,
            activations=activations,
            log_a_microbatch=_LOGGED * neighbours * self._message,
        )

    def state_of(self, span: StageSpan) -> int:
        """Of these units as primary or as replica."""
        return self._state[span[1]] - self._state[span[0]]

    def saved_by(self, span: StageSpan) -> int:
        """What the forward of one microbatch saves if these units are one stage."""
        first, past = span
        between = max(0, past - first - 1) * self._message
        return self._activations[past] - self._activations[first] + between


def most_microbatches(nodes: Sequence[NodeMemory], limit: int) -> int | None:
    """How many microbatches a pipeline can have in so much memory; None if none is logged."""
    rooms = [
        max(0, limit - node.fixed) // node.log_a_microbatch
        for node in nodes
        if node.log_a_microbatch
    ]
    if any(node.fixed > limit for node in nodes):
        return 0
    return min(rooms, default=None)
