"""Transformer layers that take a given time and hardly any of the processor's.

What a takeover costs depends on how long forwards and backwards take beside everything else. With
layers that sleep, many workers with iterations as long as real ones fit on two cores. All else is
real: each layer is a Transformer layer without attention, so it has parameters, gradients, dropout
and messages, and its redundant forwards sleep as well. A node has one device, which one
computation has at a time.
"""

import argparse
import fcntl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec
from megatron.core.transformer import TransformerConfig, TransformerLayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules
from torch import Tensor

from megatron_bamboo.config.emulation import layer_seconds
from megatron_bamboo.model.local_norm import LocalNorm

_SHORTEST_PAUSE = 20e-6
_LONGEST_PAUSE = 1e-3
_WAIT_SECONDS = 600.0


class Device:
    """The one device of a node. What computes on it has it alone until its time is over."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._descriptor: int | None = None
        self._wait_seconds = _WAIT_SECONDS
        self._until = 0.0

    def share(self, descriptor: int, seconds: float) -> None:
        """Share it with the other workers of the node.

        Args:
            descriptor: of a file that is theirs too.
            seconds: how long to wait for them.
        """
        self._descriptor = descriptor
        self._wait_seconds = seconds

    @property
    def is_shared(self) -> bool:
        """Whether other workers compute on it too."""
        return self._descriptor is not None

    def begin(self, seconds: float) -> float:
        """Take it for so long; until when. Work of the processor's before ``end`` is within that.

        Raises:
            TimeoutError: another computation does not end.
        """
        deadline = time.monotonic() + self._wait_seconds
        if not self._lock.acquire(timeout=self._wait_seconds):
            raise self._kept()
        if self._descriptor is not None:
            self._lock_file(self._descriptor, deadline)
        self._until = time.monotonic() + seconds
        return self._until

    def end(self) -> None:
        """Return when its time is over, and let others have it."""
        time.sleep(max(0.0, self._until - time.monotonic()))
        if self._descriptor is not None:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        self._lock.release()

    @contextmanager
    def computing(self, seconds: float) -> Iterator[None]:
        """Take it for the block, and at least for that time.

        Where several workers share it the block comes after the time: in it they meet, and none
        may wait there for one that waits for the device.
        """
        self.begin(seconds)
        if self.is_shared:
            self.end()
            yield
            return
        try:
            yield
        finally:
            self.end()

    def _lock_file(self, descriptor: int, deadline: float) -> None:
        pause = _SHORTEST_PAUSE
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > deadline:
                    self._lock.release()
                    raise self._kept() from None
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _kept(self) -> TimeoutError:
        return TimeoutError(f"the emulated device was kept for {self._wait_seconds:g} s")


DEVICE = Device()
"""This process's node's."""


def emulated_layer_spec(args: argparse.Namespace) -> ModuleSpec:
    """A layer that takes what the flags say."""
    times = {
        "forward_seconds": layer_seconds(args.bamboo_emulated_forward_ms, args.num_layers),
        "backward_seconds": layer_seconds(args.bamboo_emulated_backward_ms, args.num_layers),
    }
    submodules = TransformerLayerSubmodules(
        pre_mlp_layernorm=LocalNorm,
        mlp=get_mlp_module_spec(use_te=False),
        mlp_bda=get_bias_dropout_add,
    )
    return ModuleSpec(module=EmulatedLayer, submodules=submodules, params=times)


class EmulatedLayer(TransformerLayer):  # type: ignore[misc]
    """A feed-forward layer that takes the time of a whole one."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: TransformerLayerSubmodules,
        *,
        forward_seconds: tuple[float, ...],
        backward_seconds: tuple[float, ...],
        **arguments: Any,
    ) -> None:
        super().__init__(config, submodules, **arguments)
        self._forward_seconds = forward_seconds
        self._backward_seconds = backward_seconds

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        """As a layer without attention, within the layer's time."""
        # The number that a layer is built with is not its place in the whole model.
        place = self.layer_number - 1
        with DEVICE.computing(self._forward_seconds[place]):
            inside = _EndOfBackward.apply(hidden_states)
            output, context = super().forward(inside, *args, **kwargs)
        return _StartOfBackward.apply(output, self._backward_seconds[place]), context


class _StartOfBackward(torch.autograd.Function):
    """What a layer's backward pass comes to first."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        DEVICE.begin(ctx.seconds)
        if DEVICE.is_shared:  # as in ``computing``
            DEVICE.end()
        return gradient, None


class _EndOfBackward(torch.autograd.Function):
    """What it comes to last: the gradient of the layer's input."""

    @staticmethod
    def forward(ctx: Any, hidden_states: Tensor) -> Tensor:
        return hidden_states.view_as(hidden_states)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        if not DEVICE.is_shared:
            DEVICE.end()
        return gradient
