"""One fork server and one set of undisturbed runs for all scenarios of a session."""

from collections.abc import Iterator

import pytest
from scenario_runner import ScenarioRunner


@pytest.fixture(scope="session")
def scenarios(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScenarioRunner]:
    runner = ScenarioRunner(tmp_path_factory.mktemp("scenarios"))
    yield runner
    runner.close()
