"""What a worker does once in its process, for tests that build parts of a model in their own."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def like_a_worker() -> Iterator[None]:
    """No CUDA, one thread, and the little global state that is needed.

    Which files' tests share a process is left to chance: who finds the default group made leaves
    it to whoever made it.
    """
    import torch
    import torch.distributed as dist

    from megatron_bamboo.execution.local_groups import model_groups
    from megatron_bamboo.model import cpu
    from megatron_bamboo.model.gpt import prepare_process

    threads = torch.get_num_threads()
    is_first = not dist.is_initialized()
    torch.set_num_threads(1)
    cpu.install()
    prepare_process(model_groups())
    yield
    if is_first:
        dist.destroy_process_group()
    torch.set_num_threads(threads)
