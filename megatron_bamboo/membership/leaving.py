"""What the store says of nodes that are to leave, from the notice to their end.

A node that is to leave is noticed, by its agent or by the job's user: the newest word counts, but
an agent's word that has proved false takes back no wish of the user's. When others have taken over
all that the node held it is going; when nobody needs anything of it any more it is released, and
when it has ended it is drained.
"""

import json
from dataclasses import asdict, dataclass
from typing import Self

NOTICED = "noticed/"
HEARD = "heard/"
"""By node the number of its agent's newest notice, which is said again at every connection."""
ASKED = "asked/"
"""By node what its job's user wants of it: that it leaves, or stays after all."""
GOING = "going/"
STAYS = "stays/"
"""By node why it cannot leave, however long one waits for it."""
RELEASED = "released/"
DRAINED = "drained/"
REMARK = "remark/"
"""What else an agent has to say of its machine, for people."""


@dataclass(frozen=True, slots=True)
class Notice:
    """A word that a node is to leave, or that it is not any more."""

    cause: str
    seconds: float | None = None
    """How long it had from the word on, as far as that is known."""
    is_over: bool = False
    """Whether an earlier word has proved false."""

    def to_json(self) -> str:
        """The value of ``noticed/<node>``."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """The notice that ``to_json`` wrote; ValueError for anything else."""
        values = json.loads(text)
        match values:
            case {"cause": str(cause), "seconds": float() | int() | None as seconds}:
                return cls(cause, seconds, bool(values.get("is_over")))
        raise ValueError(f"this is no notice: {text!r}")

    def __str__(self) -> str:
        return self.cause if self.seconds is None else f"{self.cause}, in {self.seconds:.0f} s"
