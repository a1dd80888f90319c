"""Half precision: what is cast, and the scale that keeps float16's gradients from vanishing.

Parameters and activations are in half precision; gradients are accumulated and reduced in float32,
and the optimizer keeps a float32 copy of the parameters, as in Megatron.
"""

import torch
from megatron.core.optimizer.grad_scaler import (
    ConstantGradScaler,
    DynamicGradScaler,
    MegatronGradScaler,
)
from megatron.core.transformer.module import float16_to_fp32, fp32_to_float16
from torch import Tensor, nn

from megatron_bamboo.config import PrecisionOptions


class LossScale:
    """What the loss is multiplied by, and the gradients divided by.

    It follows from the commits alone, so that it is the same on all workers at every step, and a
    shadow need not be told.
    """

    def __init__(self, options: PrecisionOptions) -> None:
        self._scaler = _make_scaler(options)

    @property
    def is_used(self) -> bool:
        """Whether there is any; without it an overflow is an error."""
        return self._scaler is not None

    @property
    def value(self) -> float:
        """The scale of the step under way; 1 where none is used."""
        return 1.0 if self._scaler is None else float(self._scaler.scale)

    def scale(self, loss: Tensor) -> Tensor:
        """Megatron's ``grad_scale_func``."""
        assert self._scaler is not None
        return self._scaler.scale * loss

    def unscale(self, gradient: Tensor) -> None:
        """Divide a gradient, in place."""
        if self._scaler is not None:
            gradient.mul_(self._scaler.inv_scale)

    def update(self, overflowed: bool) -> None:
        """Take note of a step: whether its gradient overflowed."""
        if self._scaler is not None:
            self._scaler.update(overflowed)

    def state(self) -> Tensor:
        """All that decides the scales to come, as one tensor; empty where none is used."""
        state = {} if self._scaler is None else self._scaler.state_dict()
        return torch.tensor([float(value) for value in state.values()], dtype=torch.float64)

    def load(self, state: Tensor) -> None:
        """Go on from what ``state`` gave."""
        # Of a constant scale there is none: then the dynamic one starts as it always does.
        if isinstance(self._scaler, DynamicGradScaler) and state.numel() > 0:
            scale, growth, hysteresis = state.tolist()
            self._scaler.load_state_dict(
                {
                    "scale": torch.tensor([scale], dtype=torch.float32),
                    "growth_tracker": int(growth),
                    "hysteresis_tracker": int(hysteresis),
                }
            )


def cast_ends(chunk: nn.Module, dtype: torch.dtype, is_first: bool, is_last: bool) -> None:
    """Cast what goes into the model and what comes out of it, as Megatron's ``Float16Module``."""
    if dtype is torch.float32:
        return

    def cast_inputs(_module: nn.Module, args: tuple[object, ...]) -> object:
        return fp32_to_float16(args, lambda value: value.to(dtype))

    def cast_output(_module: nn.Module, _args: tuple[object, ...], output: object) -> object:
        return float16_to_fp32(output)

    if is_first:
        chunk.register_forward_pre_hook(cast_inputs)
    if is_last:
        chunk.register_forward_hook(cast_output)


def _make_scaler(options: PrecisionOptions) -> MegatronGradScaler | None:
    """As ``get_megatron_optimizer`` chooses it."""
    if not (options.bf16 or options.fp16):
        return None
    if options.loss_scale is not None:
        return ConstantGradScaler(options.loss_scale)
    if not options.fp16:
        return None
    return DynamicGradScaler(
        initial_scale=options.initial_loss_scale,
        min_scale=options.min_loss_scale,
        growth_factor=2.0,
        backoff_factor=0.5,
        growth_interval=options.loss_scale_window,
        hysteresis=options.hysteresis,
    )
