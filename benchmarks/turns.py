"""Two trainings take turns on one machine: the ranks of one run some steps while the others wait.

Each rank's process asks for leave before a step and says when it was over. A rank whose turn it is
not waits in a read of a local socket, and uses no processor.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path


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
        self._link = Client(str(address), "AF_UNIX")
        _send(self._link, [side, number])
        self._left = 0
        self._steps: list[Step] = []
        self._processor = 0.0

    def await_turn(self) -> None:
        """Return when the next step may begin."""
        if self._left == 0:
            self._left = int(_receive(self._link))
        self._processor = time.process_time()

    def step_is_over(
        self, losses: Sequence[float] = (), parts: dict[str, float] | None = None
    ) -> None:
        """Note a step; after the last one of a turn, hand over."""
        used = time.process_time() - self._processor
        self._steps.append(Step(time.monotonic(), used, tuple(losses), parts or {}))
        self._left -= 1
        if self._left == 0:
            _send(self._link, [asdict(step) for step in self._steps])
            self._steps.clear()


class Turns:
    """Says whose turn it is."""

    def __init__(self, address: Path) -> None:
        self._listener = Listener(str(address), "AF_UNIX")
        self._links: dict[str, dict[int, Connection]] = {}

    def await_ranks(self, side: str, num_ranks: int) -> None:
        """Wait until all ranks of a side are ready to train."""
        while len(self._links.setdefault(side, {})) < num_ranks:
            link = self._listener.accept()
            name, number = _receive(link)
            self._links.setdefault(name, {})[number] = link

    def run(self, side: str, num_steps: int) -> list[list[Step]]:
        """Let one side run some steps; by step and rank."""
        links = self._links[side]
        for link in links.values():
            _send(link, num_steps)
        by_rank = [
            [Step(**{**step, "losses": tuple(step["losses"])}) for step in _receive(links[number])]
            for number in sorted(links)
        ]
        return [list(ranks) for ranks in zip(*by_rank, strict=True)]

    def close(self) -> None:
        """Hear no one any more."""
        self._listener.close()


def _send(link: Connection, message: object) -> None:
    link.send_bytes(json.dumps(message).encode())


def _receive(link: Connection) -> object:
    return json.loads(link.recv_bytes())
