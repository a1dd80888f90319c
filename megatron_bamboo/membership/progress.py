"""How far a worker has come in an iteration, as its neighbours read it after a loss.

Each survivor of a hit pipeline writes ``progress/<epoch>/<node>`` when it has left that epoch.
What counts is what was received, not what was sent: a message may have been lost on its way.
"""

import json
from dataclasses import dataclass
from typing import Self

from megatron_bamboo.schedule.actions import Action
from megatron_bamboo.schedule.takeover import Progress


@dataclass(frozen=True, slots=True)
class NodeProgress:
    """The progress of one node within ``step``."""

    node: str
    step: int
    progress: Progress

    def to_json(self) -> str:
        """The value of ``progress/<epoch>/<node>``: the actions in their text form, sorted."""
        done = [str(action) for action in sorted(self.progress.done)]
        received = [str(action) for action in sorted(self.progress.received)]
        return json.dumps(
            {"node": self.node, "step": self.step, "done": done, "received": received}
        )

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """The progress that ``to_json`` wrote."""
        values = json.loads(text)
        done, received = (
            frozenset(Action.parse(action) for action in values[name])
            for name in ("done", "received")
        )
        return cls(values["node"], values["step"], Progress(done, received))
