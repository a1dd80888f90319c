"""All that Megatron-core needs on a machine without CUDA; on a CUDA machine it does nothing.

Megatron-core asks for ``device="cuda"`` and for CUDA's random state in places where any device
would do. ``install()`` answers those questions with the CPU. It changes functions of torch for the
whole process, so it is called once, by the process that trains, before a model is built.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch

# Every factory that Megatron-core 0.16 calls with device="cuda" or torch.cuda.current_device().
_FACTORIES = ("empty", "zeros", "ones", "full", "tensor", "arange", "rand", "randn")

_installed = False


def install() -> None:
    """Make torch answer for CUDA with the CPU, once; nothing happens where there is a GPU."""
    global _installed
    if _installed or torch.cuda.is_available():
        return
    _installed = True
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.get_rng_state = lambda device="cuda": torch.get_rng_state()
    torch.cuda.manual_seed = torch.default_generator.manual_seed
    torch.Tensor.cuda = lambda tensor, *args, **kwargs: tensor
    _name_types_as_on_cuda()
    _use_cpu_random_state()


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The factory with a CUDA device replaced by the CPU."""

    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return make


def _name_types_as_on_cuda() -> None:
    """Give tensors the type names that Megatron's optimizers compare with CUDA's."""
    type_of = torch.Tensor.type

    @functools.wraps(type_of)
    def name_or_cast(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return type_of(tensor, *args, **kwargs)
        return type_of(tensor).replace("torch.", "torch.cuda.")

    torch.Tensor.type = name_or_cast


def _use_cpu_random_state() -> None:
    """Let Megatron's random-number tracker switch the CPU generator instead of a GPU's."""
    from megatron.core.tensor_parallel import random

    def get_state(device: Any = "cuda", clone: bool = False, graph_safe: bool = False) -> Any:
        return torch.get_rng_state()

    def set_state(new_state: torch.Tensor, device: Any = -1, graph_safe: bool = False) -> None:
        torch.set_rng_state(new_state)

    random._get_cuda_rng_state = get_state
    random._set_cuda_rng_state = set_state
    # The tracker warns when the CPU's state changes inside of it: here that is its purpose.
    logging.getLogger(random.__name__).addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )
