"""A sweep goes on where it was ended, and a moment that never came is a failure."""

from pathlib import Path

import pytest
from moments import Moment
from scenario_runner import ScenarioRunner
from sweep import Results, sweep, verdict
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
    said = list(sweep([GOOD], results, scenarios, 1))
    assert said == ["planned 1, of which 0 were run before"]
    assert verdict([GOOD], results) == ("planned 1 run 1 failed 0", True)

    said = list(sweep([GOOD, NEVER_COMES], results, scenarios, 1))
    assert said[0] == "planned 2, of which 1 were run before"
    assert "never came to --inject node1@iter2:1.1SEND_F0" in said[1]
    assert verdict([GOOD, NEVER_COMES], results) == ("planned 2 run 2 failed 1", False)
