"""The same training by Megatron-core alone: its schedule, P2P, DDP, optimizer and global state.

Only the initial weights and the text come from the product. Each rank is a process; ``train_rank``
does what Megatron-LM's ``pretrain`` does with a GPT on a pipeline.
"""

import os
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import (
    MegatronOptimizer,
    OptimizerConfig,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.schedules import (
    forward_backward_pipelining_with_interleaving,
    forward_backward_pipelining_without_interleaving,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from torch import nn
from trained_stages import Job, StageTensors, save_stage
from user_script import forward_step

from megatron_bamboo.config import Layout, ModelOptions, Options
from megatron_bamboo.data.gpt_dataset import TrainDataOptions, build_train_dataset, collate
from megatron_bamboo.data.tokenizer import GPT2BPETokenizer, padded_vocab_size
from megatron_bamboo.execution import local_groups
from megatron_bamboo.model import cpu
from megatron_bamboo.model.gpt import ChunkPlace, build_chunk, places_of_stage, units_of
from megatron_bamboo.model.randomness import DropoutSeeds

RENDEZVOUS_SECONDS = 60
SCHEDULES = (
    forward_backward_pipelining_without_interleaving,
    forward_backward_pipelining_with_interleaving,
)


def train_rank(job: Job, rank: int, result: Path) -> None:
    """Train as one rank, and leave this rank's stage in the folder ``result``."""
    _start_megatron(job, rank)
    options, layout = job.options()
    stage = parallel_state.get_pipeline_model_parallel_rank()
    pipeline = parallel_state.get_data_parallel_rank()
    places = places_of_stage(stage, layout, options.model.num_layers)
    model = [_build_chunk(options, layout, place, c) for c, place in enumerate(places)]
    optimizer, scheduler = _build_optimizer(options, model, layout.global_batch_size)
    for chunk in model:
        chunk.config.grad_scale_func = optimizer.scale_loss
    dataset = _build_dataset(options, layout.global_batch_size)
    forward_backward = get_forward_backward_func()
    assert forward_backward is SCHEDULES[job.num_chunks > 1]

    tensors: StageTensors = {}
    for step in range(1, options.training.train_iters + 1):
        for chunk in model:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        reports = forward_backward(
            forward_step_func=forward_step,
            data_iterator=[_microbatches(job, options, dataset, step, pipeline) for _ in model],
            model=model,
            num_microbatches=job.num_microbatches,
            seq_length=options.data.seq_length,
            micro_batch_size=options.training.micro_batch_size,
        )
        for microbatch, report in enumerate(reports):
            number = job.global_microbatch(microbatch, pipeline)
            tensors[f"loss/{step}/{number}"] = report["lm loss"].clone()
        for name, parameter in _all_named(model, places):
            tensors[f"gradient/{step}/{name}"] = parameter.main_grad.clone()
        was_applied, _norm, _zeros = optimizer.step()
        assert was_applied
        scheduler.step(increment=layout.global_batch_size)
    tensors |= _state(model, places, optimizer)
    save_stage(result, pipeline, stage, tensors)
    dist.barrier()


def _start_megatron(job: Job, rank: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    cpu.install()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{job.folder}/rendezvous",
        rank=rank,
        world_size=job.num_workers,
        timeout=timedelta(seconds=RENDEZVOUS_SECONDS),
    )
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=job.num_stages,
        virtual_pipeline_model_parallel_size=job.num_chunks if job.num_chunks > 1 else None,
        create_gloo_process_groups=False,
    )
    model_parallel_cuda_manual_seed(1234)


def _build_chunk(
    options: Options, layout: Layout, place: ChunkPlace, number: int
) -> DistributedDataParallel:
    model, vocab_size = options.model, _vocab_size(options)
    config = _config(model, layout)
    chunk = number if layout.num_chunks > 1 else None
    module = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=vocab_size,
        max_sequence_length=model.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=chunk),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=chunk),
        share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
        vp_stage=chunk,
    )
    _copy_initial_weights(module, options, place, vocab_size)
    return DistributedDataParallel(config, DistributedDataParallelConfig(), module)


def _config(model: ModelOptions, layout: Layout) -> TransformerConfig:
    return TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        attention_dropout=model.attention_dropout,
        hidden_dropout=model.hidden_dropout,
        pipeline_model_parallel_size=layout.num_stages,
        virtual_pipeline_model_parallel_size=layout.num_chunks if layout.num_chunks > 1 else None,
        pipeline_dtype=torch.float32,
        batch_p2p_comm=False,
        use_cpu_initialization=True,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        cuda_graph_scope=[],
        finalize_model_grads_func=finalize_model_grads,
    )


