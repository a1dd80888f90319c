"""A training loop of one's own that outlives losses: each step is wrapped in the recovery hook.

bamboo run --nodes 4 examples/own_loop.py FLAGS    (the flags of pretrain_gpt_bamboo.py)
"""

import time
from functools import partial

import torch
import torch.distributed as dist
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.parallel_state import get_pipeline_model_parallel_group

from megatron_bamboo import training


def make_model(pre_process=True, post_process=True, vp_stage=None, pg_collection=None):
    args = training.get_args()
    config = training.core_transformer_config_from_args(args)
    sizes = args.padded_vocab_size, args.max_position_embeddings
    layers = training.gpt_layer_spec(args, config.num_layers)
    is_tied = not args.untie_embeddings_and_output_weights
    more = {"share_embeddings_and_output_weights": is_tied, "pg_collection": pg_collection}
    return GPTModel(config, layers, *sizes, pre_process, post_process, vp_stage=vp_stage, **more)


def make_datasets(num_samples):
    args = training.get_args()
    names = ("split", "reset_position_ids", "reset_attention_mask", "eod_mask_loss")
    config = GPTDatasetConfig(
        args.seed,
        args.seq_length,
        blend=training.get_blend_and_blend_per_split(args)[0],
        path_to_cache=args.data_cache_path,
        tokenizer=training.get_tokenizer(),
        **{name: getattr(args, name) for name in names},
    )
    return BlendedMegatronDatasetBuilder(GPTDataset, num_samples, lambda: True, config).build()


def forward_step(data_iterator, model):
    batch = training.get_batch_on_this_tp_rank(data_iterator)
    inputs = (batch[name] for name in ("tokens", "position_ids", "attention_mask"))
    output = model(*inputs, labels=batch["labels"])
    return output, partial(mean_loss, batch["loss_mask"].view(-1).float())


def mean_loss(mask, output):
    loss = torch.sum(output.view(-1).float() * mask) / mask.sum()
    return loss, {"lm loss": loss.detach().clone()}


def slowest(seconds, groups):
    dist.all_reduce(seconds, dist.ReduceOp.MAX, get_pipeline_model_parallel_group())
    for group in groups.data:
        dist.all_reduce(seconds, dist.ReduceOp.MAX, group)
    return seconds.item()


def train(hook):
    for step in hook.steps():
        start = time.monotonic()
        after = hook.step(hook.as_megatron_does)  # or what you make of forward_backward_func
        if after.is_changed:
            print(f"epoch {after.plan.epoch}: {after.plan.reason}; on with {after.next_step}")
        seconds = hook.together(partial(slowest, torch.tensor(time.monotonic() - start)))
        if seconds is not None:
            print(f"step {step} took {seconds:.3f} s, on {after.groups.pipeline.size()} nodes")


if __name__ == "__main__":
    training.train(train, make_datasets, make_model, forward_step)
