"""Digests differ where a bit does, whatever it is and wherever it lies."""

import pytest
import torch
from gpt_parts import MakeGpt
from hypothesis import given
from hypothesis import strategies as st

from megatron_bamboo.model.digest import DIGEST_BITS, state_digests, weighted_sum
from megatron_bamboo.model.shard import Shard
from megatron_bamboo.planner.trust import Kind


@given(
    length=st.integers(1, 40),
    offset=st.integers(0, 9),
    place=st.integers(0, 10**6),
    bit=st.integers(0, 7),
)
def test_any_flipped_bit_changes_it(length: int, offset: int, place: int, bit: int) -> None:
    whole = torch.arange(offset + length, dtype=torch.uint8)
    before = weighted_sum(whole[offset:])
    assert before == weighted_sum(whole[offset:].clone())
    whole[offset + place % length] ^= 1 << bit
    assert weighted_sum(whole[offset:]) != before


def test_elements_that_change_places_change_it() -> None:
    numbers = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    assert len({weighted_sum(numbers.roll(n)) for n in range(50)}) == 50


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_it_is_that_of_the_bits_and_not_of_the_shape(dtype: torch.dtype) -> None:
    numbers = torch.randn(6, 8).to(dtype)
    assert weighted_sum(numbers) == weighted_sum(numbers.view(-1))
    assert weighted_sum(numbers) == weighted_sum(numbers.view(torch.uint8))
    assert weighted_sum(torch.tensor([0.0])) != weighted_sum(torch.tensor([-0.0]))


def test_what_is_longer_than_one_part_is_summed_whole() -> None:
    long = torch.zeros((1 << 18) + 5, dtype=torch.int64)
    sums = set()
    for place in (0, 1, (1 << 18) - 1, 1 << 18, len(long) - 1):
        long.zero_()
        long[place] = 1
        sums.add(weighted_sum(long))
    assert len(sums) == 5


def test_each_unit_has_a_digest_of_its_parameters_and_one_of_the_rest(gpt: MakeGpt) -> None:
    made = gpt("--pipeline-model-parallel-size 2")
    stage, twin = made.trained_stage(0), made.trained_stage(0)
    before = state_digests(stage)
    assert before.keys() == {(unit, kind) for unit in stage.units for kind in Kind}
    assert before == state_digests(twin)
    assert all(0 < digest < 1 << DIGEST_BITS for digest in before.values())
    for name, tensor in twin.state():
        unit, *_, kind = name.split("/")
        tensor.view(-1)[:1].view(torch.uint8)[0] ^= 1
        changed = {key for key, digest in state_digests(twin).items() if digest != before[key]}
        expected = Kind.PARAMETERS if kind == "parameter" else Kind.OPTIMIZER
        assert changed == {(unit, expected)}, name
        tensor.view(-1)[:1].view(torch.uint8)[0] ^= 1


def test_shards_of_a_stage_have_the_same_parameters_and_other_moments(gpt: MakeGpt) -> None:
    made = gpt("--pipeline-model-parallel-size 2 --bf16")
    one, other = (state_digests(made.stage(0, shard=Shard(number, 2))) for number in range(2))
    assert one.keys() == other.keys()
    assert all((one[k] == other[k]) == (k[1] is Kind.PARAMETERS) for k in one)
