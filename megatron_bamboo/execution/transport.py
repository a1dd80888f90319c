"""Messages between the workers of a pipeline: one channel to each neighbour.

A channel has a process group of its own (so that remaking the victim's loses no message between
others) and threads that make the group and receive what the program expects. So messages arrive
while the main thread computes, a send never waits for a receiver, and a channel that breaks is a
sign that only ends the channel.

Messages of one kind come in the program's order. Between kinds there is none: a takeover puts new
messages between those that are waited for already, so each kind is waited for by itself.
"""

import queue
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_bamboo.execution.errors import PeerLost
from megatron_bamboo.execution.groups import GIVE_UP_SECONDS, Group
from megatron_bamboo.execution.mailbox import Mailbox, Message
from megatron_bamboo.membership.waits import Sent, SentLog
from megatron_bamboo.schedule.actions import UNIT_OPS, Op
from megatron_bamboo.schedule.schedule import MAX_CHUNKS, MAX_MICROBATCHES, MAX_STAGES

# A tag has 31 bits and must tell apart all messages that can be under way on one channel. Two
# steps next to each other can overlap, more cannot, since a commit lies between them.
_STEPS_TOLD_APART = 4
_KINDS = (Op.RECV_F, Op.RECV_B, Op.RECV_MIRROR)
# These have neither chunk nor microbatch: one kind of tag, told apart where others have those.
_TAIL_KINDS = (
    *(Op.TIE, Op.RECV_REFRESH, Op.RECV_STATE),
    *(Op.RECV_UNIT, Op.RECV_UNIT_GRADIENT),
)


@dataclass(frozen=True, slots=True)
class TensorShape:
    """What a message's tensor looks like."""

    size: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def empty(self) -> Tensor:
        """Memory for one such tensor."""
        return torch.empty(self.size, dtype=self.dtype, device=self.device)


@dataclass(frozen=True, slots=True)
class Expected:
    """A message that a program waits for, and who sends it."""

    message: Message
    sender: str
    shape: TensorShape


def tag_of(message: Message) -> int:
    """The number that identifies a message on its channel; below 2**31."""
    receive = message.receive
    chunk, microbatch, kind = receive.chunk or 0, receive.microbatch or 0, len(_KINDS)
    if receive.op in _TAIL_KINDS:
        microbatch = _TAIL_KINDS.index(receive.op)
    else:
        kind = _KINDS.index(receive.op)
    assert receive.stage < MAX_STAGES and chunk < MAX_CHUNKS and microbatch < MAX_MICROBATCHES
    tag = message.step % _STEPS_TOLD_APART * (len(_KINDS) + 1) + kind
    return ((tag * MAX_STAGES + receive.stage) * MAX_CHUNKS + chunk) * MAX_MICROBATCHES + microbatch


def stream_of(message: Message, group: Group) -> object:
    """What tells the messages of one order from others: of one kind, for one stage and chunk.

    Where a group has no tags, all that it brings is in one order.
    """
    receive = message.receive
    if not group.has_tags:
        return None
    # Units come in their order, and are too many for a thread each.
    stage = None if receive.op in UNIT_OPS else receive.stage
    return (receive.op, stage, receive.chunk)


