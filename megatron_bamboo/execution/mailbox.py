"""Messages that have arrived, by what they are and not by when.

The main thread takes from it, the channels' threads put into it, and the control thread wakes
whoever waits when the plan changes. A message is identified by its step and its receive action,
so that one that arrives twice is dropped, and one that arrived early is there when it is wanted.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from megatron_bamboo.execution.errors import DeadlineExceeded, EpochEnded
from megatron_bamboo.schedule.actions import Action, Op
from megatron_bamboo.schedule.mirrors import MIRRORS_KEPT


@dataclass(frozen=True, slots=True)
class Message:
    """The identity of what is sent: it outlives epochs."""

    step: int
    receive: Action  # the action that waits for it, also where a tail action has no other name

    def __str__(self) -> str:
        return f"{self.receive} of step {self.step}"


class Mailbox:
    """Arrived messages, kept until their step is over; of mirrors the newest."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._messages: dict[Message, Tensor] = {}
        self._held: frozenset[Message] = frozenset()

    def put(self, message: Message, tensor: Tensor) -> None:
        """Store a message, unless it is there already."""
        with self._condition:
            self._messages.setdefault(message, tensor)
            if message.receive.op is Op.RECV_MIRROR:
                self._forget_older_mirrors(message)
            self._condition.notify_all()

    def take(
        self, message: Message, seconds: float, must_leave: Callable[[], bool], sender: str
    ) -> Tensor:
        """Wait for a message; it stays here, since a takeover may ask whether it came.

        Raises:
            EpochEnded: the plan changed meanwhile.
            DeadlineExceeded: after ``seconds``, naming the sender.
        """
        deadline = time.monotonic() + seconds
        with self._condition:
            while message not in self._messages:
                if must_leave():
                    raise EpochEnded
                left = deadline - time.monotonic()
                if left <= 0:
                    raise DeadlineExceeded(
                        f"{message} did not come from {sender} in {seconds:.0f} s"
                    )
                self._condition.wait(left)
            return self._messages[message]

    def arrived(self, step: int) -> frozenset[Action]:
        """The receive actions of a step whose message is here.

        None of them gives way to a newer mirror from then on: others will rely on it, and a victim
        that is still alive may send more.
        """
        with self._condition:
            self._held = frozenset(m for m in self._messages if m.step == step)
            return frozenset(m.receive for m in self._held)

    def kept(self) -> list[Tensor]:
        """All that is here."""
        with self._condition:
            return list(self._messages.values())

    def forget_until(self, step: int) -> None:
        """Drop the messages of a step and of those before it."""
        with self._condition:
            self._messages = {m: t for m, t in self._messages.items() if m.step > step}

    def clear(self) -> None:
        """Drop all messages: what they belong to is begun anew."""
        with self._condition:
            self._messages.clear()

    def wake(self) -> None:
        """Let whoever waits look whether it must leave."""
        with self._condition:
            self._condition.notify_all()

    def _forget_older_mirrors(self, newest: Message) -> None:
        receive = newest.receive
        kind = (newest.step, receive.stage, receive.chunk, receive.op)
        alike = sorted(
            (m.receive, m)
            for m in self._messages
            if (m.step, m.receive.stage, m.receive.chunk, m.receive.op) == kind
        )
        for _, message in alike[:-MIRRORS_KEPT]:
            if message not in self._held:
                del self._messages[message]
