"""The moments of a save, as ``--inject`` names them."""

import pytest

from megatron_bamboo.agent.job import Injection, JobShape, check_reachable
from megatron_bamboo.checkpoint.moments import SaveMoment
from megatron_bamboo.errors import UserError
from megatron_bamboo.planner.arrangement import equal_pipelines


@pytest.mark.parametrize("moment", SaveMoment)
def test_a_moment_parses_back(moment: SaveMoment) -> None:
    text = f"node1@iter3:{moment}"
    injection = Injection.parse(text)
    assert (injection.fault.moment, str(injection)) == (moment, text)


def test_a_fault_before_the_run_begins_is_refused() -> None:
    shape = JobShape(
        equal_pipelines(2, 1, 4), "lazy", train_iters=7, global_batch_size=4, start_step=3
    )
    check_reachable(Injection.parse("node0@iter4:SAVE_WRITE"), shape)
    check_reachable(Injection.parse("node0@iter4:0.0F0"), shape)
    for text in ("node0@iter3:SAVE_WRITE", "node0@iter3:0.0F0"):
        with pytest.raises(UserError, match="this job has 4 to 7"):
            check_reachable(Injection.parse(text), shape)
