"""An agent's connection to whoever leads the job, made anew as often as it is lost.

A coordinator may die and come back elsewhere, and nothing on the node depends on it meanwhile. What
the agent has to report it keeps and says at every connection again: one who listened may have died
before it wrote it down.
"""

import contextlib
import os
import select
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from megatron_bamboo.agent.job import LEASE_SECONDS
from megatron_bamboo.agent.leases import FIRST_WORD, beat_seconds
from megatron_bamboo.agent.outcome import OUTCOME_FILE
from megatron_bamboo.membership.address import Address, Signpost
from megatron_bamboo.membership.channel import Channel, Impostor
from megatron_bamboo.membership.clock import PatientClock
from megatron_bamboo.membership.frames import MalformedFrame, encode_body
from megatron_bamboo.membership.keys import NodeIdentity
from megatron_bamboo.membership.waits import Wait
from megatron_bamboo.observe.events import EventLog

# A frame that has begun to arrive is whole within this time, and one is taken within it.
FRAME_SECONDS = 5.0
CONNECT_SECONDS = 1.0
# A coordinator answers a greeting within this time, or another connection is tried.
GREETING_SECONDS = 10.0
RETRY_SECONDS = 0.1
# After an interruption TCP may wait as long again before it repeats what was said. A new connection
# does not; it is made when an answer is so many beats late, and no sooner than the time below.
BEATS_UNHEARD = 1.5
LEAST_UNHEARD_SECONDS = 3.0


def unheard_seconds(lease_seconds: float) -> float:
    """How long an agent hears nothing before it makes another connection."""
    return max(LEAST_UNHEARD_SECONDS, BEATS_UNHEARD * beat_seconds(lease_seconds))


class NodeEnd(Enum):
    """How a node's part in its job ends."""

    LOST = "lost"
    LEFT = "left"
    """In good order: others hold all that it held."""
    STAYS = "stays"
    """The same, and its machine is free to be another node."""
    OVER = "over"
    """The whole job has ended."""


