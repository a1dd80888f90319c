"""Dropout is a function of seed, step, global microbatch and unit, and of nothing else."""

import pytest
import torch
from gpt_parts import MakeGpt, cut, random_tokens
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch import Tensor, nn

from megatron_bamboo.model.randomness import DropoutSeeds, derive_seed

FIRST = cut(4)[0]


def test_a_seed_is_the_same_everywhere_and_its_own() -> None:
    assert derive_seed(1234, 3, 5, "layer0") == 2424908509609680625
    purposes = [("a", "b"), ("ab",), ("a", 1), ("a", 11), (1, "a"), ("a",)]
    seeds = {derive_seed(seed, *purpose) for seed in (1, 2) for purpose in purposes}
    assert len(seeds) == 2 * len(purposes)
    assert all(0 <= seed < 2**63 for seed in seeds)


def masked(seeds: DropoutSeeds, module: nn.Module, step: int, microbatch: int) -> Tensor:
    seeds.step, seeds.microbatch = step, microbatch
    return module(torch.ones(1000))


def test_masks_differ_between_steps_microbatches_units_and_seeds() -> None:
    def masks(seed: int, unit: str) -> list[tuple[float, ...]]:
        seeds, module = DropoutSeeds(seed), nn.Dropout(0.5)
        seeds.attach(unit, module)
        return [
            tuple(masked(seeds, module, step, microbatch).tolist())
            for step in (1, 2)
            for microbatch in (0, 1)
        ]

    drawn = masks(1234, "layer0") + masks(1234, "layer1") + masks(1235, "layer0")
    assert len(set(drawn)) == 12
    assert masks(1234, "layer0") == drawn[:4]


def forward(chunk: GPTModel, seeds: DropoutSeeds, step: int = 3, microbatch: int = 5) -> Tensor:
    seeds.step, seeds.microbatch = step, microbatch
    tokens = random_tokens()
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    return chunk(tokens, positions, attention_mask=None)


@pytest.mark.parametrize(
    "flags",
    ["", "--attention-dropout 0", "--hidden-dropout 0"],
    ids=["both", "hidden alone", "attention alone"],
)
def test_a_replica_draws_its_primarys_masks(gpt: MakeGpt, flags: str) -> None:
    primary_seeds, replica_seeds = DropoutSeeds(1234), DropoutSeeds(1234)
    primary = gpt(flags).chunk(FIRST, primary_seeds)
    expected = forward(primary, primary_seeds)
    # The replica's worker has its own stage, and a history of its own.
    own = gpt(flags).chunk(FIRST, replica_seeds)
    replica = gpt(flags).chunk(FIRST, replica_seeds)
    torch.manual_seed(99)
    forward(own, replica_seeds, step=2)
    assert torch.equal(forward(replica, replica_seeds), expected)
    assert torch.equal(forward(primary, primary_seeds), expected), "it depends on what ran before"
    for other in ({"step": 4}, {"microbatch": 6}):
        assert not torch.equal(forward(primary, primary_seeds, **other), expected), other


def test_there_is_dropout_only_in_training_and_where_asked_for(gpt: MakeGpt) -> None:
    seeds = DropoutSeeds(1234)
    chunk, without = gpt().chunk(FIRST, seeds), "--attention-dropout 0 --hidden-dropout 0"
    expected = forward(gpt(without).chunk(FIRST, seeds), seeds)
    assert not torch.equal(forward(chunk, seeds), expected)
    chunk.eval()
    before = torch.get_rng_state()
    assert torch.equal(forward(chunk, seeds), expected)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_first_thing_that_a_process_computes_may_be_an_evaluation(gpt: MakeGpt) -> None:
    seeds = DropoutSeeds(1234)
    chunk = gpt("").chunk(FIRST, seeds).eval()
    get_cuda_rng_tracker().reset()
    first = forward(chunk, seeds)
    assert torch.equal(first, forward(chunk, seeds, step=4))
