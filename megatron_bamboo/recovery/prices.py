"""What it takes to go on after a loss, by each way that there is.

Seconds that do not follow from the model and the schedule: they are measured, or taken from the
papers. Decisions are weighed with them, and the simulator charges them.
"""

import math
from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class Prices:
    """Seconds of each way to go on, and how fast state moves.

    Raises:
        ValueError: for a price that cannot be.
    """

    bandwidth: float = 1.25e9
    """Bytes a second that a node's link carries, each way."""
    takeover_seconds: float = 1.0
    """From a loss until its shadow works in the victim's place, beside what is computed again."""
    switch_seconds: float = 0.1
    """What a planned change, whose state has moved before, holds up."""
    reconfigure_seconds: float = 2.0
    """What a change for which all wait takes, beside the time in which state moves."""
    start_seconds: float = 60.0
    """From a node's arrival until it can take a place."""
    restore_seconds: float = 60.0
    """From the decision until all processes have started anew and loaded the checkpoint."""
    save_seconds: float = 10.0
    """What a checkpoint holds up."""
    save_interval: int = 100
    """Iterations from one checkpoint to the next."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{field.name} is {value:g}: it must be 0 or above")
        if self.bandwidth == 0 or self.save_interval == 0:
            name = "bandwidth" if self.bandwidth == 0 else "save_interval"
            raise ValueError(f"{name} is 0: it must be above 0")
