"""One thing a worker does in an iteration, with an exact text form.

Schedules are generated, changed, validated, simulated, drawn, logged and executed as lists of
these actions. The text form is the one users write (``--inject node5@iter7:2.0B3``) and logs
hold, so it parses back to the same action and nothing else parses.
"""

import re
from dataclasses import dataclass
from enum import StrEnum
from functools import total_ordering
from typing import Self


class Op(StrEnum):
    """What is done. Members that move data name their pair."""

    # Forward of one microbatch through the layers of a stage's chunk. Its pair is B.
    F = "F"
    # Backward of one microbatch; adds to the gradients. Its pair is F.
    B = "B"
    # Redundant forward, on the replica of a stage. The primary's F is its pair: same input, same
    # bits. After a takeover it counts as that F.
    RF = "RF"
    # Sends a stage's output to the next virtual stage, which runs RECV_F.
    SEND_F = "SEND_F"
    # Waits for a stage's input, which the previous virtual stage sends with SEND_F.
    RECV_F = "RECV_F"
    # Sends the gradient of a stage's input to the previous virtual stage, which runs RECV_B.
    SEND_B = "SEND_B"
    # Waits for the gradient of a stage's output, which the next virtual stage sends with SEND_B.
    RECV_B = "RECV_B"
    # Sends the gradient that a stage's chunk has summed, this microbatch being the last one in it,
    # to the worker of the stage's replica, which runs RECV_MIRROR. A copy: the sum goes on.
    SEND_MIRROR = "SEND_MIRROR"
    # Lets the mirror come that SEND_MIRROR sends. Nothing waits for it but the end of the step.
    RECV_MIRROR = "RECV_MIRROR"
    # Reduces a stage's gradients over the pipelines, out of place.
    REDUCE = "REDUCE"
    # Sends a role's reduced gradient of the tied embedding to the worker of the other role, whose
    # TIE receives it.
    SEND_TIE = "SEND_TIE"
    # Adds the reduced gradients of the tied embedding's two roles; receives what is not local.
    TIE = "TIE"
    # Sends a stage's final gradient to the worker of its replica, which runs RECV_REFRESH.
    SEND_REFRESH = "SEND_REFRESH"
    # Waits for the final gradient of a stage whose replica this worker holds (SEND_REFRESH).
    RECV_REFRESH = "RECV_REFRESH"
    # Sends a stage's state to the workers that will hold it from the next step on; they run
    # RECV_STATE. It is the only one of these that comes first in a step.
    SEND_STATE = "SEND_STATE"
    # Waits for the state of a stage that this worker will hold (SEND_STATE), and puts it in place.
    RECV_STATE = "RECV_STATE"
    # Sends a unit's state to the workers that will hold it once pipelines are cut anew; they run
    # RECV_UNIT. It comes first in a step, as SEND_STATE does; its stage is the unit's number.
    SEND_UNIT = "SEND_UNIT"
    # Puts the state of a unit in place in a stage of the new cut; it comes from another worker
    # (SEND_UNIT), or from the stage of the old cut that this one holds. Its stage is the unit's
    # number.
    RECV_UNIT = "RECV_UNIT"
    # Sends a unit's final gradient to the same workers, which run RECV_UNIT_GRADIENT.
    SEND_UNIT_GRADIENT = "SEND_UNIT_GRADIENT"
    # Puts the final gradient of a unit in place in a stage of the new cut, likewise.
    RECV_UNIT_GRADIENT = "RECV_UNIT_GRADIENT"
    # Makes digests of the state as it is before the step, for COMMIT to compare; its stage is the
    # worker's rank.
    VERIFY = "VERIFY"
    # Agrees with all live workers that the step is applied; its stage is the worker's rank.
    COMMIT = "COMMIT"
    # Applies the step to all that the worker holds, purely locally; its stage is the rank.
    STEP = "STEP"
    # With the distributed optimizer: all holders of a stage get from its primaries the parameters
    # that each of them has stepped. On the workers of its replicas its pair is RGATHER.
    GATHER = "GATHER"
    # The part in GATHER of a replica's worker.
    RGATHER = "RGATHER"
    # After a step whose VERIFY found copies of a stage's state that differ: who has the right one
    # gives it to who has not. On the workers of its replicas its pair is RMEND.
    MEND = "MEND"
    # The part in MEND of a replica's worker.
    RMEND = "RMEND"

    # That of an enumeration is a Python function; actions are hashed by the thousand.
    __hash__ = str.__hash__


