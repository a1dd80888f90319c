"""Pretrain a GPT on nodes that can vanish: Megatron-LM's script, started by ``bamboo run``.

bamboo run --nodes 8 pretrain_gpt_bamboo.py --num-layers 8 ... --bamboo-redundancy eager

All that makes it a script of this project is the first import of the second block: with
``megatron.training`` in its place it is a script of Megatron-LM's.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from megatron_bamboo.quiet import quiet_megatron_import
from megatron_bamboo.training import (
    core_transformer_config_from_args,
    get_args,
    get_batch_on_this_tp_rank,
    get_blend_and_blend_per_split,
    get_tokenizer,
    gpt_layer_spec,
    is_first_or_last_pipeline_stage,
    pretrain,
)

with quiet_megatron_import():
    import torch
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.enums import ModelType
    from megatron.core.models.gpt import GPTModel
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.utils import get_attr_wrapped_model
    from torch import Tensor

Batch = dict[str, Tensor | None]


def model_provider(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    pg_collection: ProcessGroupCollection | None = None,
) -> GPTModel:
    """Build one chunk of the model."""
    args = get_args()
    config = core_transformer_config_from_args(args)
    return GPTModel(
        config=config,
        transformer_layer_spec=gpt_layer_spec(args, config.num_layers),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        pg_collection=pg_collection,
        vp_stage=vp_stage,
    )


def train_valid_test_datasets_provider(
    train_val_test_num_samples: Sequence[int],
) -> list[GPTDataset | None]:
    """Open the packed samples of each part of which some are wanted."""
    args = get_args()
    wanted = [number > 0 for number in train_val_test_num_samples]
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    if blend_per_split is not None:
        blend_per_split = [
            own if w else None for own, w in zip(blend_per_split, wanted, strict=True)
        ]
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        path_to_cache=args.data_cache_path,
        tokenizer=get_tokenizer(),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
    )
    if config.split_matrix is not None:
        # The builder would make the other parts too, which may be empty.
        parts = zip(config.split_matrix, wanted, strict=True)
        config.split_matrix = [part if is_wanted else None for part, is_wanted in parts]
    return BlendedMegatronDatasetBuilder(
        GPTDataset, train_val_test_num_samples, lambda: True, config
    ).build()


def get_batch(data_iterator: Iterator[Any], vp_stage: int | None) -> Batch:
    """The microbatch; only the chunks at the model's ends look at data."""
    if not is_first_or_last_pipeline_stage(vp_stage):
        return {}
    return get_batch_on_this_tp_rank(data_iterator)


def loss_func(loss_mask: Tensor, output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The mean loss over the tokens that count; the second value is what is reported."""
    mask = loss_mask.view(-1).float()
    loss = torch.sum(output.view(-1).float() * mask) / mask.sum()
    return loss, {"lm loss": loss.detach().clone()}


def forward_step(data_iterator: Iterator[Any], model: GPTModel) -> tuple[Tensor, partial[Any]]:
    """Run one microbatch through one chunk."""
    batch = get_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
    output = model(
        batch.get("tokens"),
        batch.get("position_ids"),
        batch.get("attention_mask"),  # causal where there is none
        labels=batch.get("labels"),
    )
    return output, partial(loss_func, batch.get("loss_mask"))


if __name__ == "__main__":
    pretrain(
        train_valid_test_datasets_provider,
        model_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        args_defaults={"tokenizer_type": "GPT2BPETokenizer"},
    )
