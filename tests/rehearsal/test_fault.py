"""A fault has one text, and what cannot strike is refused."""

import pytest

from megatron_bamboo.checkpoint.moments import SaveMoment
from megatron_bamboo.rehearsal.fault import EvaluationMoment, Fault, How, Nth
from megatron_bamboo.schedule.actions import Action, Op


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("iter7:2.0B3", Fault(7, Action(2, 0, Op.B, 3))),
        ("iter12:1COMMIT:stop", Fault(12, Action(1, None, Op.COMMIT, None), How.STOP)),
        ("iter1:SAVE_RENAME", Fault(1, SaveMoment.RENAME)),
        ("change:1SEND_STATE", Fault(None, Action(1, None, Op.SEND_STATE, None))),
        ("change:#3:stop", Fault(None, Nth(3), How.STOP)),
        ("iter3:#12:raise", Fault(3, Nth(12), How.RAISE)),
        ("iter3:1.0F0:cut", Fault(3, Action(1, 0, Op.F, 0), How.CUT)),
        (
            "iter3:1REDUCE:flip:layer1/exp_avg",
            Fault(3, Action(1, None, Op.REDUCE, None), How.FLIP, "layer1/exp_avg"),
        ),
        ("iter3:#12:flip:head/parameter", Fault(3, Nth(12), How.FLIP, "head/parameter")),
        ("iter10:EVAL2/1.0F3", Fault(10, EvaluationMoment(2, Action(1, 0, Op.F, 3)))),
        (
            "iter10:EVAL1/1.0F3:hang",
            Fault(10, EvaluationMoment(1, Action(1, 0, Op.F, 3)), How.HANG),
        ),
        ("iter3:0.1F0:hang", Fault(3, Action(0, 1, Op.F, 0), How.HANG)),
    ],
)
def test_a_fault_parses_back(text: str, fault: Fault) -> None:
    assert Fault.parse(text) == fault
    assert str(fault) == text


def test_a_flip_may_hit_whatever_replica_there_is() -> None:
    assert Fault.parse("iter3:1VERIFY:flip:replica/exp_avg").hits_replica
    assert not Fault.parse("iter3:1VERIFY:flip:layer1/exp_avg").hits_replica


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("7:2.0B3", "write NODE@iterN:ACTION"),
        ("iter7", "write NODE@iterN:ACTION"),
        ("iter0:2.0B3", "write NODE@iterN:ACTION"),
        ("iter7:", "''"),
        ("iter7:2.0X3", "2.0X3"),
        ("iter7:#0", "#0"),
        ("iter7:2.0B3:explode", "'explode' is none of kill, kill-worker"),
        ("iter7:1COMMIT:hang", "hangs in a forward or backward, not at 1COMMIT"),
        ("iter7:1COMMIT:flip", "flip:UNIT/KIND"),
        ("iter7:1COMMIT:flip:layer1", "flip:UNIT/KIND"),
        ("iter7:1COMMIT:flip:a/b/c", "flip:UNIT/KIND"),
        ("iter7:1COMMIT:stop:layer1/exp_avg", "flip:UNIT/KIND"),
        ("iter7:SAVE_END:flip:layer1/exp_avg", "is killed or stopped whole"),
        ("iter7:SAVE_END:hang", "is killed or stopped whole"),
        ("iter7:SAVE_END:cut", "is killed or stopped whole"),
        ("change:SAVE_END", "needs the iteration"),
        ("iter10:EVAL0/1.0F3", "EVAL0/1.0F3"),
        ("iter10:EVAL1/1.0B3", "an evaluation has no B"),
        ("change:EVAL1/1.0F3", "needs the iteration"),
        ("iter10:EVAL1/1.0SEND_F3:hang", "hangs in a forward or backward"),
        ("iter10:EVAL1/1.0F3:flip:layer1/exp_avg", "a bit flips in an iteration"),
        ("change7:2.0B3", "write NODE@iterN:ACTION"),
        ("iter7:SAVE_SOON", "SAVE_SOON"),
    ],
)
def test_what_is_no_fault_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Fault.parse(text)
