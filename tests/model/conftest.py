from collections.abc import Iterator
from pathlib import Path

import pytest
from gpt_parts import Gpt, MakeGpt, make_options
from like_a_worker import like_a_worker

from megatron_bamboo.execution.local_groups import model_groups


@pytest.fixture(scope="session", autouse=True)
def process() -> Iterator[None]:
    with like_a_worker():
        yield


@pytest.fixture
def gpt(tmp_path: Path) -> MakeGpt:
    """Makes a GPT from some flags."""
    return lambda flags="": Gpt(make_options(tmp_path, flags), model_groups())
