"""The optimizer's state is shared out, each element of a unit to one worker, and no bit changes."""

import itertools
from collections import Counter

import pytest
import torch
from gpt_parts import Gpt, MakeGpt
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_bamboo.model.shard import WHOLE, Shard
from megatron_bamboo.model.stage import Stage

TWO = "--pipeline-model-parallel-size 2 "
GATED = "--swiglu --untie-embeddings-and-output-weights --normalization RMSNorm "


@given(st.integers(0, 10**12), st.integers(1, 300))
def test_shards_cover_a_unit_once_in_equal_parts(length: int, count: int) -> None:
    ranges = [Shard(number, count).range_in(length) for number in range(count)]
    assert ranges[0].start == 0 and ranges[-1].stop == length
    assert all(a.stop == b.start for a, b in itertools.pairwise(ranges))
    sizes = {elements.stop - elements.start for elements in ranges}
    assert max(sizes) - min(sizes) <= 1


def shards(gpt: Gpt, count: int) -> list[Stage]:
    """The last stage as the worker of each pipeline has it."""
    last = gpt.shape.num_stages - 1
    return [gpt.trained_stage(last, Shard(number, count)) for number in range(count)]


def set_gradients(stages: list[Stage], seed: int) -> None:
    """The same reduced gradients everywhere."""
    generator = torch.Generator().manual_seed(seed)
    stages[0].reduced.copy_(torch.randn(stages[0].reduced.shape, generator=generator))
    for stage in stages[1:]:
        stage.reduced.copy_(stages[0].reduced)


def gather(stages: list[Stage]) -> None:
    """What the groups do after a step."""
    for name in stages[0].units:
        every = [stage.units[name].shards_of_parameters() for stage in stages]
        for number, own in enumerate(parts[number] for number, parts in enumerate(every)):
            for parts in every:
                parts[number].copy_(own)


def states(stages: list[Stage]) -> dict[str, Tensor]:
    """All that the stages keep, with what is in parts put together: no gap, nothing twice."""
    whole: dict[str, Tensor] = {}
    parts: dict[str, dict[int, Tensor]] = {}
    for stage in stages:
        for name, value in stage.state():
            base, is_part, start = name.partition("@")
            if is_part:
                parts.setdefault(base, {})[int(start)] = value
            else:
                assert base not in whole or torch.equal(whole[base], value), name
                whole[base] = value
    for name, pieces in parts.items():
        starts = sorted(pieces)
        sizes = [len(pieces[start]) for start in starts]
        assert starts == [0, *itertools.accumulate(sizes[:-1])], name
        shape = whole[name.rpartition("/")[0] + "/parameter"].shape
        whole[name] = torch.cat([pieces[start] for start in starts]).view(shape)
    return whole


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("flags", ["", "--bf16", "--fp16 --loss-scale 4", GATED])
def test_shares_step_as_one_optimizer_does(gpt: MakeGpt, flags: str, count: int) -> None:
    model = gpt(TWO + "--weight-decay 0.3 --clip-grad 0.5 " + flags)
    one, shared = shards(model, 1), shards(model, count)
    for seed in (1, 2, 3):
        set_gradients([*one, *shared], seed)
        for stage in (*one, *shared):
            stage.apply(gradient_norm=2.0)
        gather(shared)
    expected, found = states(one), states(shared)
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert torch.equal(value, found[name]), name


@pytest.mark.parametrize("flags", ["", "--bf16"])
def test_an_optimizer_keeps_no_more_than_its_share(gpt: MakeGpt, flags: str) -> None:
    (one,) = shards(gpt(TWO + flags), 1)
    total = sum(unit.reduced.numel() for unit in one.units.values())
    kinds = ("exp_avg", "exp_avg_sq") + (("main",) if flags else ())
    for stage in shards(gpt(TWO + flags), 4):
        set_gradients([stage], 1)
        stage.apply(gradient_norm=1.0)
        kept: Counter[str] = Counter()
        for unit in stage.units.values():
            for optimizer in unit.optimizer.chained_optimizers:
                for main, state in optimizer.optimizer.state.items():
                    kept["main"] += main.numel()
                    kept.update({kind: state[kind].numel() for kind in kinds[:2]})
        for kind in kinds:
            assert abs(kept[kind] - total / 4) <= len(stage.units), kind


def test_each_piece_is_a_part_of_its_parameters_own_memory(gpt: MakeGpt) -> None:
    for stage in shards(gpt(TWO), 3):
        for unit in stage.units.values():
            for piece in unit.pieces:
                value = piece.parameter.detach()
                assert torch.equal(piece.part, piece.of(value))
                with torch.no_grad():
                    piece.part.fill_(7.0)
                assert (piece.of(value) == 7.0).all()


def test_a_replica_steps_what_its_primary_does_from_its_share_of_the_gradient(
    gpt: MakeGpt,
) -> None:
    primary, replica = (gpt(TWO).trained_stage(1, Shard(1, 3)) for _ in range(2))
    set_gradients([primary], 1)
    sent = primary.stepped_gradient().clone()
    assert len(sent) == pytest.approx(len(primary.reduced) / 3, abs=3)
    replica.set_stepped_gradient(sent)
    for stage in (primary, replica):
        stage.apply(gradient_norm=2.0)
    ours, theirs = dict(primary.state()), dict(replica.state())
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_where_nothing_is_shared_parameters_are_stepped_themselves(gpt: MakeGpt) -> None:
    stage = gpt(TWO).stage(1, shard=WHOLE)
    assert stage.stepped_gradient() is stage.reduced
    for unit in stage.units.values():
        assert [piece.part for piece in unit.pieces] == list(unit.parameters)
        assert unit.flat is None


def test_a_change_of_parameters_in_place_does_not_disturb_a_backward_pass(gpt: MakeGpt) -> None:
    """The gather may be run again while activations wait for their backward."""
    stage = gpt(TWO).stage(1, shard=Shard(0, 2))
    (unit, *_) = stage.units.values()
    parameter = unit.parameters[0]
    loss = (parameter**2).sum()
    for part in unit.shards_of_parameters():
        part.copy_(part.clone())
    loss.backward()
    assert torch.equal(parameter.main_grad, 2 * parameter.detach())
