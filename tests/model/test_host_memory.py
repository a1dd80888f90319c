"""What forwards save goes to host memory and comes back bit for bit, in no more than it takes."""

import weakref

import torch
from gpt_parts import MakeGpt, random_tokens
from torch import Tensor, nn

from megatron_bamboo.model.host_memory import HostMemory
from megatron_bamboo.model.stage import Stage


def run_forward(stage: Stage, memory: HostMemory | None) -> Tensor:
    """The output of a first stage, saved as asked."""
    (chunk,) = stage.chunks
    tokens = random_tokens()
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    if memory is None:
        return chunk(tokens, positions, attention_mask=None)
    with memory.saving(chunk.parameters()):
        return chunk(tokens, positions, attention_mask=None)


def test_the_gradients_are_the_same_bits_and_nothing_is_left(gpt: MakeGpt) -> None:
    made, memory = gpt("--pipeline-model-parallel-size 2 --attention-dropout 0.1"), HostMemory()
    plain, offloading = made.stage(0), made.stage(0)
    for stage, to in ((plain, None), (offloading, memory)):
        output = run_forward(stage, to)
        assert (memory.held_bytes > 0) == (to is not None)
        output.backward(torch.ones_like(output))
    del output
    assert memory.held_bytes == 0
    for unit in plain.units:
        one, other = (stage.units[unit].gradient for stage in (plain, offloading))
        assert one.abs().sum() > 0 and torch.equal(one, other)


def test_what_was_saved_is_let_go_of_where_it_was() -> None:
    memory = HostMemory()
    weight = nn.Parameter(torch.ones(50))
    start = torch.arange(50.0)
    middle = start * weight
    gone = weakref.ref(middle.untyped_storage())
    with memory.saving([weight, start]):
        end = middle.exp().sin()  # saves the exponential twice, once as an input
    del middle
    assert gone() is None
    assert memory.held_bytes == 50 * 4
    end.sum().backward()
    assert weight.grad is not None and torch.isfinite(weight.grad).all()


def test_parameters_and_what_else_stays_is_not_copied() -> None:
    memory, weight = HostMemory(), nn.Parameter(torch.ones(30, 20))
    given = torch.randn(20, requires_grad=True)
    with memory.saving([weight, given]):
        output = (weight.view(20, 30).t() @ given).sum()
    assert memory.held_bytes == 0
    output.backward()
    assert weight.grad is not None and torch.equal(weight.grad.view(20, 30)[:, 0], given)


def test_views_share_one_copy_and_keep_their_places() -> None:
    memory = HostMemory()
    whole = torch.randn(6, 8, requires_grad=True)
    work = whole * 2
    with memory.saving([]):
        output = (work[1:3, ::2] * work[3:5, 1::2]).sum()
    assert memory.held_bytes == work.nbytes
    output.backward()
    expected = torch.zeros(6, 8)
    expected[1:3, ::2] = 2 * work.detach()[3:5, 1::2]
    expected[3:5, 1::2] = 2 * work.detach()[1:3, ::2]
    assert whole.grad is not None and torch.equal(whole.grad, expected)


def test_what_is_written_later_does_not_change_what_was_saved() -> None:
    memory, start = HostMemory(), torch.ones(8, requires_grad=True)
    buffer = torch.full((8,), 3.0)
    with memory.saving([]):
        first = start * buffer
        buffer.fill_(5.0)
        second = start * buffer
    assert memory.held_bytes == 2 * buffer.nbytes
    (first + second).sum().backward()
    assert start.grad is not None and start.grad.tolist() == [8.0] * 8