COMPUTE_OPS = frozenset({Op.F, Op.B, Op.RF})
SEND_OPS = frozenset({Op.SEND_F, Op.SEND_B, Op.SEND_MIRROR})
RECEIVE_OPS = frozenset({Op.RECV_F, Op.RECV_B, Op.RECV_MIRROR})
TAIL_OPS = frozenset(Op) - COMPUTE_OPS - SEND_OPS - RECEIVE_OPS
# What is done where pipelines are cut anew; its stage is a unit's number.
UNIT_OPS = frozenset({Op.SEND_UNIT, Op.RECV_UNIT, Op.SEND_UNIT_GRADIENT, Op.RECV_UNIT_GRADIENT})
# What is sent first in a step, so that it goes in the background.
STATE_SENDS = frozenset({Op.SEND_STATE, Op.SEND_UNIT})
MEND_OPS = frozenset({Op.MEND, Op.RMEND})
# What comes after the step, and can be run again until the next one is applied.
GATHER_OPS = frozenset({Op.GATHER, Op.RGATHER}) | MEND_OPS
# The messages that bring a computation its input and take its result away.
RECEIVE_BEFORE = {Op.F: Op.RECV_F, Op.B: Op.RECV_B}
SEND_AFTER = {Op.F: Op.SEND_F, Op.B: Op.SEND_B}
_OP_ORDER = {op: place for place, op in enumerate(Op)}

_NUMBER = "(0|[1-9][0-9]*)"
_MICROBATCH_NAMES = "|".join(op for op in Op if op not in TAIL_OPS)
_TAIL_NAMES = "|".join(op for op in Op if op in TAIL_OPS)
_MICROBATCH_FORM = re.compile(rf"{_NUMBER}\.{_NUMBER}({_MICROBATCH_NAMES}){_NUMBER}")
_TAIL_FORM = re.compile(rf"{_NUMBER}({_TAIL_NAMES})")


@total_ordering
@dataclass(frozen=True, slots=True)
class Action:
    """One operation of one stage; tail ops have neither chunk nor microbatch."""

    stage: int
    chunk: int | None
    op: Op
    microbatch: int | None

    def __post_init__(self) -> None:
        absent = (self.chunk is None, self.microbatch is None)
        is_tail = self.op in TAIL_OPS
        assert absent == (is_tail, is_tail), f"{self.op} with {self.chunk}, {self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """The action whose text form is exactly ``text``."""
        if found := _MICROBATCH_FORM.fullmatch(text):
            stage, chunk, op, microbatch = found.groups()
            return cls(int(stage), int(chunk), Op(op), int(microbatch))
        if found := _TAIL_FORM.fullmatch(text):
            stage, op = found.groups()
            return cls(int(stage), None, Op(op), None)
        raise ValueError(
            f"{text!r} is no action: write STAGE.CHUNK OP MICROBATCH without spaces, like 2.0B3 or "
            f"1.0SEND_F2, with OP one of {_MICROBATCH_NAMES.replace('|', ', ')}; or STAGE OP, like "
            f"2REDUCE, with OP one of {_TAIL_NAMES.replace('|', ', ')}"
        )

    def __str__(self) -> str:
        if self.op in TAIL_OPS:
            return f"{self.stage}{self.op}"
        return f"{self.stage}.{self.chunk}{self.op}{self.microbatch}"

    def __lt__(self, other: object) -> bool:
        if not isinstance(other, Action):
            return NotImplemented
        return self._sort_key() < other._sort_key()

    def _sort_key(self) -> tuple[int, int, int, int]:
        chunk = -1 if self.chunk is None else self.chunk
        microbatch = -1 if self.microbatch is None else self.microbatch
        return (self.stage, chunk, _OP_ORDER[self.op], microbatch)

    def with_op(self, op: Op) -> "Action":
        """The same stage, chunk and microbatch with another operation."""
        return Action(self.stage, self.chunk, op, self.microbatch)