class CoordinatorLink:
    """One agent's connection.

    Args:
        identity: the node's, for as long as this process lives.
        store: where the coordinator is found (``membership/address.py``).
        patience_seconds: how long to look for one that answers, before the job counts as over.
        unheard_seconds: how long to hear nothing, before another connection is made.
    """

    def __init__(
        self,
        identity: NodeIdentity,
        store: str,
        job_dir: Path,
        patience_seconds: float,
        events: EventLog,
        unheard_seconds: float = unheard_seconds(LEASE_SECONDS),
    ) -> None:
        self._unheard_seconds = unheard_seconds
        self._credential = identity.agent()
        self._hello = {"op": "hello", "pid": os.getpid()}
        self._signpost = Signpost(store)
        self._outcome = job_dir / OUTCOME_FILE
        self._patience_seconds = patience_seconds
        self._events = events
        self._facts: list[Mapping[str, Any]] = []
        self._channel: Channel | None = None
        self._parked: Channel | None = None
        self._address: Address | None = None
        self._greeting_until = 0.0
        self._impostor: Address | None = None
        self._is_welcome = False
        self.end = NodeEnd.LOST
        """How this node's part has ended, once it has."""
        self.must_finish = False
        """Whether this node's workers are to end after their step."""
        self._word = FIRST_WORD
        self._next_try = time.monotonic()
        self._clock = PatientClock()
        self._heard_at = self._clock.look()

    @property
    def fileno(self) -> int | None:
        """What to wait for until there is something to hear; None while there is no connection."""
        return None if self._channel is None else self._channel.socket.fileno()

    def await_welcome(self, leaves: Callable[[], bool] = lambda: False) -> bool:
        """Wait until a coordinator knows this node; False if it has ended before.

        Args:
            leaves: whether the machine is to be taken: then it comes to no coordinator that it
                has not come to already.
        """
        while not self._is_welcome:
            if self._channel is None and leaves():
                self.end = NodeEnd.LEFT
                return False
            if self.is_over():
                return False
            if self._channel is None:
                time.sleep(RETRY_SECONDS)
                continue
            poll = select.poll()
            poll.register(self._channel.socket, select.POLLIN)
            if poll.poll(1000 * RETRY_SECONDS) and self.hear_stop():
                return False
        return True

    def is_over(self) -> bool:
        """Whether the job is over; to be asked several times a second: it keeps the link up."""
        silent = self._clock.look() - self._heard_at
        if self._channel is not None and self._is_elsewhere():
            self._lose("another one leads the job")
        is_greeting = self._channel is not None and not self._channel.is_open
        if is_greeting and time.monotonic() > self._greeting_until:
            self._lose("no answer to the greeting")
        if self._is_welcome and silent > self._unheard_seconds:
            self._park(f"nothing was heard for {silent:.1f} s")
        if self._channel is None and self._outcome.exists():
            self.end = NodeEnd.OVER
            return True
        if silent > self._patience_seconds:
            sys.stderr.write(f"no coordinator was heard of for {silent:.0f} s\n")
            return True
        if self._channel is None and time.monotonic() >= self._next_try:
            self._next_try = time.monotonic() + RETRY_SECONDS
            self._connect()
        return False

    def _is_elsewhere(self) -> bool:
        """Whether the job is led from elsewhere by now.

        A coordinator listens before it says where. If that is at the port of the one before, who
        has come to it by that one's word is right there, and would be lost by going again.
        """
        newest, known = self._signpost.find(), self._address
        assert known is not None, "it is connected"
        return newest is not None and (newest.host, newest.port) != (known.host, known.port)

    def report(self, fact: Mapping[str, Any]) -> None:
        """Say something that every coordinator must know; of notices only the newest, and nothing
        that is said again and again more than once."""
        if fact["op"] == "notice":
            self._facts = [known for known in self._facts if known["op"] != "notice"]
        if fact not in self._facts:
            self._facts.append(fact)
        if self._is_welcome:
            self._send(fact)

    def beat(self, places: Mapping[str, str], waits: Sequence[Wait] = ()) -> None:
        """Say that this node is there, and for whom its workers wait, if anybody listens."""
        if self._is_welcome:
            told = [wait.to_fields() for wait in waits]
            self._send({"op": "alive", "word": self._word, "places": places, "waits": told})

    def hear_stop(self) -> bool:
        """Take what has arrived; whether it says that this node is to end."""
        message = self._hear()
        if message is None:
            return False
        self._heard_at = self._clock.look()
        match message:
            case {"op": "welcome"}:
                self._is_welcome = True
                if self._parked is not None:
                    self._parked.close()
                    self._parked = None
                for fact in self._facts:
                    self._send(fact)
            case {"op": "finish"}:
                self.must_finish = True
            case {"op": "heard", "word": str(word)}:
                self._word = word
            case {"op": "stop", "cause": cause}:
                self._events.emit("fenced", cause=cause)
                sys.stderr.write(f"this node was declared lost: {cause}\n")
                return True
            case {"op": "stop"}:
                self.end = NodeEnd.OVER
                return True
            case {"op": "leave", "stays": bool(stays)}:
                self.end = NodeEnd.STAYS if stays else NodeEnd.LEFT
                return True
        return False

    def _hear(self) -> Mapping[str, Any] | None:
        """The message that has arrived; None for none, or where the connection is lost."""
        if self._channel is None:
            return None
        until = time.monotonic() + FRAME_SECONDS
        try:
            if self._channel.is_open:
                return self._channel.receive(until)
            self._channel.open(until)
            self._send(self._hello)
        except Impostor as error:
            self._say_impostor(error)
            self._lose(str(error))
        except (MalformedFrame, TimeoutError) as error:
            # Somebody on the way has changed what was said.
            self._park(str(error))
        except OSError as error:
            self._lose(str(error))
        return None

    def _connect(self) -> None:
        address = self._signpost.find()
        if address is None:
            return
        endpoint = (address.host, address.port)
        with contextlib.suppress(OSError):
            connection = socket.create_connection(endpoint, CONNECT_SECONDS)
            now = time.monotonic()
            self._channel = Channel(connection, self._credential, now + CONNECT_SECONDS)
            self._greeting_until = now + GREETING_SECONDS
            self._address, self._word = address, FIRST_WORD

    def _send(self, message: Mapping[str, Any]) -> None:
        if self._channel is None:
            return
        try:
            self._channel.send(encode_body(message), time.monotonic() + FRAME_SECONDS)
        except OSError as error:
            self._lose(str(error))

    def _park(self, why: str) -> None:
        """Make another connection. To the coordinator the end of this one would be the node's, so
        it stays until there is another."""
        if self._is_welcome:
            self._parked, self._channel = self._channel, None
        self._lose(why)

    def _lose(self, why: str) -> None:
        if self._is_welcome:
            self._events.emit("coordinator_gone", why=why)
        if self._channel is not None:
            self._channel.close()
        self._channel, self._is_welcome = None, False

    def _say_impostor(self, error: Impostor) -> None:
        """Once for an address: it may be a stranger's by now, or this node's secret is another."""
        if self._impostor != self._address:
            self._impostor = self._address
            sys.stderr.write(f"{self._address} is no coordinator of this job: {error}\n")
