from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import Launch


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    launched = Launch(tmp_path)
    yield launched
    launched.clean()
