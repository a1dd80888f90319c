"""Was the newest step applied? The decision of the commit, as a pure function of the store's keys.

A step is applied by all or by nobody. When a node is lost, each survivor leaves the epoch for good
and writes one record, once; the coordinator fences those that stay silent. Once every key is
filled the answer no longer changes, whoever computes it: one worker that passed the commit of a
step proves that every worker had entered it, so all finish it with the commit vector which that
worker hands over; otherwise nobody has applied it, and it is reduced and committed again.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Self

FENCED_VALUE = b"fenced"


@dataclass(frozen=True, slots=True)
class Record:
    """What a worker last did about a commit in the epoch that it has left.

    ``step`` is the step whose commit it last entered; before its first commit in its life, or
    after a decision that the step was not applied, the step that it computes (``entered`` false).
    A worker that passed the commit of step 7 and computes step 8 still writes step 7, entered,
    passed, with the vector: one that waits in the commit of step 7 needs it. Where the optimizer's
    state is shared out over the pipelines, ``gathered`` is the last step after which it has all
    parameters of what it holds.
    """

    node: str
    step: int
    entered: bool
    passed: bool
    vector: tuple[str, ...] | None = None
    gathered: int = 0

    def __post_init__(self) -> None:
        if self.passed and not self.entered:
            raise ValueError(f"{self.node}: a commit is passed only after it was entered")
        if self.passed and self.vector is None:
            raise ValueError(f"{self.node}: who passed a commit hands over its vector")

    def to_json(self) -> str:
        """The value of ``record/<epoch>/<node>``."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """The record that ``to_json`` wrote."""
        return cls(**_with_vector(_exact(cls, json.loads(text))))


@dataclass(frozen=True, slots=True)
class Fenced:
    """A node that did not answer in time: it applies and writes nothing any more."""

    node: str


@dataclass(frozen=True, slots=True)
class StepReport:
    """What the first worker to pass a step's commit tells the store: ``passed/<step>``.

    Floats that must keep their bits travel as hexadecimal text. The vector comes along because
    the worker that wrote this may die before its record can hand it over.
    """

    step: int
    epoch: int
    loss: str
    lr: float
    grad_norm: str | None
    samples: int
    seconds: float
    vector: tuple[str, ...]
    loss_scale: float = 1.0
    differences: tuple[str, ...] = ()
    """What differed between copies of the state before the step, a line each."""

    def to_json(self) -> str:
        """The value of ``passed/<step>``."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """The report that ``to_json`` wrote."""
        values = _with_vector(_exact(cls, json.loads(text)))
        return cls(**values | {"differences": tuple(values["differences"])})


@dataclass(frozen=True, slots=True)
class StepDecision:
    """Whether ``step`` counts as applied, with the commit vector for those who have not got it.

    ``gathered`` is the last step after which all have all their parameters: who is further takes
    part once more in the gather of the next one.
    """

    step: int
    applied: bool
    vector: tuple[str, ...] | None
    reason: str
    gathered: int = 0

    @classmethod
    def from_fields(cls, values: Mapping[str, Any]) -> Self:
        """The decision from the fields that JSON gives back."""
        return cls(**_with_vector(_exact(cls, values)))


def parse_record(node: str, value: bytes) -> Record | Fenced:
    """What the store holds under a record key."""
    return Fenced(node) if value == FENCED_VALUE else Record.from_json(value)


def decide_step(
    records: Mapping[str, Record | Fenced], confirmed: Mapping[int, StepReport]
) -> StepDecision:
    """Decide from the records of an ended epoch and the steps that the store saw pass in it."""
    spoken = [record for _, record in sorted(records.items()) if isinstance(record, Record)]
    if not spoken:
        raise ValueError("no worker left a record: nobody knows which step was under way")
    decision = _decide(spoken, confirmed)
    return replace(decision, gathered=min(record.gathered for record in spoken))


def _decide(spoken: Sequence[Record], confirmed: Mapping[int, StepReport]) -> StepDecision:
    waiting = [record for record in spoken if record.entered and not record.passed]
    step = min((record.step for record in waiting), default=max(r.step for r in spoken))
    witness = next((r for r in spoken if r.passed and r.step == step), None)
    if witness is not None:
        reason = f"{witness.node} passed its commit"
        return StepDecision(step, True, witness.vector, reason)
    if step in confirmed:
        return StepDecision(step, True, confirmed[step].vector, "the store saw its commit passed")
    # A worker enters a commit only when all its reductions are done, and these need every other
    # worker's backward passes: nobody can be in a later commit than one that waits.
    assert all(record.step <= step for record in spoken), f"step {step} was left open: {spoken}"
    if waiting:
        names = ", ".join(record.node for record in waiting)
        return StepDecision(step, False, None, f"{names} entered its commit, nobody passed it")
    return StepDecision(step, False, None, "nobody entered its commit")


def _exact(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    expected = {field.name for field in fields(kind)}
    if not isinstance(values, Mapping) or values.keys() != expected:
        raise ValueError(f"{kind.__name__} needs exactly {sorted(expected)}, got {values!r}")
    return dict(values)


def _with_vector(values: dict[str, Any]) -> dict[str, Any]:
    vector = values["vector"]
    return values | {"vector": None if vector is None else tuple(vector)}
