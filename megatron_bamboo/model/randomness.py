"""Randomness as a function of what a value is for.

Initial weights depend on (seed, unit, parameter), dropout on (seed, step, global microbatch,
unit). Nothing depends on rank numbers or on how much ran before, so that a redundant forward draws
its primary's masks and the initial model does not depend on the layout.
"""

from dataclasses import dataclass, field
from hashlib import blake2b

import torch
from megatron.core.tensor_parallel.random import (
    _MODEL_PARALLEL_RNG_TRACKER_NAME,
    get_cuda_rng_tracker,
)
from torch import nn


def derive_seed(seed: int, *purpose: str | int) -> int:
    """A 63-bit seed for one purpose; equal arguments give equal seeds on every machine."""
    text = "/".join(str(part) for part in (seed, *purpose))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


@dataclass(slots=True)
class DropoutSeeds:
    """Seeds the generators before each unit's forward pass.

    ``step`` and ``microbatch`` (the global one) are set by whoever runs the forward pass.
    """

    seed: int
    tensor_rank: int = 0
    step: int = 0
    microbatch: int = 0
    _hooks: list[torch.utils.hooks.RemovableHandle] = field(default_factory=list)

    def attach(self, unit: str, module: nn.Module) -> None:
        """Draw this module's dropout from its unit's own seed."""

        def reseed(_module: nn.Module, _args: object) -> None:
            if _module.training:
                seed = derive_seed(self.seed, self.step, self.microbatch, unit)
                _seed_generators(seed, self.tensor_rank)
            elif _MODEL_PARALLEL_RNG_TRACKER_NAME not in get_cuda_rng_tracker().get_states():
                # Megatron turns to it in an evaluation, too, though nothing is drawn there.
                _seed_generators(derive_seed(self.seed, unit), self.tensor_rank)

        self._hooks.append(module.register_forward_pre_hook(reseed))


def _seed_generators(seed: int, tensor_rank: int) -> None:
    """Seed both generators: what workers that share a layer draw alike, and what each its part of.

    With sequence parallelism Megatron runs a whole block on the second one; there only it counts.
    """
    apart = derive_seed(seed, "tensor-parallel", tensor_rank)
    tracker = get_cuda_rng_tracker()
    if tracker._current_state_name == _MODEL_PARALLEL_RNG_TRACKER_NAME:
        _seed_this_device(apart)
        return
    _seed_this_device(seed)
    tracker.reset()
    tracker.add(_MODEL_PARALLEL_RNG_TRACKER_NAME, apart)


def _seed_this_device(seed: int) -> None:
    """As ``torch.manual_seed`` for the generators that a worker draws from.

    That function asks every kind of device, and formats a stack trace for one that is not there:
    0.3 ms, before each layer of each forward pass.
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed(seed)
