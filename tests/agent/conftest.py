import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import Launch, OpenJob

# A store server beside a test is made as in the tests of membership.
sys.path.append(str(Path(__file__).parent.parent / "membership"))


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    launched = Launch(tmp_path)
    yield launched
    launched.clean()


@pytest.fixture
def open_job(tmp_path: Path) -> Iterator[OpenJob]:
    started = OpenJob(tmp_path)
    yield started
    started.clean()
