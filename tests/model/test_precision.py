"""The scale of the loss: the same course as Megatron's, and what is cast at the model's ends."""

import pytest
import torch
from gpt_parts import MakeGpt, cut, random_tokens
from torch import nn

from megatron_bamboo.config import PrecisionOptions
from megatron_bamboo.model.precision import LossScale, cast_ends

FLOAT16 = PrecisionOptions(fp16=True, initial_loss_scale=64.0, loss_scale_window=2, hysteresis=2)


def course(scale: LossScale, overflows: str) -> list[float]:
    """The scale after each step; an x is an overflow."""
    scales = []
    for step in overflows:
        scale.update(overflowed=step == "x")
        scales.append(scale.value)
    return scales


def test_it_is_lowered_after_overflows_and_raised_after_as_many_steps_without() -> None:
    assert course(LossScale(FLOAT16), "xx..x..") == [64.0, 32.0, 32.0, 64.0, 64.0, 64.0, 128.0]


def test_it_never_falls_below_the_least() -> None:
    options = PrecisionOptions(fp16=True, initial_loss_scale=4.0, min_loss_scale=2.0, hysteresis=1)
    assert course(LossScale(options), "xxx") == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("before", ["", "x", "xx.", "xx..x."])
def test_one_that_is_loaded_takes_the_same_course(before: str) -> None:
    one, other = LossScale(FLOAT16), LossScale(FLOAT16)
    course(one, before)
    other.load(one.state())
    assert torch.equal(one.state(), other.state())
    assert course(one, "x..x") == course(other, "x..x")


def test_one_that_adapts_starts_anew_after_a_constant_one() -> None:
    scale = LossScale(FLOAT16)
    scale.load(LossScale(PrecisionOptions(fp16=True, loss_scale=8.0)).state())
    assert scale.value == 64.0


@pytest.mark.parametrize(
    ("options", "value"),
    [
        (PrecisionOptions(), None),
        (PrecisionOptions(bf16=True), None),
        (PrecisionOptions(bf16=True, loss_scale=8.0), 8.0),
        (PrecisionOptions(fp16=True, loss_scale=8.0), 8.0),
        (PrecisionOptions(fp16=True), 2.0**32),
    ],
)
def test_which_precision_has_one(options: PrecisionOptions, value: float | None) -> None:
    scale = LossScale(options)
    assert scale.is_used == (value is not None)
    assert scale.value == (value or 1.0)
    gradient = torch.full((2,), 3.0)
    scale.unscale(gradient)
    assert torch.equal(gradient, torch.full((2,), 3.0 / (value or 1.0)))


@pytest.mark.parametrize(("flag", "dtype"), [("--bf16", torch.bfloat16), ("--fp16", torch.float16)])
def test_parameters_are_half_and_what_the_optimizer_steps_is_not(
    gpt: MakeGpt, flag: str, dtype: torch.dtype
) -> None:
    stage = gpt(flag).trained_stage(0)
    for unit in stage.units.values():
        assert unit.gradient.dtype is unit.reduced.dtype is torch.float32
        for parameter in unit.parameters:
            assert parameter.dtype is dtype
            assert torch.equal(parameter.main_param, parameter.float())
            unit.reduced_part(parameter).fill_(1.0)
    before = [p.main_param.clone() for u in stage.units.values() for p in u.parameters]
    stage.apply(1.0)
    after = [p for u in stage.units.values() for p in u.parameters]
    for main, parameter in zip(before, after, strict=True):
        assert not torch.equal(main, parameter.main_param)
        assert torch.equal(parameter.main_param.to(dtype), parameter)


def test_a_model_ends_in_float32_and_talks_in_half_between(gpt: MakeGpt) -> None:
    first, last = (gpt("--bf16").chunk(place) for place in cut(2))
    tokens = random_tokens()
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    hidden = first(tokens, positions, attention_mask=None)
    assert hidden.dtype is torch.bfloat16
    last.set_input_tensor(hidden)
    assert last(tokens, positions, attention_mask=None).dtype is torch.float32


def test_only_floats_are_cast_on_the_way_in() -> None:
    seen: list[torch.dtype] = []

    class Sees(nn.Module):
        def forward(self, *values: torch.Tensor) -> torch.Tensor:
            seen.extend(value.dtype for value in values)
            return values[0]

    module = Sees()
    cast_ends(module, torch.bfloat16, is_first=True, is_last=False)
    module(torch.zeros(1), torch.zeros(1, dtype=torch.long), torch.zeros(1, dtype=torch.bool))
    assert seen == [torch.bfloat16, torch.int64, torch.bool]
