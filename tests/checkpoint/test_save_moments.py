"""The moments of a save, as ``--inject`` names them."""

import pytest

from megatron_bamboo.agent.job import Injection, JobShape, check_reachable
from megatron_bamboo.checkpoint.moments import SaveMoment, parse_fault
from megatron_bamboo.errors import UserError
from megatron_bamboo.schedule.actions import Action, Op


@pytest.mark.parametrize("moment", SaveMoment)
def test_a_moment_parses_back(moment: SaveMoment) -> None:
    assert parse_fault(str(moment)) is moment
    text = f"node1@iter3:{moment}"
    injection = Injection.parse(text)
    assert (injection.action, str(injection)) == (moment, text)


def test_an_action_is_no_moment() -> None:
    assert parse_fault("2.0B3") == Action(2, 0, Op.B, 3)
    with pytest.raises(ValueError, match="SAVE_SOON"):
        parse_fault("SAVE_SOON")


def test_a_fault_before_the_run_begins_is_refused() -> None:
    shape = JobShape(2, 1, 4, "lazy", train_iters=7, global_batch_size=4, start_step=3)
    check_reachable(Injection.parse("node0@iter4:SAVE_WRITE"), shape)
    check_reachable(Injection.parse("node0@iter4:0.0F0"), shape)
    for text in ("node0@iter3:SAVE_WRITE", "node0@iter3:0.0F0"):
        with pytest.raises(UserError, match="this job has 4 to 7"):
            check_reachable(Injection.parse(text), shape)
