import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from like_a_worker import like_a_worker

# The store server that runs beside the tests of membership runs beside these too, and the small
# GPTs of the model's tests are saved here.
for package in ("membership", "model"):
    sys.path.append(str(Path(__file__).parent.parent / package))


@pytest.fixture
def server() -> Iterator[Any]:
    from server_thread import ServerThread

    running = ServerThread()
    yield running
    running.stop()


@pytest.fixture(scope="session")
def process() -> Iterator[None]:
    with like_a_worker():
        yield


@pytest.fixture
def gpt(process: None, tmp_path: Path) -> Callable[..., Any]:
    """Makes a GPT from some flags."""
    from gpt_parts import Gpt, make_options

    from megatron_bamboo.execution.local_groups import model_groups

    return lambda flags="": Gpt(make_options(tmp_path, flags), model_groups())
