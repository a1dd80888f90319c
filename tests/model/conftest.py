from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from gpt_parts import Gpt, MakeGpt, make_options

from megatron_bamboo.execution.local_groups import model_groups
from megatron_bamboo.model import cpu
from megatron_bamboo.model.gpt import prepare_process


@pytest.fixture(scope="session", autouse=True)
def process() -> Iterator[None]:
    """What a worker does once: no CUDA, one thread, and the little global state that is needed."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    cpu.install()
    prepare_process(model_groups())
    yield
    dist.destroy_process_group()
    torch.set_num_threads(threads)


@pytest.fixture
def gpt(tmp_path: Path) -> MakeGpt:
    """Makes a GPT from some flags."""
    return lambda flags="": Gpt(make_options(tmp_path, flags), model_groups())
