"""What became of rehearsed runs: one JSON line a run, so that a campaign goes on where it ended."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

import megatron_bamboo
from megatron_bamboo.agent.job import COORDINATOR
from megatron_bamboo.agent.outcome import Status
from megatron_bamboo.errors import UserError
from megatron_bamboo.membership.workers import node_of
from megatron_bamboo.rehearsal.draw import Drawn, OnCoordinator
from megatron_bamboo.rehearsal.fault import How
from megatron_bamboo.rehearsal.record import RunRecord

RESULTS_FILE = "results.jsonl"
SETTINGS_FILE = "rehearsal.json"


class Ending(StrEnum):
    """How a run ended."""

    EQUAL = "equal"
    """With the losses and the state of the undisturbed run, bit for bit."""
    NO_HOLDER = "no holder"
    """A stage's holders were all lost, and the job said so."""
    BROKEN = "broken"
    """Something was not as it must be."""


@dataclass(frozen=True, slots=True)
class Strike:
    """A fault that struck, and when its node was counted as lost."""

    node: str
    fault: str
    how: str
    noticed_seconds: float | None
    """None: never; the run was over, or gave up before. Of a flip: when it was mended."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """What became of one run."""

    number: int
    planned: tuple[str, ...]
    strikes: tuple[Strike, ...]
    ending: Ending
    complaints: tuple[str, ...]
    epochs: int
    takeovers: int
    changes: int
    seconds: float

    @classmethod
    def of(
        cls,
        number: int,
        planned: Drawn,
        run: RunRecord,
        complaints: Sequence[str],
        seconds: float,
    ) -> Self:
        """Judge a run."""
        survived = Ending.NO_HOLDER if run.status == Status.NO_HOLDER else Ending.EQUAL
        return cls(
            number,
            (*planned.injected, *(f"coordinator@iter{step}:stop" for step in planned.stops)),
            tuple(_strikes(run)),
            Ending.BROKEN if complaints else survived,
            tuple(complaints),
            len({event["epoch"] for event in run.events.of("plan")}),
            len(run.events.of("takeover")),
            len(run.events.of("changed")),
            round(seconds, 1),
        )

    @classmethod
    def from_json(cls, line: str) -> Self:
        """The result that was written."""
        values: dict[str, Any] = json.loads(line)
        strikes = tuple(Strike(**strike) for strike in values.pop("strikes"))
        planned, complaints = (tuple(values.pop(name)) for name in ("planned", "complaints"))
        ending = Ending(values.pop("ending"))
        return cls(planned=planned, strikes=strikes, ending=ending, complaints=complaints, **values)


def _strikes(run: RunRecord) -> Iterator[Strike]:
    noticed = {event["node"]: float(event["time"]) for event in run.events.of("loss")}
    mended = {node_of(event["source"]): float(event["time"]) for event in run.events.of("mended")}
    for event in run.events.of("fault"):
        node = node_of(event["source"])
        seen = (mended if event["how"] == How.FLIP else noticed).get(node)
        seconds = None if seen is None else seen - float(event["time"])
        yield Strike(node, event["fault"], event["how"], seconds)
    for event in run.events.of("coordinator_kill"):
        yield Strike(COORDINATOR, event["fault"], OnCoordinator.KILL, None)
    for event in run.events.of("coordinator_stop"):
        yield Strike(COORDINATOR, f"iter{event['step']}:stop", OnCoordinator.STOP, None)


def code_digest(*more: Path) -> str:
    """Changes with the product's code: what another has survived proves nothing.

    Args:
        more: other folders whose code counts.
    """
    digest = hashlib.blake2b(digest_size=8)
    folders = (Path(megatron_bamboo.__file__).parent, *more)
    for path in sorted(path for folder in folders for path in folder.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


class Results:
    """The results in a campaign's folder, which belong to one training and one seed.

    Raises:
        UserError: the folder holds those of another campaign.
    """

    def __init__(self, folder: Path, settings: dict[str, object]) -> None:
        self._path = folder / RESULTS_FILE
        kept = folder / SETTINGS_FILE
        text = json.dumps(settings, indent=1) + "\n"
        if kept.is_file() and kept.read_text() != text:
            raise UserError(
                f"{folder} holds a rehearsal of another command, seed or code: give another --dir"
            )
        folder.mkdir(parents=True, exist_ok=True)
        kept.write_text(text)

    def add(self, result: RunResult) -> None:
        """Append a run's."""
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(result)) + "\n")

    def read(self) -> list[RunResult]:
        """Those of all runs so far, by number."""
        lines = self._path.read_text().splitlines() if self._path.is_file() else []
        return sorted(map(RunResult.from_json, lines), key=lambda result: result.number)
