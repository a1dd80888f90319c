"""The policies that there are, by the names that a user gives them."""

from enum import StrEnum

from megatron_bamboo.schedule.redundancy import Redundancy


class PolicyName(StrEnum):
    """Each of the papers' systems, and what this project makes of them."""

    AUTO = "auto"  # takes over, rebalances, and reconfigures where that pays
    BAMBOO = "bamboo"  # takes over and heals; each pipeline keeps its microbatches
    OOBLECK = "oobleck"  # does the step again in other pipelines
    CHECKPOINT = "checkpoint"  # starts anew from the last checkpoint

    @property
    def redundancy(self) -> Redundancy:
        """Whether stages have replicas."""
        keeps = self in (PolicyName.AUTO, PolicyName.BAMBOO)
        return Redundancy.LAZY if keeps else Redundancy.NONE

    @property
    def shares_anew(self) -> bool:
        """Whether pipelines may get other microbatches while they live."""
        return self in (PolicyName.AUTO, PolicyName.OOBLECK)
