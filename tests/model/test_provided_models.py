"""Models from other providers than the product's own script's."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from gpt_parts import MakeGpt, cut, losses_of, random_tokens
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from torch import nn

from megatron_bamboo.errors import UserError
from megatron_bamboo.model.config import core_transformer_config_from_args
from megatron_bamboo.model.gpt import units_of
from megatron_bamboo.script.state import get_args


def plain_provider(pre_process: bool = True, post_process: bool = True) -> GPTModel:
    """As Megatron's users have written them for years: one layer's spec, groups from ``mpu``."""
    return build(GPTModel, pre_process, post_process)


def build(kind: type[GPTModel], pre_process: bool, post_process: bool) -> GPTModel:
    args = get_args()
    return kind(
        config=core_transformer_config_from_args(args),
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=True,
    )


class WithAdapter(GPTModel):
    """Has a module of torch's and a bare parameter at its end."""

    def __init__(self, *arguments: object, **more: object) -> None:
        super().__init__(*arguments, **more)
        if self.post_process:
            self.adapter = nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.5), nn.LayerNorm(32))


def test_a_plain_provider_gives_the_same_model_cut_or_not(gpt: MakeGpt) -> None:
    ours = gpt("--pipeline-model-parallel-size 2")
    plain = replace(ours, provider=plain_provider)
    for one, other in zip(cut(2), cut(2), strict=True):
        weights, others = ours.weights(one), plain.weights(other)
        assert weights.keys() == others.keys()
        assert all(torch.equal(weights[name], others[name]) for name in weights)
    whole = replace(gpt(), provider=plain_provider)
    tokens = random_tokens()
    assert torch.equal(losses_of(plain.stages(), tokens), losses_of(whole.stages(), tokens))


def test_the_configuration_speaks_of_the_whole_model_once_it_is_built(gpt: MakeGpt) -> None:
    for place in cut(2):
        chunk = replace(gpt(), provider=plain_provider).chunk(place)
        assert len(chunk.decoder.layers) == 2 and chunk.config.num_layers == 4


def test_an_added_module_belongs_to_the_head_and_keeps_torchs_way_to_draw(gpt: MakeGpt) -> None:
    def provider(pre_process: bool, post_process: bool) -> GPTModel:
        torch.rand(3)  # whatever ran before
        return build(WithAdapter, pre_process, post_process)

    place = cut(2)[1]
    made = replace(gpt(), provider=provider)
    weights = made.weights(place)
    assert {"head/adapter.0.weight", "head/adapter.0.bias", "head/adapter.2.weight"} < set(weights)
    assert float(weights["head/adapter.0.weight"].abs().max()) <= 1 / 32**0.5
    assert float(weights["head/adapter.0.bias"].abs().max()) > 0
    torch.manual_seed(1)
    again = made.weights(place)
    assert all(torch.equal(weights[name], again[name]) for name in weights)


def test_a_parameter_that_no_unit_would_hold_is_refused(gpt: MakeGpt) -> None:
    def provider(pre_process: bool, post_process: bool) -> GPTModel:
        chunk = build(GPTModel, pre_process, post_process)
        chunk.bias = nn.Parameter(torch.zeros(3))
        return chunk

    with pytest.raises(UserError, match="the model's parameter bias is neither in a layer"):
        replace(gpt(), provider=provider).chunk(cut(2)[0])


@pytest.mark.parametrize(
    ("provider", "message"),
    [
        (lambda **_: nn.Linear(1, 1), "gave a Linear: it must give Megatron-core's GPTModel"),
        (lambda **_: whole_model(), "built 4 layers for a chunk of 2"),
        (lambda **_: untied_model(), "share_embeddings_and_output_weights as --untie"),
        (lambda **_: counting_tokens(), "calculate_per_token_loss is not supported"),
        (lambda **_: sharing_the_sequence(), "sequence_parallel needs --tensor-model-parallel"),
        (lambda **_: frozen_model(), r"the model's parameter .* is frozen"),
        (lambda **_: model_with_buffer(), "the model's buffer norm.running_mean would be kept by"),
    ],
)
def test_what_cannot_be_a_chunk_is_refused(
    gpt: MakeGpt, provider: Callable[..., nn.Module], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        replace(gpt(), provider=provider).chunk(cut(2)[0])


def whole_model() -> GPTModel:
    config = core_transformer_config_from_args(get_args())
    config.num_layers = 4
    return GPTModel(config, get_gpt_layer_local_spec(), 128, 16, True, False)


def counting_tokens() -> GPTModel:
    chunk = plain_provider(True, False)
    chunk.config.calculate_per_token_loss = True
    return chunk


def sharing_the_sequence() -> GPTModel:
    chunk = plain_provider(True, False)
    chunk.config.sequence_parallel = True
    return chunk


def frozen_model() -> GPTModel:
    chunk = plain_provider(True, False)
    chunk.decoder.layers[1].requires_grad_(False)
    return chunk


def model_with_buffer() -> GPTModel:
    chunk = plain_provider(True, False)
    chunk.norm = nn.BatchNorm1d(3)
    return chunk


def untied_model() -> GPTModel:
    config = core_transformer_config_from_args(get_args())
    return GPTModel(config, get_gpt_layer_local_spec(), 128, 16, True, False)


def test_units_name_every_parameter_once(gpt: MakeGpt) -> None:
    chunk = replace(gpt(), provider=plain_provider).chunk(cut(1)[0])
    held = [p for parts in units_of(chunk, cut(1)[0]).values() for p in parts.parameters()]
    assert {id(p) for p in held} == {id(p) for p in chunk.parameters()}
