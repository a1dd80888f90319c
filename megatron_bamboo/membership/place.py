"""Where in the training a worker is: what it says of itself when it raises, hangs or waits."""

from dataclasses import dataclass

# What has no action of its own.
START = "start-up"
LOOP = "the loop"
SWITCH = "the change of plan"
EVALUATE = "the evaluation"
SAVE = "the save"
HOLD = "the wait for nodes"
FINISH = "the end"
LEAVE = "its leave"
DONE = "nothing any more"


@dataclass(frozen=True, slots=True)
class Place:
    """An action, or one of the names above, in a step."""

    step: int
    action: str
    waits_for: str = ""
    """Whoever has to act first, if the worker can do nothing itself."""

    def __str__(self) -> str:
        where = self.action if self.action == START else f"{self.action} of step {self.step}"
        return f"{where}, waiting for {self.waits_for}" if self.waits_for else where
