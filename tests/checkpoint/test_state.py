"""What is saved of stages is put back bit for bit, however the model is cut before and after."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from gpt_parts import LAYERS, Gpt, MakeGpt, cut
from hypothesis import given
from hypothesis import strategies as st
from megatron.core import dist_checkpointing
from saved_tensors import tensors_of
from torch import Tensor

from megatron_bamboo.checkpoint.shares import Box, boxes_of
from megatron_bamboo.checkpoint.state import load_stage, sharded_state
from megatron_bamboo.checkpoint.strategy import PlainSaveStrategy
from megatron_bamboo.model.shard import WHOLE, Shard
from megatron_bamboo.model.stage import Stage

CUTS = {
    "one stage": "",
    "two stages": "--pipeline-model-parallel-size 2",
    "four stages": "--pipeline-model-parallel-size 4",
    "two stages of two chunks": (
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"
    ),
}
KINDS = {
    "default": "",
    "gated": "--swiglu --untie-embeddings-and-output-weights --normalization RMSNorm "
    "--position-embedding-type rope --disable-bias-linear",
}
STEP = 3


def trained(gpt: Gpt, shard: Shard = WHOLE) -> list[Stage]:
    """Stages after some steps, in which each gradient was the parameter itself."""
    stages = [gpt.trained_stage(number, shard) for number in range(gpt.shape.num_stages)]
    for _ in range(STEP):
        for stage in stages:
            for unit in stage.units.values():
                for _name, parameter in unit.named_parameters():
                    unit.reduced_part(parameter).copy_(parameter.detach().view(-1))
            stage.apply(1.0)
    return stages


def save(stages: list[Stage], folder: Path) -> list[str]:
    """Save as the only writer; what happened on the way."""
    folder.mkdir()
    calls: list[str] = []
    strategy = PlainSaveStrategy(lambda: calls.append("writes"))
    dist_checkpointing.save(sharded_state(stages), str(folder), strategy)
    return calls


def state(stages: list[Stage]) -> dict[str, Tensor]:
    return {name: value for stage in stages for name, value in stage.state()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("after", CUTS)
@pytest.mark.parametrize("before", ["two stages", "two stages of two chunks"])
def test_any_cut_goes_on_from_any_other(
    gpt: MakeGpt, tmp_path: Path, kind: str, before: str, after: str
) -> None:
    assert save(trained(gpt(f"{KINDS[kind]} {CUTS[before]}")), tmp_path / "save") == ["writes"]
    other = gpt(f"{KINDS[kind]} {CUTS[after]}")
    loaded = [other.stage(number) for number in range(other.shape.num_stages)]
    for stage in loaded:  # each by itself, as a worker that holds no other
        load_stage(stage, str(tmp_path / "save"), STEP)
    expected, found = state(trained(other)), state(loaded)
    assert found.keys() == expected.keys()
    assert any(name.endswith("/exp_avg_sq") for name in found)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_names_and_shapes_are_megatrons(gpt: MakeGpt, tmp_path: Path) -> None:
    save(trained(gpt(CUTS["two stages"])), tmp_path / "save")
    saved = dist_checkpointing.load_tensors_metadata(str(tmp_path / "save"))
    shapes = {name: tuple(tensor.global_shape) for name, tensor in saved.items()}
    name = "decoder.layers.self_attention.linear_qkv.weight"
    assert shapes[name] == shapes[f"optimizer.state.exp_avg.{name}"] == (LAYERS, 96, 32)
    assert shapes["embedding.word_embeddings.weight"] == (128, 32)
    assert "output_layer.weight" not in shapes  # tied
    assert sorted((tmp_path / "save").iterdir()) == [
        tmp_path / "save" / name
        for name in (".metadata", "__0_0.distcp", "common.pt", "metadata.json")
    ]


def test_megatrons_own_reader_reads_the_weights(gpt: MakeGpt, tmp_path: Path) -> None:
    source = trained(gpt(CUTS["two stages"]))
    save(source, tmp_path / "save")
    (place,) = cut(1)
    chunk: Any = gpt().chunk(place)
    wanted = chunk.sharded_state_dict()
    loaded = dist_checkpointing.load(wanted, str(tmp_path / "save"))
    saved = source[1].chunks[0].decoder.layers[1].mlp.linear_fc1.weight
    assert torch.equal(loaded["decoder.layers.3.mlp.linear_fc1.weight"], saved)
    chunk.load_state_dict(
        {name: value for name, value in loaded.items() if isinstance(value, Tensor)}, strict=True
    )


def is_part_of(name: str, value: Tensor, whole: dict[str, Tensor]) -> bool:
    """Whether a tensor, named as ``Stage.state`` does it, holds these elements of the whole one."""
    base, is_part, start = name.partition("@")
    if not is_part:
        return torch.equal(value, whole[base])
    return torch.equal(value, whole[base].view(-1)[int(start) :][: len(value)])


@pytest.mark.parametrize("flags", ["", "--bf16", KINDS["gated"]])
def test_who_has_a_share_takes_it_from_the_whole(gpt: MakeGpt, tmp_path: Path, flags: str) -> None:
    model = gpt(f"{flags} {CUTS['two stages']}")
    source = trained(model)
    save(source, tmp_path / "save")
    for number in range(3):
        stage = model.stage(1, shard=Shard(number, 3))
        load_stage(stage, str(tmp_path / "save"), STEP)
        loaded, whole = dict(stage.state()), state(source)
        assert any("/exp_avg@" in name for name in loaded)
        for name, value in loaded.items():
            assert is_part_of(name, value, whole), name


@given(st.lists(st.integers(1, 6), max_size=4).map(tuple), st.data())
def test_elements_in_a_row_are_a_few_boxes(shape: tuple[int, ...], data: st.DataObject) -> None:
    size = math.prod(shape)
    start = data.draw(st.integers(0, size))
    elements = range(start, data.draw(st.integers(start, size)))
    numbers = torch.arange(size).view(shape)
    boxes = list(boxes_of(shape, elements))
    found = [number for box in boxes for number in _in(box, numbers).flatten().tolist()]
    assert found == list(elements)
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


def _in(box: Box, tensor: Tensor) -> Tensor:
    along = zip(box.offset, box.shape, strict=True)
    return tensor[tuple(slice(offset, offset + length) for offset, length in along)]


@pytest.mark.parametrize("flags", ["", "--bf16", KINDS["gated"]])
@pytest.mark.parametrize("cut_in", ["two stages", "two stages of two chunks"])
def test_shares_make_the_checkpoint_that_one_worker_would(
    gpt: MakeGpt, tmp_path: Path, flags: str, cut_in: str
) -> None:
    model = gpt(f"{flags} {CUTS[cut_in]}")
    save(trained(model), tmp_path / "whole")
    written: dict[str, Any] = {}
    for number in range(3):
        shares = [model.stage(stage, shard=Shard(number, 3)) for stage in (0, 1)]
        for stage in shares:
            load_stage(stage, str(tmp_path / "whole"), STEP)
        written[f"worker{number}"] = sharded_state(shares if number == 1 else [], shares)
    (tmp_path / "shares").mkdir()
    dist_checkpointing.save(written, str(tmp_path / "shares"), PlainSaveStrategy(lambda: None))
    whole, shares_of_it = tensors_of(tmp_path / "whole"), tensors_of(tmp_path / "shares")
    assert whole.keys() == shares_of_it.keys()
    for name, value in whole.items():
        assert torch.equal(value, shares_of_it[name]), name
    loaded = [model.stage(number) for number in (0, 1)]
    for stage in loaded:
        load_stage(stage, str(tmp_path / "shares"), STEP)
    expected, found = state(trained(model)), state(loaded)
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert torch.equal(value, found[name]), name
