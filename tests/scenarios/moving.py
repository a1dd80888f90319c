"""The moments of the step in which state moves, at which the sweep kills a node.

A node is lost first. In the step in which its stages get new holders another one dies, before the
n-th action that it begins there: a new shadow, a standby that is to join, or a node of another
pipeline. Those are left out that alone hold a stage then.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from evidence import Expected
from tiny_gpt import Shape

from megatron_bamboo.schedule.redundancy import Redundancy

FIRST_VICTIM = "node1"
# Its shadow runs stages 0 and 1 then, and node3 gets to shadow stage 1.
FIRST_LOSS = f"{FIRST_VICTIM}@iter2:1.0B1"
NEW_SHADOW, ONLOOKER = "node3", "node5"
# Of a node that computes, and of one that only receives; then comes the step after it.
NUM_ACTIONS, NUM_ACTIONS_OF_STANDBY = 28, 10


@dataclass(frozen=True, slots=True)
class MovingMoment:
    """One case: this node dies just before its n-th action of the step."""

    shape: Shape
    redundancy: Redundancy
    victim: str
    number: int

    @property
    def injections(self) -> tuple[str, ...]:
        """As ``bamboo run --inject`` takes them."""
        return (FIRST_LOSS, f"{self.victim}@change:#{self.number}")

    @property
    def num_standbys(self) -> int:
        """Whether the victim is a standby, of which there is no other."""
        return int(self.victim == _standby(self.shape))

    @property
    def expected(self) -> Expected:
        """What the run must show."""
        victims = (FIRST_VICTIM, self.victim)
        place = {self.victim: FIRST_VICTIM} if self.num_standbys else {}
        return Expected(self.shape, self.redundancy, victims, place, knows_takeovers=False)

    def __str__(self) -> str:
        return f"{self.shape}-{self.redundancy}-{self.victim}-change#{self.number}"


def moving_moments() -> list[MovingMoment]:
    """Everything that is planned."""
    return [
        moment
        for num_pipelines, variant, mode in (
            (1, "", Redundancy.LAZY),
            (1, "bf16", Redundancy.BUBBLE),
            (2, "zero", Redundancy.EAGER),
            (2, "zero-bf16", Redundancy.LAZY),
        )
        for moment in _moments(Shape(4, num_pipelines, num_steps=14, variant=variant), mode)
    ]


def _moments(shape: Shape, mode: Redundancy) -> Iterator[MovingMoment]:
    victims = [NEW_SHADOW, *[ONLOOKER] * (shape.num_pipelines > 1)]
    for victim in victims:
        for number in range(1, NUM_ACTIONS + 1):
            yield MovingMoment(shape, mode, victim, number)
    for number in range(1, NUM_ACTIONS_OF_STANDBY + 1):
        yield MovingMoment(shape, mode, _standby(shape), number)


def _standby(shape: Shape) -> str:
    return f"node{shape.num_nodes}"
