"""What a worker keeps of the iteration under way until its commit.

Besides activations this is the message log: the output of every forward (also the input of the
replica's forward) and every gradient sent upstream. A takeover sends from it again. It is real
memory; ``docs/design.md`` says how much.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

from torch import Tensor

from megatron_bamboo.execution.groups import Group
from megatron_bamboo.execution.mailbox import Message
from megatron_bamboo.schedule.actions import Action


@dataclass(slots=True)
class StepState:
    """One step on one worker; actions are keys in their F and B form."""

    step: int
    attempt: int = 0
    """The epoch in which it was begun anew; 0: it was not."""
    done: list[Action] = field(default_factory=list)
    saved: dict[Action, tuple[Tensor | None, Tensor]] = field(default_factory=dict)
    """By forward: its input and output, with their autograd graph, until the backward."""
    outputs: dict[Action, Tensor] = field(default_factory=dict)
    """By forward, redundant ones included: the output, for the next stage."""
    input_gradients: dict[Action, Tensor] = field(default_factory=dict)
    """By backward: the gradient of the input, for the previous stage."""
    losses: dict[int, float] = field(default_factory=dict)
    """By microbatch, where this worker ran the last stage."""
    reports: dict[int, object] = field(default_factory=dict)
    """By microbatch: what the user's loss function reported."""
    reduced_in: dict[str, Group | None] = field(default_factory=dict)
    """By unit: the group in which its reduction is complete."""
    role_gradients: dict[int, Tensor] = field(default_factory=dict)
    """By stage with a role of the tied weight: that role's reduced gradient alone."""
    tied: set[int] = field(default_factory=set)
    sent: set[tuple[Message, str]] = field(default_factory=set)
    """Tail messages sent, and to whom."""

    def send_again_to(self, peers: Collection[str]) -> None:
        """What some workers were sent is lost."""
        self.sent = {(message, peer) for message, peer in self.sent if peer not in peers}
