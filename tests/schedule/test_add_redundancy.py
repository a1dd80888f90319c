import pytest

from megatron_bamboo.schedule.actions import Op
from megatron_bamboo.schedule.one_f_one_b import one_f_one_b
from megatron_bamboo.schedule.redundancy import Redundancy, add_redundancy


def test_none_changes_nothing() -> None:
    schedule = one_f_one_b(3, 4)
    assert add_redundancy(schedule, Redundancy.NONE) is schedule


def test_lazy_places_each_replica_on_the_rank_before_and_adds_no_action() -> None:
    schedule = one_f_one_b(4, 4)
    lazy = add_redundancy(schedule, Redundancy.LAZY)
    assert lazy.replicas == (3, 0, 1, 2)
    assert lazy.programs == schedule.programs


def test_eager_runs_each_redundant_forward_once_its_input_is_there() -> None:
    eager = add_redundancy(one_f_one_b(3, 2), Redundancy.EAGER)
    texts = [" ".join(map(str, program)) for program in eager.programs]
    assert texts == [
        "0.0F0 1.0RF0 0.0F1 1.0RF1 0.0B0 0.0B1",
        "1.0F0 2.0RF0 1.0F1 2.0RF1 1.0B0 1.0B1",
        "2.0F0 0.0RF0 2.0B0 2.0F1 0.0RF1 2.0B1",
    ]


def test_eager_covers_every_stage_and_microbatch() -> None:
    eager = add_redundancy(one_f_one_b(5, 7), Redundancy.EAGER)
    redundant = [a for program in eager.programs for a in program if a.op is Op.RF]
    assert sorted((a.stage, a.microbatch) for a in redundant) == [
        (stage, microbatch) for stage in range(5) for microbatch in range(7)
    ]


@pytest.mark.parametrize("mode", [Redundancy.LAZY, Redundancy.EAGER])
def test_one_stage_cannot_be_its_own_shadow(mode: Redundancy) -> None:
    with pytest.raises(ValueError, match="at least 2 stages"):
        add_redundancy(one_f_one_b(1, 4), mode)
