"""A script as Megatron-LM's users have it; for this project only one import was changed.

It differs from the product's own script where theirs do: layers from Megatron-core's own spec
function, groups from ``mpu``, timers, a flag of its own, a loss that comes with its number of
tokens, data that are built on some ranks only, a model class that adds a module.
"""

from functools import partial

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import (
    BlendedMegatronDatasetBuilder,
)
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.utils import get_attr_wrapped_model

from megatron_bamboo.training import (
    core_transformer_config_from_args,
    get_args,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
    get_blend_and_blend_per_split,
    get_timers,
    get_tokenizer,
    pretrain,
    print_rank_0,
)


class ScaledGPT(GPTModel):
    """Ends in a module of its own."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if self.post_process:
            self.out_scale = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Dropout(0.5))

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        return self.out_scale(output.unsqueeze(-1)).squeeze(-1) if self.post_process else output


def add_args(parser):
    group = parser.add_argument_group("scaled GPT")
    group.add_argument("--loss-weight", type=float, default=1.0)
    return parser


def model_provider(pre_process=True, post_process=True, vp_stage=None):
    args = get_args()
    print_rank_0("building GPT model ...")
    return ScaledGPT(
        config=core_transformer_config_from_args(args),
        transformer_layer_spec=get_gpt_layer_local_spec(args.num_experts, args.qk_layernorm),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        vp_stage=vp_stage,
    )


def get_batch(data_iterator, vp_stage=None):
    if not mpu.is_pipeline_first_stage(
        ignore_virtual=False, vp_stage=vp_stage
    ) and not mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage):
        return None, None, None, None, None
    batch = get_batch_on_this_tp_rank(data_iterator)
    return get_batch_on_this_cp_rank(batch).values()


def loss_func(loss_mask, output_tensor):
    losses = output_tensor.view(-1).float()
    loss_mask = loss_mask.view(-1).float()
    loss = get_args().loss_weight * torch.sum(losses * loss_mask)
    num_tokens = loss_mask.sum().clone().detach().to(torch.int)
    reporting_loss = torch.cat([loss.clone().detach().view(1), num_tokens.view(1)])
    return loss, num_tokens, {"lm loss": reporting_loss}


def forward_step(data_iterator, model):
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    vp_stage = get_attr_wrapped_model(model, "vp_stage")
    tokens, labels, loss_mask, attention_mask, position_ids = get_batch(data_iterator, vp_stage)
    timers("batch-generator").stop()
    output_tensor = model(tokens, position_ids, attention_mask, labels=labels)
    return output_tensor, partial(loss_func, loss_mask)


def is_dataset_built_on_rank():
    return (
        mpu.is_pipeline_first_stage() or mpu.is_pipeline_last_stage()
    ) and mpu.get_tensor_model_parallel_rank() == 0


def core_gpt_dataset_config_from_args(args):
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    return GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=get_tokenizer(),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
    )


def train_valid_test_datasets_provider(train_val_test_num_samples):
    print_rank_0("> building train, validation, and test datasets for GPT ...")
    return BlendedMegatronDatasetBuilder(
        GPTDataset,
        train_val_test_num_samples,
        is_dataset_built_on_rank,
        core_gpt_dataset_config_from_args(get_args()),
    ).build()


if __name__ == "__main__":
    train_valid_test_datasets_provider.is_distributed = True
    pretrain(
        train_valid_test_datasets_provider,
        model_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        args_defaults={"tokenizer_type": "GPT2BPETokenizer"},
        extra_args_provider=add_args,
    )