class Channel:
    """The link to one peer."""

    def __init__(self, peer: str, make_group: Callable[[], Group], mailbox: Mailbox) -> None:
        self.peer = peer
        self.bytes_sent = 0
        self.bytes_received = 0
        self._mailbox = mailbox
        self._told: queue.SimpleQueue[Sequence[Expected] | int | None] = queue.SimpleQueue()
        """What to receive, which steps have passed, and None at the end."""
        self._lock = threading.Lock()
        self._group: Group | None = None
        self._unsent: list[tuple[Message, Tensor]] = []
        self._under_way: list[tuple[dist.Work, Tensor]] = []
        self._mirrors: _Stream[tuple[dist.Work, Tensor]] | None = None
        self._mirrored_step = 0
        self._settled = threading.Event()  # the group is there, or never will be
        self._broken = False  # a sign of a loss: nothing more is sent
        self._closed = False  # the peer is lost: nothing more is taken
        self._thread = threading.Thread(
            target=self._run, args=(make_group,), name=f"channel-{peer}", daemon=True
        )
        self._thread.start()

    def expect(self, expected: Sequence[Expected]) -> None:
        """Receive these messages, in this order and after those expected before them."""
        self._told.put(expected)

    def pass_step(self, step: int) -> None:
        """A step has passed: what has brought nothing for a while needs no thread any more."""
        self._told.put(step)

    def send(self, message: Message, tensor: Tensor) -> None:
        """Send, now or when the group is there; on a broken channel nothing, the log has it."""
        with self._lock:
            if self._broken:
                return
            if self._group is None:
                self._unsent.append((message, tensor))
                return
            self._start(self._group, message, tensor)

    @property
    def is_broken(self) -> bool:
        """Whether a wait has failed: nothing more comes."""
        return self._broken

    def flush(self, timeout: timedelta) -> None:
        """Return when all that was sent has arrived.

        Raises:
            ConnectionError: the peer is gone or did not take it in time.
        """
        if not self._settled.wait(timeout.total_seconds()) or self._broken:
            raise ConnectionError(f"there is no link to {self.peer}")
        with self._lock:
            # gloo waits for ever in a second wait for the same send.
            under_way, self._under_way = self._under_way, []
        try:
            for work, _tensor in under_way:
                work.wait(timeout)
        except RuntimeError as error:
            raise ConnectionError(f"{self.peer} did not take what was sent: {error}") from error

    def kept(self) -> list[Tensor]:
        """What was sent and is kept."""
        with self._lock:
            return [tensor for _, tensor in (*self._unsent, *self._under_way)]

    def finish_sends(self) -> None:
        """Forget what was sent: every receiver has it, as the passed commit proves."""
        with self._lock:
            self._under_way.clear()

    def close(self) -> None:
        """Leave the channel for good; when this returns nothing arrives any more."""
        with self._lock:
            self._broken = self._closed = True
            group = self._group
        self._told.put(None)
        if group is not None:
            group.release()
            # A wait that gloo does not end is left behind; what it brings is dropped.
            self._thread.join(GIVE_UP_SECONDS)
        # Without a group the thread is in the rendezvous, and ends when it finds itself broken.

    def _run(self, make_group: Callable[[], Group]) -> None:
        """Make the group and give each stream of messages a thread that waits for it."""
        try:
            group = make_group()
            self._open(group)
        except PeerLost:
            self._break()
            return
        streams: dict[object, _Stream[Expected]] = {}
        newest: dict[object, int] = {}
        while (told := self._told.get()) is not None:
            if isinstance(told, int):
                # What a takeover or a change has brought once would else keep its thread for ever.
                for key in [key for key in streams if newest[key] < told - 1]:
                    if streams[key].is_idle:
                        streams.pop(key).end()
                self._end_idle_mirrors(told)
                continue
            for expected in told:
                key = stream_of(expected.message, group)
                if key not in streams:
                    streams[key] = _Stream(partial(self._receive, group), self._break)
                streams[key].put(expected)
                newest[key] = expected.message.step
        for stream in streams.values():
            stream.end()
        with self._lock:
            # Kept here it would keep this channel, and so the group with its threads, until the
            # collector of cycles comes.
            mirrors, self._mirrors = self._mirrors, None
        if mirrors is not None:
            mirrors.end_later()

    def _end_idle_mirrors(self, passed_step: int) -> None:
        """The peer may be a shadow no more."""
        with self._lock:
            mirrors = self._mirrors
            if mirrors is None or self._mirrored_step >= passed_step - 1 or not mirrors.is_idle:
                return
            self._mirrors = None
        mirrors.end_later()

    def _receive(self, group: Group, expected: Expected) -> None:
        tensor = expected.shape.empty()
        group.receive(tensor, self.peer, tag_of(expected.message))
        with self._lock:
            if self._closed:
                return
            self.bytes_received += tensor.nbytes
            self._mailbox.put(expected.message, tensor)

    def _break(self) -> None:
        with self._lock:
            self._broken = True
        self._settled.set()
        self._mailbox.wake()

    def _open(self, group: Group) -> None:
        with self._lock:
            if self._broken:
                group.release()
                return
            self._group = group
            for message, tensor in self._unsent:
                self._start(group, message, tensor)
            self._unsent.clear()
        self._settled.set()

    def _start(self, group: Group, message: Message, tensor: Tensor) -> None:
        try:
            work = group.send(tensor, self.peer, tag_of(message))
        except PeerLost:
            self._broken = True
            return
        self.bytes_sent += tensor.nbytes
        if message.receive.op is Op.RECV_MIRROR:
            # As large as the gradient: kept no longer than need be, and not until the commit.
            self._mirrors = self._mirrors or _Stream(self._finish, self._break)
            self._mirrors.put((work, tensor))
            self._mirrored_step = message.step
        else:
            self._under_way.append((work, tensor))

    def _finish(self, sent: tuple[dist.Work, Tensor]) -> None:
        try:
            sent[0].wait()
        except RuntimeError as error:
            raise PeerLost((self.peer,), "send of a mirror", error) from error


