"""Mirrors of real gradient buffers: what is copied, and what a shadow goes on from."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from like_a_worker import like_a_worker

from megatron_bamboo.execution.mirrors import Mirrors
from megatron_bamboo.execution.step_state import StepState
from megatron_bamboo.schedule.actions import Action

MakeStages = Callable[[str], tuple[Any, Any]]
# Not what a float32 can hold.
LOSSES = {0: 1 / 3, 1: 2.0**-40, 2: 7.1}


@pytest.fixture(scope="module")
def process() -> Iterator[None]:
    sys.path.append(str(Path(__file__).parent.parent / "model"))
    with like_a_worker():
        yield


@pytest.fixture
def stages(process: None, tmp_path: Path) -> MakeStages:
    """Makes a stage twice, as its primary and as its replica have it."""
    from gpt_parts import Gpt, make_options

    from megatron_bamboo.execution.local_groups import model_groups

    def make(flags: str) -> tuple[Any, Any]:
        gpt = Gpt(make_options(tmp_path, flags), model_groups())
        shape = replace(gpt.shape, num_microbatches=4)
        number = shape.num_stages - 1
        made = [gpt.stage(number) for _ in range(2)]
        for stage in made:
            stage.start_step()
        return tuple(Mirrors({number: stage}, lambda: shape) for stage in made), made  # type: ignore[return-value]

    return make


def sum_something(stage: Any, seed: int) -> None:
    """As backward passes do, in every chunk."""
    generator = torch.Generator().manual_seed(seed)
    for unit in stage.units.values():
        unit.gradient.add_(torch.randn(unit.gradient.shape, generator=generator))


def gradients(stage: Any, chunk: int) -> list[torch.Tensor]:
    return [gradient.clone() for gradient in stage.gradients(chunk)]


@pytest.mark.parametrize("precision", ["", "--bf16"])
def test_a_shadow_goes_on_from_the_very_bits(stages: MakeStages, precision: str) -> None:
    flags = "--num-layers-per-virtual-pipeline-stage 1 --pipeline-model-parallel-size 2"
    (primary, shadow), (own, replica) = stages(f"{flags} {precision}")
    sum_something(own, 1)
    mirror = Action.parse("1.0SEND_MIRROR2")
    copy = primary.copy(mirror, StepState(1))
    assert copy.dtype == torch.float32
    shape = shadow.shape(mirror)
    assert (tuple(copy.shape), copy.dtype) == (shape.size, shape.dtype)
    before = gradients(own, 0)
    sum_something(own, 2)
    shadow.adopt(mirror, copy, StepState(1))
    assert all(map(torch.equal, before, gradients(replica, 0))), "the sum has gone on meanwhile"
    assert not any(bool(gradient.any()) for gradient in gradients(replica, 1)), "the other chunk"
    assert [len(own.gradients(chunk)) for chunk in (0, 1)] == [1, 2]
    sum_something(replica, 2)
    assert all(map(torch.equal, gradients(own, 0), gradients(replica, 0)))


def test_the_losses_of_the_models_end_come_with_its_mirror(stages: MakeStages) -> None:
    (primary, shadow), (own, _) = stages("--pipeline-model-parallel-size 2")
    sum_something(own, 1)
    mirror = Action.parse("1.0SEND_MIRROR1")
    copy = primary.copy(mirror, StepState(1, losses=dict(LOSSES)))
    assert tuple(copy.shape) == shadow.shape(mirror).size
    state = StepState(1, losses={3: 5.0})
    shadow.adopt(mirror, copy, state)
    assert state.losses == {0: LOSSES[0], 1: LOSSES[1], 3: 5.0}, "as far as it covers them"


def test_activations_whose_backward_never_runs_are_forgotten(stages: MakeStages) -> None:
    (primary, shadow), _ = stages("--pipeline-model-parallel-size 2")
    mirror = Action.parse("1.0SEND_MIRROR1")
    forwards = [Action.parse(f"1.0F{m}") for m in range(4)]
    state = StepState(1, saved={forward: (None, torch.ones(1)) for forward in forwards})
    copy = primary.copy(mirror, StepState(1, losses=dict(LOSSES)))
    shadow.adopt(mirror, copy, state)
    assert list(state.saved) == forwards[2:]
