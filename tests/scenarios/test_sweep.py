"""A sweep goes on where it was ended, and a moment that never came is a failure."""

from pathlib import Path

import pytest
from moments import Moment
from scenario_runner import ScenarioRunner
from sweep import Results, sweep, verdict, without_good_result
from tiny_gpt import Shape

from megatron_bamboo.schedule.actions import Action
from megatron_bamboo.schedule.redundancy import Redundancy

pytestmark = pytest.mark.multiprocess

SHAPE = Shape(2, 1, num_steps=2, num_chunks=2)
GOOD = Moment(SHAPE, Redundancy.BUBBLE, 0, Action.parse("1.1B0"))
# There is no message from the model's end.
NEVER_COMES = Moment(SHAPE, Redundancy.BUBBLE, 0, Action.parse("1.1SEND_F0"))


def test_what_was_run_is_not_run_again_and_what_never_came_has_failed(
    scenarios: ScenarioRunner, tmp_path: Path
) -> None:
    results = Results(tmp_path / "results.jsonl", "code")
    assert verdict([GOOD, NEVER_COMES], results) == ("planned 2 run 0 failed 0", False)
    assert list(sweep([GOOD], results, scenarios, 1)) == []
    assert verdict([GOOD], results) == ("planned 1 run 1 failed 0", True)

    left = without_good_result([GOOD, NEVER_COMES], results)
    assert left == [NEVER_COMES]
    (said,) = sweep(left, results, scenarios, 1)
    assert "never came to --inject node1@iter2:1.1SEND_F0" in said
    assert verdict([GOOD, NEVER_COMES], results) == ("planned 2 run 2 failed 1", False)
    assert without_good_result([GOOD, NEVER_COMES], results) == [NEVER_COMES]
