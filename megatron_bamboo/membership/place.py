"""Where in the training a worker is: what it says of itself when it raises, hangs or waits."""

from dataclasses import dataclass

# What has no action of its own.
START = "start-up"
LOOP = "the loop"
SAVE = "the save"
FINISH = "the end"


@dataclass(frozen=True, slots=True)
class Place:
    """An action, or one of the names above, in a step."""

    step: int
    action: str

    def __str__(self) -> str:
        return self.action if self.action == START else f"{self.action} of step {self.step}"
