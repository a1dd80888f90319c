"""What a decision is made from: the plan in force, who is there, and what has happened so far.

Plan and nodes alone: the same view is made by a coordinator from its store and by the simulator
from a trace.
"""

from dataclasses import dataclass

from megatron_bamboo.planner.plan import Plan


@dataclass(frozen=True, slots=True)
class Lost:
    """Nodes are no more, in the middle of an iteration or between two."""

    nodes: tuple[str, ...]

    def __str__(self) -> str:
        return f"lost {', '.join(self.nodes)}"


@dataclass(frozen=True, slots=True)
class Joined:
    """Nodes have come and can take a place."""

    nodes: tuple[str, ...]

    def __str__(self) -> str:
        return f"{', '.join(self.nodes)} can take a place"


@dataclass(frozen=True, slots=True)
class Passed:
    """A step has passed, so that a change can be planned."""

    step: int

    def __str__(self) -> str:
        return f"step {self.step} has passed"


Event = Lost | Joined | Passed


@dataclass(frozen=True, slots=True)
class History:
    """When the job began, and since then each moment at which nodes were lost or came, in order."""

    began: float
    moments: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class View:
    """How things stand."""

    plan: Plan | None
    """In force before the event; None before the first one."""
    history: History
    standbys: tuple[str, ...] = ()
    """Nodes that can take a place, the one that came first being the first."""
    lost: frozenset[str] = frozenset()
    """Nodes of the plan that are no more, those of the event included, and that no plan follows."""
    step: int = 0
    """The newest that has passed."""
    saved_step: int = 0
    """That of the newest checkpoint; 0: the model as it begins."""

    @property
    def survivors(self) -> tuple[str, ...]:
        """The plan's nodes that live."""
        nodes = () if self.plan is None else self.plan.nodes
        return tuple(node for node in nodes if node not in self.lost)

    @property
    def nodes(self) -> tuple[str, ...]:
        """All that live."""
        return self.survivors + self.standbys
