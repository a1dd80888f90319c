"""When a job has gone back to a checkpoint: what came after it is undone, and done again.

Nobody starts anew for it. The plan names the state, and each worker throws away what it is made of
and makes itself again from the plan. Steps then pass for a second time, under the same numbers; so
what a worker had still to say of the first time must not be taken for the second.
"""

import json
from dataclasses import asdict, dataclass
from typing import Self

from megatron_bamboo.membership.table import Table
from megatron_bamboo.planner.plan import Plan

RESTORES_KEY = "restores"
_OF_STEPS = (
    *("passed/", "saved/", "said/saved/", "said/checkpoint/", "said/differences/"),
    *("evaluated/", "evaluation/", "said/evaluated/", "said/evaluation/"),
)
"""What is known of a step, by its number."""


class GoBack(Exception):
    """All begin again from a checkpoint: nothing that this worker has is of use any more."""

    def __init__(self, plan: Plan) -> None:
        """``plan`` is the one by which they do, as the workers of this tensor rank see it."""
        self.plan = plan
        super().__init__(f"all begin again from {plan.restored} in epoch {plan.epoch}")


@dataclass(frozen=True, slots=True)
class Restores:
    """How often all went back so far, and what was undone the last time."""

    number: int = 0
    epoch: int = 0
    """From this one on steps are done again."""
    step: int = 0
    """The last one that was kept."""
    furthest: int = 0
    """The newest step that has ever passed."""

    def undoes(self, step: int, epoch: int) -> bool:
        """Whether what was done in a step counts no more."""
        return epoch < self.epoch and step > self.step

    @classmethod
    def of(cls, table: Table) -> Self:
        """As the store has it."""
        known = table.get(RESTORES_KEY)
        return cls() if known is None else cls(**json.loads(known))

    def write(self, table: Table) -> None:
        """Keep it, and forget what is known of the steps that are undone."""
        with table.together():
            table.set(RESTORES_KEY, json.dumps(asdict(self)).encode())
            for prefix in _OF_STEPS:
                for key in table.items(prefix):
                    if int(key.removeprefix(prefix).partition("/")[0]) > self.step:
                        table.delete(key)
