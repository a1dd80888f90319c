"""One fork server and one set of undisturbed runs for all scenarios of a session."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from scenario_runner import ScenarioRunner

# Checkpoints are looked at as in the tests of saving.
sys.path.append(str(Path(__file__).parent.parent / "checkpoint"))


@pytest.fixture(scope="session")
def scenarios(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScenarioRunner]:
    runner = ScenarioRunner(tmp_path_factory.mktemp("scenarios"))
    yield runner
    runner.close()
