"""Two trainings take turns on one machine: the ranks of one run some steps while the others wait.

Each rank's process asks for leave before a step and says when it was over. A rank whose turn it is
not waits in a read of a local socket, and uses no processor.
"""

import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_bamboo.membership.frames import encode_frame, receive_frame, set_deadline

# For ranks to start, for all steps of a turn, and for all turns of the other side.
START_SECONDS = 120.0
TURN_SECONDS = 600.0
IDLE_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class Step:
    """One step on one rank."""

    end: float  # on the monotonic clock, which all processes share
    processor_seconds: float  # of the whole process
    losses: tuple[float, ...]  # by microbatch, on the last stage
    parts: dict[str, float]  # seconds by what was done, as far as this side counts them


class Rank:
    """A rank's end, in its own process."""

    def __init__(self, address: Path, side: str, number: int) -> None:
        self._link = socket.socket(socket.AF_UNIX)
        self._link.connect(str(address))
        _send(self._link, {"side": side, "number": number})
        self._left = 0
        self._steps: list[Step] = []
        self._processor = 0.0

    def await_turn(self) -> None:
        """Return when the next step may begin."""
        if self._left == 0:
            self._left = int(_receive(self._link, IDLE_SECONDS)["steps"])
        self._processor = time.process_time()

    def step_is_over(
        self, losses: Sequence[float] = (), parts: dict[str, float] | None = None
    ) -> None:
        """Note a step; after the last one of a turn, hand over."""
        used = time.process_time() - self._processor
        self._steps.append(Step(time.monotonic(), used, tuple(losses), parts or {}))
        self._left -= 1
        if self._left == 0:
            _send(self._link, {"steps": [asdict(step) for step in self._steps]})
            self._steps.clear()


class Turns:
    """Says whose turn it is."""

    def __init__(self, address: Path) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(address))
        self._listener.listen()
        self._links: dict[str, dict[int, socket.socket]] = {}

    def await_ranks(self, side: str, num_ranks: int) -> None:
        """Wait until all ranks of a side are ready to train.

        Raises:
            TimeoutError: one is not.
        """
        until = time.monotonic() + START_SECONDS
        while len(self._links.setdefault(side, {})) < num_ranks:
            set_deadline(self._listener, until)
            link, _ = self._listener.accept()
            hello = _receive(link, START_SECONDS)
            self._links.setdefault(hello["side"], {})[hello["number"]] = link

    def run(self, side: str, num_steps: int) -> list[list[Step]]:
        """Let one side run some steps; by step and rank.

        Raises:
            OSError: a rank has ended, or takes too long.
        """
        links = self._links[side]
        for link in links.values():
            _send(link, {"steps": num_steps})
        by_rank = [_receive(links[number], TURN_SECONDS)["steps"] for number in sorted(links)]
        return [list(map(_step_of, ranks)) for ranks in zip(*by_rank, strict=True)]

    def close(self) -> None:
        """Hear no one any more."""
        self._listener.close()


def _step_of(values: Mapping[str, Any]) -> Step:
    return Step(**{**values, "losses": tuple(values["losses"])})


def _send(link: socket.socket, message: Mapping[str, Any]) -> None:
    link.sendall(encode_frame(message))


def _receive(link: socket.socket, seconds: float) -> dict[str, Any]:
    return receive_frame(link, time.monotonic() + seconds)
