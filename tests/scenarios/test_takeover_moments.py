"""A node dies at an exact action, and the run ends as the undisturbed one, bit for bit."""

import pytest
from moments import Moment, ci_part
from scenario_runner import ScenarioRunner

pytestmark = pytest.mark.multiprocess


@pytest.mark.parametrize("moment", ci_part(), ids=str)
def test_a_loss_changes_no_bit(scenarios: ScenarioRunner, moment: Moment) -> None:
    assert scenarios.survive_moment(moment) == []
