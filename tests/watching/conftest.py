import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Whole jobs are started as in the tests of the launcher.
sys.path.append(str(Path(__file__).parent.parent / "agent"))

from launching import Launch


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    launched = Launch(tmp_path)
    yield launched
    launched.clean()