def _copy_initial_weights(
    module: GPTModel, options: Options, place: ChunkPlace, vocab_size: int
) -> None:
    alone = ProcessGroupCollection()
    for name in local_groups._MEMBERSHIPS:
        setattr(alone, name, parallel_state.get_tensor_model_parallel_group())
    seed = options.training.seed
    source = build_chunk(
        options.model, options.parallel, place, vocab_size, seed, alone, DropoutSeeds(seed)
    )
    weights = dict(_named(source, place))
    with torch.no_grad():
        for name, parameter in _named(module, place):
            parameter.copy_(weights.pop(name))
    assert not weights, f"Megatron's stage has no {sorted(weights)}"


def _build_optimizer(
    options: Options, model: list[DistributedDataParallel], batch: int
) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
    chosen, train_iters = options.optimizer, options.training.train_iters
    config = OptimizerConfig(
        optimizer="adam",
        lr=chosen.lr,
        min_lr=chosen.min_lr,
        weight_decay=chosen.weight_decay,
        adam_beta1=chosen.adam_beta1,
        adam_beta2=chosen.adam_beta2,
        adam_eps=chosen.adam_eps,
        clip_grad=chosen.clip_grad,
    )
    overrides = get_standard_config_overrides(config)
    optimizer = get_megatron_optimizer(config, model, overrides, use_gloo_process_groups=False)
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=chosen.lr_warmup_init,
        max_lr=chosen.lr,
        min_lr=chosen.min_lr,
        lr_warmup_steps=chosen.lr_warmup_iters * batch,
        lr_decay_steps=train_iters * batch,
        lr_decay_style=chosen.lr_decay_style,
        start_wd=chosen.weight_decay,
        end_wd=chosen.weight_decay,
        wd_incr_steps=train_iters * batch,
        wd_incr_style="constant",
    )
    return optimizer, scheduler


def _tokenizer(options: Options) -> GPT2BPETokenizer:
    return GPT2BPETokenizer(options.data.vocab_file, options.data.merge_file)


def _vocab_size(options: Options) -> int:
    size = _tokenizer(options).vocab_size
    return padded_vocab_size(size, options.model.make_vocab_size_divisible_by)


def _build_dataset(options: Options, batch: int) -> Any:
    data = TrainDataOptions(
        data_path=options.data.data_path,
        sequence_length=options.data.seq_length,
        seed=options.training.seed,
        num_samples=options.training.train_iters * batch,
        split=options.data.split,
        cache_path=options.data.data_cache_path,
    )
    return build_train_dataset(data, _tokenizer(options))


def _microbatches(
    job: Job, options: Options, dataset: Any, step: int, pipeline: int
) -> Iterator[dict[str, torch.Tensor]]:
    """As Megatron's sequential sampler deals them out."""
    size = options.training.micro_batch_size
    per_step = job.num_microbatches * job.num_pipelines
    for microbatch in range(job.num_microbatches):
        number = (step - 1) * per_step + job.global_microbatch(microbatch, pipeline)
        yield collate(dataset[index] for index in range(number * size, (number + 1) * size))


def _named(model: nn.Module, place: ChunkPlace) -> Iterator[tuple[str, nn.Parameter]]:
    chunk = model.module if isinstance(model, DistributedDataParallel) else model
    for unit, parts in units_of(chunk, place).items():
        for name, parameter in parts.named_parameters():
            yield f"{unit}/{name}", parameter


def _all_named(
    model: Sequence[nn.Module], places: Sequence[ChunkPlace]
) -> Iterator[tuple[str, nn.Parameter]]:
    for chunk, place in zip(model, places, strict=True):
        yield from _named(chunk, place)


def _state(
    model: Sequence[nn.Module], places: Sequence[ChunkPlace], optimizer: MegatronOptimizer
) -> StageTensors:
    (inner,) = optimizer.chained_optimizers
    tensors: StageTensors = {}
    for name, parameter in _all_named(model, places):
        tensors[f"state/{name}/parameter"] = parameter.detach()
        for kind, value in inner.optimizer.state[parameter].items():
            tensors[f"state/{name}/{kind}"] = torch.as_tensor(value)
    return tensors
