"""What a forward and a backward of each chunk take on this machine.

One stage at a time is built as a worker would build it, and runs the user's forward step on made-up
text. The medians are what ``--bamboo-costs`` and ``bamboo schedule --costs`` read. They are of this
device: profile where you train.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from statistics import median
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from megatron_bamboo.config import Layout, Options
from megatron_bamboo.execution.local_groups import model_groups
from megatron_bamboo.model.gpt import Recipe, prepare_process
from megatron_bamboo.model.place import set_current_stage
from megatron_bamboo.model.randomness import DropoutSeeds
from megatron_bamboo.model.stage import Stage, build_stage
from megatron_bamboo.planner.arrangement import PipelineShape
from megatron_bamboo.schedule.costs import Costs
from megatron_bamboo.script.args import dtype_of
from megatron_bamboo.script.providers import ForwardStepFunc, ModelProvider


def profile(
    options: Options,
    layout: Layout,
    vocab: int,
    provider: ModelProvider,
    forward_step: ForwardStepFunc,
    repeats: int,
) -> Costs:
    """The median seconds of ``repeats`` passes of every chunk, after one to warm up.

    Args:
        vocab: padded size of the vocabulary.
    """
    groups = model_groups()
    prepare_process(groups)
    recipe = Recipe.of(options, provider, groups, DropoutSeeds(options.training.seed))
    forwards, backwards = [], []
    shape = layout.arrangement.pipelines[0]
    for number in range(shape.num_stages):
        stage = build_stage(number, shape, options.optimizer, recipe)
        times = list(time_chunks(stage, options, shape, forward_step, vocab, repeats))
        forwards.append(tuple(forward for forward, _ in times))
        backwards.append(tuple(backward for _, backward in times))
    return Costs(forward=tuple(forwards), backward=tuple(backwards))


def table(costs: Costs) -> Iterator[str]:
    """The costs of every chunk as a Markdown table, in milliseconds."""
    yield "| stage | chunk | forward (ms) | backward (ms) |"
    yield "| ---: | ---: | ---: | ---: |"
    assert isinstance(costs.forward, tuple) and isinstance(costs.backward, tuple)
    for stage, pairs in enumerate(zip(costs.forward, costs.backward, strict=True)):
        forwards, backwards = (p if isinstance(p, tuple) else (p,) for p in pairs)
        for chunk, (forward, backward) in enumerate(zip(forwards, backwards, strict=True)):
            yield f"| {stage} | {chunk} | {forward * 1e3:.3f} | {backward * 1e3:.3f} |"


def time_chunks(
    stage: Stage,
    options: Options,
    shape: PipelineShape,
    forward_step: ForwardStepFunc,
    vocab: int,
    repeats: int,
) -> Iterator[tuple[float, float]]:
    """By chunk of a stage the median seconds of its forward and of its backward."""
    for number, chunk in enumerate(stage.chunks):
        set_current_stage(stage.number, number, shape.num_stages, shape.num_chunks)
        batch = made_up_batch(options, vocab, next(chunk.parameters()).device)
        times = [_time_passes(chunk, options, forward_step, batch) for _ in range(repeats + 1)]
        yield _medians(times[1:])


def _medians(times: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return median(forward for forward, _ in times), median(backward for _, backward in times)


def made_up_batch(options: Options, vocab: int, device: torch.device) -> dict[str, Tensor]:
    """A microbatch of random tokens, with what comes along with them."""
    size = (options.training.micro_batch_size, options.data.seq_length)
    tokens = torch.randint(vocab, size, device=device)
    return {
        "tokens": tokens,
        "labels": tokens,
        "loss_mask": torch.ones(size, device=device),
        "position_ids": torch.arange(size[1], device=device).expand(size),
    }


def _time_passes(
    chunk: GPTModel, options: Options, forward_step: ForwardStepFunc, batch: dict[str, Tensor]
) -> tuple[float, float]:
    """Seconds of one forward and one backward."""
    micro_batch, sequence = batch["tokens"].shape
    if not chunk.pre_process:
        size = (sequence, micro_batch, options.model.hidden_size)
        dtype, device = dtype_of(options.precision), batch["tokens"].device
        hidden = torch.randn(size, dtype=dtype, device=device)
        chunk.set_input_tensor(hidden.requires_grad_())

    def forward() -> Tensor:
        output, loss_func = forward_step(repeat(batch), chunk)
        return loss_func(output)[0] if chunk.post_process else output

    output, forward_seconds = _timed(forward)
    gradient = torch.ones_like(output)
    _, backward_seconds = _timed(lambda: torch.autograd.backward(output, gradient))
    return forward_seconds, backward_seconds


def _timed(work: Callable[[], Any]) -> tuple[Any, float]:
    torch.cuda.synchronize()  # does nothing where there is no GPU
    start = time.perf_counter()
    result = work()
    torch.cuda.synchronize()
    return result, time.perf_counter() - start
