"""The options of a run as the one flat namespace that Megatron's scripts know as ``args``."""

import argparse
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch

from megatron_bamboo.config import Layout, Options, PrecisionOptions
from megatron_bamboo.data.tokenizer import padded_vocab_size

# What Megatron-LM's own scripts look up and is the same in every run here.
_ALWAYS: Mapping[str, Any] = {
    "fp8": None,
    "accumulate_allreduce_grads_in_fp32": True,
    "fp16_lm_cross_entropy": False,
    "iteration": 0,
    "consumed_train_samples": 0,
    "consumed_valid_samples": 0,
    "train_samples": None,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "num_experts": None,
    "moe_grouped_gemm": False,
    "moe_use_legacy_grouped_gemm": False,
    "multi_latent_attention": False,
    "qk_layernorm": False,
    "mtp_num_layers": None,
    "rotary_base": 10000,
    "rotary_percent": 1.0,
    "rotary_seq_len_interpolation_factor": None,
    "use_rope_scaling": False,
    "rope_scaling_factor": 8.0,
    "spec": None,
    "use_legacy_models": False,
    "heterogeneous_layers_config_path": None,
    "check_for_nan_in_loss_and_grad": False,
    "check_for_spiky_loss": False,
    "log_interval": 1,
    "log_throughput": False,
    "mock_data": False,
    "sft": False,
    "fim_data": False,
    "data_args_path": None,
    "per_split_data_args_path": None,
    "reset_position_ids": False,
    "reset_attention_mask": False,
    "eod_mask_loss": False,
    "create_attention_mask_in_dataloader": False,
    "dataloader_type": "single",
    "num_dataset_builder_threads": 1,
    "num_workers": 0,
    "mmap_bin_files": True,
    "s3_cache_path": None,
    "object_storage_cache_path": None,
    "mid_level_dataset_surplus": 0.005,
    "full_validation": False,
    "multiple_validation_sets": False,
}


_BLENDS = ("data_path", "train_data_path", "valid_data_path", "test_data_path")


def _as_blend(prefix: str | None) -> list[str] | None:
    """Megatron's form: a blend of several, here always of one."""
    return [prefix] if prefix else None


def dtype_of(precision: PrecisionOptions) -> torch.dtype:
    """What parameters and activations are kept in."""
    if precision.bf16:
        return torch.bfloat16
    return torch.float16 if precision.fp16 else torch.float32


def make_args(
    options: Options, layout: Layout, vocab_size: int, extras: Mapping[str, Any]
) -> argparse.Namespace:
    """All options by Megatron's names, what follows from them, and the script's own.

    Args:
        vocab_size: of the tokenizer.
        extras: what the script's ``extra_args_provider`` added.
    """
    groups = [getattr(options, field.name) for field in fields(options)]
    values = {field.name: getattr(group, field.name) for group in groups for field in fields(group)}
    pipelines = layout.arrangement.pipelines
    chunks = pipelines[0].num_chunks
    stages = max(pipeline.num_stages for pipeline in pipelines)
    values |= {
        "params_dtype": dtype_of(options.precision),
        "ffn_hidden_size": options.model.feed_forward_size,
        "eval_iters": options.evaluation.num_batches,
        **{name: _as_blend(getattr(options.data, name)) for name in _BLENDS},
        "split": options.data.split if options.data.data_path else None,
        "global_batch_size": layout.global_batch_size,
        "padded_vocab_size": padded_vocab_size(
            vocab_size, options.model.make_vocab_size_divisible_by, layout.tensor_size
        ),
        "virtual_pipeline_model_parallel_size": chunks if chunks > 1 else None,
        "transformer_pipeline_model_parallel_size": stages,
        "data_parallel_size": len(pipelines),
        "world_size": layout.arrangement.num_nodes * layout.tensor_size,
        "encoder_num_layers": options.model.num_layers,
        "encoder_seq_length": options.data.seq_length,
    }
    return argparse.Namespace(**{**_ALWAYS, **values, **extras})
