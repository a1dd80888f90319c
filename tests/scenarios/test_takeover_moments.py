"""A node dies at an exact action, and the run ends as the undisturbed one, bit for bit."""

import pytest
from moments import Moment, moments_of
from scenario_runner import ScenarioRunner

pytestmark = pytest.mark.multiprocess


@pytest.mark.parametrize("moment", moments_of("ci"), ids=str)
def test_a_loss_changes_no_bit(scenarios: ScenarioRunner, moment: Moment) -> None:
    assert scenarios.survive_moment(moment) == []


@pytest.mark.parametrize("moment", moments_of("ci-interleaved"), ids=str)
def test_a_loss_among_chunks_changes_no_bit(scenarios: ScenarioRunner, moment: Moment) -> None:
    assert scenarios.survive_moment(moment) == []


@pytest.mark.parametrize("moment", moments_of("ci-mirrored"), ids=str)
def test_a_loss_with_mirrors_changes_no_bit(scenarios: ScenarioRunner, moment: Moment) -> None:
    assert scenarios.survive_moment(moment) == []
