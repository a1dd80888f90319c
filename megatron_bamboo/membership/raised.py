"""What ended a worker that raised, and whether it is the script's own error.

A worker tells the store why it ends before it ends: ``raised/<worker>``. One that raises may have
a bad disk or a bad device, and its node is lost like any other. Where a shadow raises the same in
its place, or nobody of a pipeline is left, the script itself cannot run: to start it again, on
whatever nodes, would only repeat it.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Self

from megatron_bamboo.membership.keys import Credential
from megatron_bamboo.membership.place import Place
from megatron_bamboo.membership.store_client import NodeFenced, StoreClient
from megatron_bamboo.schedule.actions import Action

logger = logging.getLogger(__name__)

# A worker that cannot say why it ends must end all the same.
TELL_SECONDS = 5.0
_LONGEST_MESSAGE = 300


@dataclass(frozen=True, slots=True)
class Raised:
    """An error, and what the worker was at."""

    kind: str
    message: str
    """The first line."""
    place: Place

    @classmethod
    def of(cls, error: BaseException, place: Place) -> Self:
        """What is told of an error."""
        first_line = next(iter(str(error).splitlines()), "")
        return cls(type(error).__name__, first_line[:_LONGEST_MESSAGE], place)

    def to_json(self) -> str:
        """The value of ``raised/<worker>``."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """The error that ``to_json`` wrote."""
        values = json.loads(text)
        return cls(**values | {"place": Place(**values["place"])})

    def __str__(self) -> str:
        said = f"{self.kind}: {self.message}" if self.message else self.kind
        return f"{said} (in {self.place})"

    def is_like(self, other: Self) -> bool:
        """Whether both are of one type, at the same step."""
        return (self.kind, self.place.step) == (other.kind, other.place.step)

    @property
    def stage(self) -> int | None:
        """The stage that was computed, in a step or an evaluation; None in start-up or a save,
        which are of none."""
        try:
            return Action.parse(self.place.action.partition(" ")[0]).stage
        except ValueError:
            return None


def tell_raised(
    store: str, credential: Credential, raised: Raised, deadline_seconds: float = TELL_SECONDS
) -> None:
    """Tell the store at ``host:port`` what ends this worker; a lost store is not waited for."""
    worker = credential.role.name
    client = StoreClient(store, deadline_seconds, credential)
    try:
        client.set(f"raised/{worker}", raised.to_json().encode())
    except (OSError, NodeFenced) as error:
        logger.error("%s: cannot say what was raised: %s", worker, error)
    finally:
        client.close()


def script_error(
    pipelines: Sequence[Sequence[str]], raised: Mapping[str, Raised]
) -> tuple[str, ...] | None:
    """The nodes whose errors are the script's own, first its first witness; None for none.

    Args:
        pipelines: by pipeline all its nodes, lost ones included.
        raised: by node what it has raised, in the order in which it was told.
    """
    for nodes in pipelines:
        here = [node for node in raised if node in nodes]
        if here and len(here) == len(nodes):
            return tuple(here)
        for pair in combinations(here, 2):
            first, second = (raised[node] for node in pair)
            if first.is_like(second) and first.stage == second.stage:
                return pair
    return None


def all_raised_alike(nodes: Sequence[str], raised: Mapping[str, Raised]) -> bool:
    """Whether several nodes were lost by one error, each in what it computed itself."""
    errors = [raised[node] for node in nodes if node in raised]
    return len(errors) == len(nodes) > 1 and all(map(errors[0].is_like, errors))
