"""A stage's state arrives at a new holder bit for bit, or not at all."""

import pytest
import torch
from gpt_parts import Gpt, MakeGpt

from megatron_bamboo.model.moving import Counters, num_bytes, pack, unpack
from megatron_bamboo.model.shard import WHOLE, Shard
from megatron_bamboo.model.stage import Stage

FLAGS = {
    "float32": "",
    "bfloat16": "--bf16",
    "two chunks": "--num-layers-per-virtual-pipeline-stage 1",
}
SCALE = torch.tensor([4096.0, 3.0, 1.0], dtype=torch.float64)


def trained(gpt: Gpt, shard: Shard = WHOLE) -> Stage:
    stage = gpt.trained_stage(0, shard)
    for _ in range(3):
        for unit in stage.units.values():
            for _name, parameter in unit.named_parameters():
                unit.reduced_part(parameter).copy_(parameter.detach().view(-1))
        stage.apply(1.0)
    return stage


@pytest.mark.parametrize("shard", [WHOLE, Shard(1, 3)], ids=["whole", "a share"])
@pytest.mark.parametrize("kind", FLAGS)
def test_all_state_arrives_bit_for_bit(gpt: MakeGpt, kind: str, shard: Shard) -> None:
    made = gpt(f"--pipeline-model-parallel-size 2 {FLAGS[kind]}")
    source, target = trained(made, shard), made.awaiting_stage(0, shard)
    packed = pack(source, Counters(12, SCALE))
    assert packed.dtype is torch.uint8
    assert packed.shape == (num_bytes(target),)
    counters = unpack(target, packed)
    assert counters.num_samples == 12 and torch.equal(counters.loss_scale, SCALE)
    expected, found = dict(source.state()), dict(target.state())
    assert found.keys() == expected.keys()
    assert any("/exp_avg_sq" in name for name in found)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_the_steps_after_it_are_the_same(gpt: MakeGpt) -> None:
    made = gpt("--pipeline-model-parallel-size 2")
    source, target = trained(made), made.awaiting_stage(0)
    unpack(target, pack(source, Counters(12, torch.empty(0, dtype=torch.float64))))
    for stage in (source, target):
        stage.reduced.fill_(0.25)
        stage.apply(1.0)
    for (name, one), (_name, other) in zip(source.state(), target.state(), strict=True):
        assert torch.equal(one, other), name


@pytest.mark.parametrize("place", [0, 20, -1])
def test_one_wrong_bit_is_found(gpt: MakeGpt, place: int) -> None:
    made = gpt("--pipeline-model-parallel-size 2")
    source, target = trained(made), made.trained_stage(0)
    before = {name: value.clone() for name, value in target.state()}
    packed = pack(source, Counters(12, SCALE))
    packed[place] ^= 1
    with pytest.raises(ValueError, match="another checksum"):
        unpack(target, packed)
    for name, value in target.state():
        assert name not in before or torch.equal(value, before[name])