_Item = TypeVar("_Item")


class _Stream(Generic[_Item]):
    """A thread that waits for one thing after the other, until a wait fails."""

    def __init__(self, wait_for: Callable[[_Item], None], failed: Callable[[], None]) -> None:
        self._items: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._wait_for = wait_for
        self._failed = failed
        self._num_put = 0
        self._num_done = 0
        self._thread = threading.Thread(target=self._run, name="stream", daemon=True)
        self._thread.start()

    def put(self, item: _Item) -> None:
        """Wait for this after all that was put before."""
        self._num_put += 1
        self._items.put(item)

    @property
    def is_idle(self) -> bool:
        """Whether all that was put has come; asked by who puts."""
        return self._num_done == self._num_put

    def end(self) -> None:
        """Wait until nothing arrives any more; what is waited for must have been ended."""
        self.end_later()
        self._thread.join()

    def end_later(self) -> None:
        """Let the thread end with what was put."""
        self._items.put(None)

    def _run(self) -> None:
        try:
            while self._wait_for_next():
                pass
        except PeerLost:
            self._failed()

    def _wait_for_next(self) -> bool:
        """False at the end; what was waited for is held no longer."""
        item = self._items.get()
        if item is not None:
            self._wait_for(item)
            self._num_done += 1
        return item is not None


