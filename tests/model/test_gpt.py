"""Chunks of a GPT: their units, and initial weights that depend on seed and unit alone."""

import math

import pytest
import torch
from gpt_parts import LAYERS, Gpt, MakeGpt, cut, losses_of, random_tokens

from megatron_bamboo.execution.commit import unit_parts
from megatron_bamboo.model.gpt import tied_weight, units_of
from megatron_bamboo.model.randomness import derive_seed

HEAD, EMBEDDING = "head/output_layer.weight", "embedding/embedding.word_embeddings.weight"


def whole(gpt: Gpt, num_parts: int) -> dict[str, torch.Tensor]:
    """The initial weights of the whole model, built in so many parts."""
    return {name: value for place in cut(num_parts) for name, value in gpt.weights(place).items()}


def marks(parameter: torch.nn.Parameter) -> dict[str, object]:
    """What Megatron has noted on a parameter."""
    return dict(vars(parameter))


@pytest.mark.parametrize("num_parts", [1, 2, 4])
def test_the_units_of_all_chunks_are_the_models(gpt: MakeGpt, num_parts: int) -> None:
    units = [unit for place in cut(num_parts) for unit in units_of(gpt().chunk(place), place)]
    assert tuple(f"{unit}/0" for unit in units) == unit_parts(LAYERS + 2, tensor_size=1)


def test_names_are_the_same_in_every_cut(gpt: MakeGpt) -> None:
    names = whole(gpt(), 2).keys()
    assert names == whole(gpt(), 4).keys()
    # A model in one piece has no second copy of the tied weight.
    assert names - whole(gpt(), 1).keys() == {HEAD}
    assert {
        EMBEDDING,
        "embedding/embedding.position_embeddings.weight",
        "layer3/layer.self_attention.linear_qkv.weight",
        "layer3/layer.mlp.linear_fc2.bias",
        "head/final_layernorm.weight",
    } <= names


def test_layers_keep_their_global_number(gpt: MakeGpt) -> None:
    chunk = gpt().chunk(cut(2)[1])
    assert [layer.layer_number for layer in chunk.decoder.layers] == [3, 4]


@pytest.mark.parametrize("flags", ["", "--untie-embeddings-and-output-weights --swiglu"])
def test_a_unit_has_the_same_weights_in_every_cut(gpt: MakeGpt, flags: str) -> None:
    reference = whole(gpt(flags), 4)
    for num_parts in (1, 2):
        torch.rand(num_parts)  # no generator's state enters
        for name, value in whole(gpt(flags), num_parts).items():
            assert torch.equal(value, reference[name]), (num_parts, name)


@pytest.mark.parametrize("flags", ["", "--untie-embeddings-and-output-weights --swiglu"])
def test_where_state_is_to_come_all_is_as_ever_but_nothing_is_drawn(
    gpt: MakeGpt, flags: str
) -> None:
    made = gpt(flags)
    seed = made.options.training.seed
    for place in cut(4):
        drawn = made.chunk(place)
        torch.default_generator.manual_seed(derive_seed(seed, "provider", place.layers.start))
        before = torch.default_generator.get_state()
        awaiting = made.chunk(place, draws=False)
        if not place.is_first:  # torch's embedding of positions draws before anyone is asked
            assert torch.equal(torch.default_generator.get_state(), before)
        for one, other in zip(drawn.parameters(), awaiting.parameters(), strict=True):
            assert (one.shape, one.dtype, marks(one)) == (other.shape, other.dtype, marks(other))
        assert awaiting.state_dict().keys() == drawn.state_dict().keys()


def test_tied_copies_are_equal_and_untied_ones_are_not(gpt: MakeGpt) -> None:
    tied, untied = whole(gpt(), 2), whole(gpt("--untie-embeddings-and-output-weights"), 2)
    assert torch.equal(tied[HEAD], tied[EMBEDDING])
    assert not torch.equal(untied[HEAD], untied[EMBEDDING])


def test_only_the_ends_of_a_cut_model_hold_a_tied_weight(gpt: MakeGpt) -> None:
    def holders(flags: str, num_parts: int) -> list[bool]:
        places = cut(num_parts)
        return [tied_weight(gpt(flags).chunk(place), place) is not None for place in places]

    assert holders("", 4) == [True, False, False, True]
    assert holders("", 1) == [False]
    assert holders("--untie-embeddings-and-output-weights", 2) == [False, False]


def test_another_seed_gives_other_weights(gpt: MakeGpt) -> None:
    one, other = whole(gpt(), 2), whole(gpt("--seed 1235"), 2)
    for name, value in one.items():
        assert torch.equal(value, other[name]) == (value.dim() < 2), name


def test_no_two_parameters_share_a_draw(gpt: MakeGpt) -> None:
    matrices = [value for value in whole(gpt(), 1).values() if value.dim() == 2]
    assert len({tuple(value.flatten()[:8].tolist()) for value in matrices}) == len(matrices)


def test_initial_values_are_megatrons(gpt: MakeGpt) -> None:
    for name, value in whole(gpt("--init-method-std 0.5"), 1).items():
        if value.dim() == 1:
            ones = name.endswith("norm.weight")
            assert torch.equal(value, torch.ones_like(value) if ones else torch.zeros_like(value))
            continue
        is_output = name.endswith(("linear_proj.weight", "linear_fc2.weight"))
        expected = 0.5 / math.sqrt(2 * LAYERS) if is_output else 0.5
        assert float(value.std()) == pytest.approx(expected, rel=0.1), name


VARIANTS = {
    "default": "",
    "rotary positions": "--position-embedding-type rope",
    "RMSNorm": "--normalization RMSNorm",
    "swiglu": "--swiglu",
    "no biases": "--disable-bias-linear",
    "untied": "--untie-embeddings-and-output-weights",
    "all at once": "--position-embedding-type rope --normalization RMSNorm --swiglu "
    "--disable-bias-linear --untie-embeddings-and-output-weights",
}


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_learns(gpt: MakeGpt, variant: str, num_stages: int) -> None:
    stages = gpt(f"{VARIANTS[variant]} --pipeline-model-parallel-size {num_stages}").stages()
    losses = []
    for _step in range(6):
        for stage in stages:
            stage.start_step()
        loss = losses_of(stages, random_tokens())
        loss.backward()
        losses.append(float(loss.detach()))
        for stage in stages:
            for unit in stage.units.values():
                unit.reduced.copy_(unit.gradient)
            stage.apply(gradient_norm=1.0)
    assert losses[-1] < losses[0] - 0.5
    assert all(bool(value.isfinite().all()) for stage in stages for _, value in stage.state())


def test_a_variant_has_the_parameters_that_it_says(gpt: MakeGpt) -> None:
    plain, rope = whole(gpt(), 1), whole(gpt("--position-embedding-type rope"), 1)
    assert plain.keys() - rope.keys() == {"embedding/embedding.position_embeddings.weight"}
    no_bias = whole(gpt("--disable-bias-linear --normalization RMSNorm"), 1)
    assert not [name for name in no_bias if name.endswith("bias")]
    gated = whole(gpt("--swiglu --ffn-hidden-size 24"), 1)
    assert gated["layer0/layer.mlp.linear_fc1.weight"].shape == (48, 32)
    assert gated["layer0/layer.mlp.linear_fc2.weight"].shape == (32, 24)
