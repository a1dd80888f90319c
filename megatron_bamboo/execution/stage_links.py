"""Channels between the stages of a pipeline whose workers Megatron has started.

The same transport as the product's, on the ranks of Megatron's pipeline group: it has tags and
threads that receive, so that no order of sends and receives can block.
"""

from collections.abc import Sequence
from datetime import timedelta
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_bamboo.execution.errors import DeadlineExceeded, EpochEnded
from megatron_bamboo.execution.groups import Group, make_group
from megatron_bamboo.execution.mailbox import Mailbox, Message
from megatron_bamboo.execution.transport import Expected, TensorShape, Transport
from megatron_bamboo.schedule.actions import RECEIVE_OPS, Action, Op


class StageLinks:
    """One stage's channels to the stages before and after it, the first and the last included.

    Args:
        stages: Megatron's pipeline group; only its ranks are used, nothing is sent over it.
        timeout: the longest wait for a message.
    """

    def __init__(self, stages: dist.ProcessGroup, timeout: timedelta) -> None:
        self.stage, self.num_stages = stages.rank(), stages.size()
        self._timeout = timeout
        default = dist.distributed_c10d._get_default_store()
        name = f"megatron_bamboo/{stages.group_name}/{timeout.total_seconds()}"
        self._store = dist.PrefixStore(name, default)
        self._transport = Transport(Mailbox(), self._make_pair)
        near = {(self.stage + step) % self.num_stages for step in (-1, 1)}
        self._transport.connect(_name(stage) for stage in near)
        self._call = 0

    def begin(self, program: Sequence[Action], size: tuple[int, ...], dtype: torch.dtype) -> None:
        """Let the messages of a program come, in its order."""
        self._call += 1
        shape = TensorShape(size, dtype, torch.device(torch.cuda.current_device()))
        self._transport.expect(
            Expected(Message(self._call, action), _name(self._sender(action)), shape)
            for action in program
            if action.op in RECEIVE_OPS
        )

    def send(self, receive: Action, tensor: Tensor) -> None:
        """Start sending what another stage's action waits for."""
        self._transport.send(_name(receive.stage), Message(self._call, receive), tensor)

    def receive(self, action: Action) -> Tensor:
        """Wait for a message.

        Raises:
            ConnectionError: its sender is gone, or it did not come in time.
        """
        message, sender = Message(self._call, action), self._sender(action)
        try:
            return self._transport.mailbox.take(
                message,
                self._timeout.total_seconds(),
                self._transport.has_broken,
                f"stage {sender}",
            )
        except EpochEnded:
            raise ConnectionError(f"{message}: the link to stage {sender} is broken") from None
        except DeadlineExceeded as error:
            raise ConnectionError(str(error)) from error

    def finish(self) -> None:
        """Return when every message sent has arrived.

        Raises:
            ConnectionError: a receiver is gone.
        """
        self._transport.flush(self._timeout)
        self._transport.finish_step(self._call)

    def _sender(self, action: Action) -> int:
        step = -1 if action.op is Op.RECV_F else 1
        return (action.stage + step) % self.num_stages

    def _make_pair(self, peer: str) -> Group:
        pair = sorted((_name(self.stage), peer))
        return make_group(self._store, "+".join(pair), pair, _name(self.stage), self._timeout)


# Once made, links stay: under a name where a neighbour's old address still stands none can be made.
@cache
def links_over(stages: dist.ProcessGroup, timeout: timedelta) -> StageLinks:
    """The links over a pipeline group, the same ones from patch to patch.

    Args as of ``StageLinks``.
    """
    return StageLinks(stages, timeout)


def _name(stage: int) -> str:
    return f"stage{stage}"