class Transport:
    """All channels of a worker; the control thread drops some while the main thread uses others."""

    def __init__(self, mailbox: Mailbox, make_group: Callable[[str], Group]) -> None:
        self.mailbox = mailbox
        self._make_group = make_group
        self._lock = threading.Lock()
        self._channels: dict[str, Channel] = {}
        self._expected: dict[Message, str] = {}
        self._lost: set[str] = set()
        self._traffic: dict[str, tuple[int, int]] = {}
        self._sent = SentLog()
        self._copies_may_be_under_way = False

    def connect(self, peers: Iterable[str]) -> None:
        """Follow a plan: open a channel to each of its peers that has none and is not lost."""
        with self._lock:
            self._copies_may_be_under_way = True
            for peer in sorted(set(peers) - self._channels.keys() - self._lost):
                self._channels[peer] = Channel(peer, self._maker(peer), self.mailbox)

    def drop(self, lost: Iterable[str]) -> None:
        """Close the channels to lost nodes for good; then nothing arrives from them any more."""
        with self._lock:
            self._lost |= set(lost)
            closing = [self._channels.pop(peer) for peer in self._lost & self._channels.keys()]
            self._expected = {m: p for m, p in self._expected.items() if p not in self._lost}
        for channel in closing:
            self._close(channel)

    def renew(self, peers: Collection[str], forgets_step: bool) -> None:
        """Leave the channels to live peers: they begin the step anew, or this worker does. Who is
        connected again has a new channel.

        Args:
            forgets_step: this worker begins it anew, and forgets all that came and was sent in it.
        """
        with self._lock:
            closing = [self._channels.pop(peer) for peer in peers if peer in self._channels]
            self._expected = {
                m: p for m, p in self._expected.items() if not forgets_step and p not in peers
            }
        for channel in closing:
            self._close(channel)
        if forgets_step:
            self._sent = SentLog()
            self.mailbox.clear()
        else:
            self._sent.forget(peers)

    def expect(self, expected: Iterable[Expected]) -> None:
        """Receive these messages in this order, except what is expected already.

        What a lost node was to send is expected anew when the next plan says from whom, also if it
        is here: a message that nobody receives would stay in the channel's way.
        """
        new: dict[str, list[Expected]] = {}
        with self._lock:
            for one in expected:
                if one.sender in self._channels and one.message not in self._expected:
                    self._expected[one.message] = one.sender
                    new.setdefault(one.sender, []).append(one)
            for sender, messages in new.items():
                self._channels[sender].expect(messages)

    def send(self, peer: str, message: Message, tensor: Tensor) -> None:
        """Start sending a message; to a lost node nothing is sent, the log has it."""
        with self._lock:
            channel = self._channels.get(peer)
        if channel is None:
            assert peer in self._lost, f"no channel to {peer} for {message}"
            return
        channel.send(message, tensor)
        self._sent.note(peer, message.step, message.receive)

    def sent(self) -> tuple[Sent, ...]:
        """What the main thread, which alone may ask, has sent in the newest step: whatever has
        become of it."""
        return self._sent.sent()

    def forget_sent(self) -> None:
        """What the main thread sends from now on has the names of what it has sent before."""
        self._sent = SentLog()

    def has_broken(self) -> bool:
        """Whether a channel's peer seems to be gone."""
        with self._lock:
            return any(channel.is_broken for channel in self._channels.values())

    def flush(self, timeout: timedelta) -> None:
        """Return when all that was sent has arrived.

        Raises:
            ConnectionError: a peer is gone or did not take it in time.
        """
        with self._lock:
            channels = list(self._channels.values())
        for channel in channels:
            channel.flush(timeout)

    def finish_step(self, step: int) -> None:
        """Forget a step whose commit has passed.

        Under a new plan some messages are sent to a worker that has them already and does not wait
        for the copy. One that is forgotten before its receiver's channel comes to it never comes,
        and all behind it wait. So the first step keeps what it sent until the next, whose messages
        have come behind the copies.
        """
        with self._lock:
            for channel in self._channels.values():
                channel.pass_step(step)
                if not self._copies_may_be_under_way:
                    channel.finish_sends()
            self._copies_may_be_under_way = False
            self.mailbox.forget_until(step)
            self._expected = {m: p for m, p in self._expected.items() if m.step > step}

    def kept(self) -> list[Tensor]:
        """What has arrived, and what is sent and kept; mirrors leave when they have been sent."""
        with self._lock:
            channels = list(self._channels.values())
        return [*self.mailbox.kept(), *(tensor for ch in channels for tensor in ch.kept())]

    def traffic(self) -> dict[str, tuple[int, int]]:
        """Bytes sent and received by peer, lost ones included."""
        with self._lock:
            channels = list(self._channels.values())
        traffic = dict(self._traffic)
        for channel in channels:
            _count(traffic, channel)
        return dict(sorted(traffic.items()))

    def _close(self, channel: Channel) -> None:
        channel.close()
        _count(self._traffic, channel)

    def _maker(self, peer: str) -> Callable[[], Group]:
        return lambda: self._make_group(peer)


def _count(traffic: dict[str, tuple[int, int]], channel: Channel) -> None:
    sent, received = traffic.get(channel.peer, (0, 0))
    traffic[channel.peer] = (sent + channel.bytes_sent, received + channel.bytes_received)
