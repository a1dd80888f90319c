"""Units go into the stages of another cut, and the steps after it are the same."""

from dataclasses import dataclass, field

import pytest
import torch
from gpt_parts import Gpt, MakeGpt

from megatron_bamboo.execution.handover import UnitHandover
from megatron_bamboo.execution.held_stages import HeldStages, Holding
from megatron_bamboo.execution.mailbox import Message
from megatron_bamboo.execution.step_state import StepState
from megatron_bamboo.execution.transport import TensorShape
from megatron_bamboo.model.precision import LossScale
from megatron_bamboo.model.stage import Stage, build_scheduler, follow_stages
from megatron_bamboo.planner.arrangement import PipelineShape, spans_of_layers
from megatron_bamboo.schedule.actions import Action, Op

BATCH = 2
HALVES = PipelineShape(spans_of_layers((2, 2)), 1)
THIRDS = PipelineShape(spans_of_layers((1, 2, 1)), 1)


@dataclass
class Post:
    """Delivers at once what is sent."""

    sent: dict[Message, torch.Tensor] = field(default_factory=dict)

    def send(self, _peer: str, message: Message, tensor: torch.Tensor) -> None:
        self.sent[message] = tensor

    def receive(self, message: Message, _sender: str) -> torch.Tensor:
        return self.sent[message]


class Holder:
    """A worker's stages, and what moves them on."""

    def __init__(self, gpt: Gpt, now: Holding, post: Post) -> None:
        self.held = HeldStages(gpt.stage_of, now)
        self.scheduler = build_scheduler(self.held.stages, gpt.options.optimizer, 10, BATCH)
        scale = LossScale(gpt.options.precision)
        parts = self.scheduler, scale, THIRDS.num_units, BATCH
        self.handover = UnitHandover(self.held, post, *parts)  # type: ignore[arg-type]

    def step(self) -> None:
        """With gradients that follow from the parameters, so that all holders have the same."""
        follow_stages(self.scheduler, self.held.stages)
        for stage in self.held.stages.values():
            stage.apply(1.0)
        self.scheduler.step(BATCH)


def set_gradients(stages: dict[int, Stage]) -> None:
    for stage in stages.values():
        for unit in stage.units.values():
            for _name, parameter in unit.named_parameters():
                unit.reduced_part(parameter).copy_(parameter.detach().float().view(-1))


def state_of(stages: dict[int, Stage]) -> dict[str, torch.Tensor]:
    return {name: t.clone() for stage in stages.values() for name, t in stage.state()}


@pytest.mark.parametrize("flags", ["", "--bf16"])
def test_a_new_cut_goes_on_with_the_same_bits(gpt: MakeGpt, flags: str) -> None:
    """One worker holds all of the old cut, and another one joins with the middle of the new one."""
    made, post = gpt(flags), Post()
    old = Holder(made, Holding((0, 1), HALVES), post)
    new = Holder(made, Holding((1,), THIRDS), post)
    for _ in range(2):
        set_gradients(old.held.stages)
        old.step()
    old.held.hold(Holding((0, 1), HALVES), Holding((0, 2), THIRDS))
    new.held.hold(Holding((), HALVES), Holding((1,), THIRDS))
    set_gradients(old.held.stages)
    state = StepState(3)
    middle = range(*THIRDS.spans[1])
    for unit in range(THIRDS.num_units):
        if unit in middle:
            old.handover.send_state(unit, "new", state)
            old.handover.send_gradient(unit, "new", state)
            new.handover.take_state(unit, "old", state, post.receive)
            new.handover.take_gradient(unit, "old", state, post.receive)
        else:
            old.handover.take_state(unit, None, state, post.receive)
            old.handover.take_gradient(unit, None, state, post.receive)
    for message, tensor in post.sent.items():
        expected = new.handover.shape_of(message.receive)
        assert expected == TensorShape(tuple(tensor.shape), tensor.dtype, tensor.device)
    whole = Holder(made, Holding((0, 1), HALVES), post)
    for _ in range(3):
        set_gradients(whole.held.stages)
        whole.step()
    for holder in (old, new):
        holder.held.promote()
        holder.step()
        assert holder.scheduler.num_steps == 3 * BATCH
    for _ in range(2):
        for holder in (whole, old, new):
            set_gradients(holder.held.stages)
            holder.step()
    found = state_of(old.held.stages) | state_of(new.held.stages)
    expected_state = state_of(whole.held.stages)
    assert found.keys() == expected_state.keys()
    for name, value in expected_state.items():
        assert torch.equal(found[name], value), name


def test_a_unit_with_a_wrong_bit_is_refused(gpt: MakeGpt) -> None:
    post, state = Post(), StepState(1)
    holder = Holder(gpt(""), Holding((0, 1), HALVES), post)
    holder.held.hold(Holding((0, 1), HALVES), Holding((1,), THIRDS))
    holder.handover.send_state(2, "itself", state)
    post.sent[Message(1, Action(2, None, Op.RECV_UNIT, None))][40] ^= 1
    with pytest.raises(ValueError, match="another checksum"):
        holder.handover.take_state(2, "itself", state, post.receive)


def test_what_is_held_follows_the_plan(gpt: MakeGpt) -> None:
    made = gpt("")
    held = HeldStages(made.stage_of, Holding((0,), HALVES))
    stages, first = held.stages, held.stages[0]
    held.hold(Holding((0, 1), HALVES))
    assert sorted(stages) == [0, 1] and stages[0] is first
    held.hold(Holding((0,), HALVES), Holding((1, 2), THIRDS))
    coming = held.coming[1]
    assert (sorted(stages), sorted(held.coming)) == ([0], [1, 2])
    held.hold(Holding((0,), HALVES))  # a loss has undone it
    held.promote()
    assert (sorted(stages), held.coming) == ([0], {}) and stages[0] is first
    held.hold(Holding((0,), HALVES), Holding((1, 2), THIRDS))
    held.promote()
    held.hold(Holding((2,), THIRDS))
    assert (sorted(stages), held.coming) == ([2], {}) and held.stages is stages
    assert coming not in stages.values()


def test_who_joins_with_another_cut_than_it_was_called_for_builds_anew(gpt: MakeGpt) -> None:
    held = HeldStages(gpt("").stage_of, Holding((1,), HALVES))
    built = held.stages[1]
    held.hold(Holding((), HALVES), Holding((1, 2), THIRDS))
    assert sorted(held.stages) == sorted(held.coming) == [1, 2]
    assert built is not held.stages[1] is held.coming[1]
