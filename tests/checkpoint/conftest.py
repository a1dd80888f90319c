import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

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
    """What a worker does once: no CUDA, one thread, and the little global state that is needed."""
    import torch
    import torch.distributed as dist

    from megatron_bamboo.execution.local_groups import model_groups
    from megatron_bamboo.model import cpu
    from megatron_bamboo.model.gpt import prepare_process

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    cpu.install()
    prepare_process(model_groups())
    yield
    if dist.is_initialized():  # the tests of the model may have done it already
        dist.destroy_process_group()
    torch.set_num_threads(threads)


@pytest.fixture
def gpt(process: None, tmp_path: Path) -> Callable[..., Any]:
    """Makes a GPT from some flags."""
    from gpt_parts import Gpt, make_options

    from megatron_bamboo.execution.local_groups import model_groups

    return lambda flags="": Gpt(make_options(tmp_path, flags), model_groups())
