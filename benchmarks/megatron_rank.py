"""One rank of a training by Megatron-core alone: its schedule, P2P, DDP, optimizer, global state.

Only the initial weights and the text come from the product. What a rank does is what Megatron-LM's
``pretrain`` does with a GPT on a pipeline, over gloo and on a CPU. The parity tests compare its
bits with the product's, ``throughput.py`` its times.
"""

import os
from collections.abc import Callable, Iterator, Sequence
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
    optimizer,
)
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.schedules import (
    forward_backward_no_pipelining,
    forward_backward_pipelining_with_interleaving,
    forward_backward_pipelining_without_interleaving,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor, nn
from user_script import forward_step

from megatron_bamboo.config import Layout, Options
from megatron_bamboo.data.gpt_dataset import read_microbatch
from megatron_bamboo.data.tokenizer import GPT2BPETokenizer
from megatron_bamboo.evaluation.due import Evaluation, Kind
from megatron_bamboo.execution import local_groups
from megatron_bamboo.model import cpu
from megatron_bamboo.model.gpt import ChunkPlace, Recipe, build_chunk, places_of_stage, units_of
from megatron_bamboo.model.randomness import DropoutSeeds
from megatron_bamboo.planner.arrangement import PipelineShape
from megatron_bamboo.script.args import dtype_of, make_args
from megatron_bamboo.script.data import open_data, prepare_data
from megatron_bamboo.script.providers import ForwardStepFunc
from megatron_bamboo.script.state import begin, get_args
from pretrain_gpt_bamboo import model_provider, train_valid_test_datasets_provider

RENDEZVOUS_SECONDS = 60


def begin_script(options: Options, layout: Layout) -> None:
    """Set what the product's own script asks for: its weights and its data are used here."""
    tokenizer = GPT2BPETokenizer(options.data.vocab_file, options.data.merge_file)
    begin(make_args(options, layout, tokenizer.vocab_size, {}), tokenizer)


def build_indices(options: Options, layout: Layout) -> None:
    """Build the indices of the data, as the product's prepare phase does."""
    begin_script(options, layout)
    prepare_data(train_valid_test_datasets_provider, options, layout)


class MegatronRank:
    """A rank that trains; its process does nothing else.

    Args:
        rendezvous: where the ranks find each other; a file that is not there yet.
        group_size: how many microbatches go through a chunk in a row, if it is not Megatron's
            default, the number of stages.
        is_patched: whether another schedule stands in for Megatron's own.
    """

    def __init__(
        self,
        options: Options,
        layout: Layout,
        rank: int,
        rendezvous: Path,
        group_size: int | None = None,
        is_patched: bool = False,
    ) -> None:
        if not dist.is_initialized():  # else this process has trained the same layout before
            _start_megatron(layout, rank, rendezvous)
        begin_script(options, layout)
        self._options = options
        self._layout = layout
        self.stage = parallel_state.get_pipeline_model_parallel_rank()
        self.pipeline = parallel_state.get_data_parallel_rank()
        self._places = places_of_stage(self.stage, _shape(layout))
        config = _config(options, layout, group_size)
        self.model = [
            _build_chunk(config, options, place, c) for c, place in enumerate(self._places)
        ]
        self.optimizer, self._scheduler = _build_optimizer(
            options, self.model, layout.global_batch_size
        )
        for chunk in self.model:
            chunk.config.grad_scale_func = self.optimizer.scale_loss
        self._data = open_data(train_valid_test_datasets_provider, options, layout)
        self._forward_backward = get_forward_backward_func()
        assert is_patched or self._forward_backward is _schedule_of(layout)

    def forward_backward(
        self, step: int, forward_step_func: ForwardStepFunc = forward_step
    ) -> list[Any]:
        """A step's forward and backward passes, its reduction included.

        Returns what the loss function reported, by microbatch, on the last stage; an empty list
        elsewhere.
        """
        for chunk in self.model:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        reports: list[Any] = self._forward_backward(
            forward_step_func=forward_step_func,
            data_iterator=[self._microbatches(step) for _ in self.model],
            model=self.model,
            num_microbatches=_shape(self._layout).num_microbatches,
            seq_length=self._options.data.seq_length,
            micro_batch_size=self._options.training.micro_batch_size,
        )
        return reports

    def evaluate(self, evaluation: Evaluation, batch: int) -> list[Any]:
        """Forward passes alone of one of its global batches, as in Megatron-LM's ``evaluate``; what
        was reported, by microbatch, on the last stage."""
        for chunk in self.model:
            chunk.eval()
        with torch.no_grad():
            reports: list[Any] = self._forward_backward(
                forward_step_func=forward_step,
                data_iterator=[self._evaluated(evaluation, batch) for _ in self.model],
                model=self.model,
                num_microbatches=_shape(self._layout).num_microbatches,
                seq_length=self._options.data.seq_length,
                micro_batch_size=self._options.training.micro_batch_size,
                forward_only=True,
            )
        for chunk in self.model:
            chunk.train()
        return reports

    @property
    def has_test(self) -> bool:
        """Whether there are samples for a test."""
        return self._data.test is not None

    def apply(self) -> bool:
        """Clip, and let the optimizer take the step; whether it did, and no gradient overflowed."""
        was_applied, _norm, _zeros = self.optimizer.step()
        if was_applied:
            self._scheduler.step(increment=self._layout.global_batch_size)
        return bool(was_applied)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The stage's parameters, named by unit as the product names them."""
        for chunk, place in zip(self.model, self._places, strict=True):
            yield from _named(
                get_attr_wrapped_model(chunk, "decoder", return_model_obj=True), place
            )

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the stage's state as ``unit/parameter/kind``."""
        (inner,) = self.optimizer.chained_optimizers
        for name, parameter in self.named_parameters():
            yield f"{name}/parameter", parameter.detach()
            main = getattr(parameter, "main_param", None)
            if main is not None:
                yield f"{name}/main", main
            stepped = parameter if main is None else main
            for kind, value in inner.optimizer.state[stepped].items():
                yield f"{name}/{kind}", torch.as_tensor(value)

    def _microbatches(self, step: int) -> Iterator[dict[str, Tensor]]:
        yield from self._read(self._data.train, step - 1)

    def _evaluated(self, evaluation: Evaluation, batch: int) -> Iterator[dict[str, Tensor]]:
        is_test = evaluation.kind is Kind.TEST
        dataset = self._data.test if is_test else self._data.validation
        yield from self._read(dataset, evaluation.first_batch + batch)

    def _read(self, dataset: Any, batch: int) -> Iterator[dict[str, Tensor]]:
        """As Megatron's sequential sampler deals them out."""
        size = self._options.training.micro_batch_size
        arrangement = self._layout.arrangement
        for microbatch in arrangement.global_microbatches(self.pipeline):
            number = batch * arrangement.total_microbatches + microbatch
            yield read_microbatch(dataset, range(number * size, (number + 1) * size))


def _schedule_of(layout: Layout) -> Callable[..., Any]:
    """The function of Megatron-core that trains this layout."""
    if _shape(layout).num_stages == 1:
        return forward_backward_no_pipelining
    if _shape(layout).num_chunks == 1:
        return forward_backward_pipelining_without_interleaving
    return forward_backward_pipelining_with_interleaving


def _shape(layout: Layout) -> PipelineShape:
    """Megatron's pipelines are all alike."""
    return layout.arrangement.pipelines[0]


def _num_chunks(layout: Layout) -> int | None:
    number = _shape(layout).num_chunks
    return number if number > 1 else None


def _start_megatron(layout: Layout, rank: int, rendezvous: Path) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    cpu.install()
    # Megatron's own takes CUDA tensors alone.
    optimizer.clip_grad_by_total_norm_fp32 = _clip
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=layout.arrangement.num_nodes,
        timeout=timedelta(seconds=RENDEZVOUS_SECONDS),
    )
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=_shape(layout).num_stages,
        virtual_pipeline_model_parallel_size=_num_chunks(layout),
        create_gloo_process_groups=False,
    )
    model_parallel_cuda_manual_seed(1234)


def _clip(
    parameters: Sequence[nn.Parameter],
    max_norm: float,
    total_norm: float,
    use_decoupled_grad: bool = False,
) -> None:
    assert not use_decoupled_grad
    if max_norm / (total_norm + 1e-6) >= 1.0:
        return
    nn.utils.clip_grads_with_norm_(parameters, max_norm, torch.tensor(total_norm))


def _build_chunk(
    config: TransformerConfig, options: Options, place: ChunkPlace, number: int
) -> DistributedDataParallel:
    model = options.model
    chunk = None if config.virtual_pipeline_model_parallel_size is None else number
    module = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=get_args().padded_vocab_size,
        max_sequence_length=model.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=chunk),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=chunk),
        share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
        vp_stage=chunk,
    )
    _copy_initial_weights(module, options, place)
    if config.bf16 or config.fp16:
        module = Float16Module(config, module)
    ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    return DistributedDataParallel(config, ddp_config, module)


def _config(options: Options, layout: Layout, group_size: int | None) -> TransformerConfig:
    model, dtype = options.model, dtype_of(options.precision)
    return TransformerConfig(
        bf16=options.precision.bf16,
        fp16=options.precision.fp16,
        params_dtype=dtype,
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        attention_dropout=model.attention_dropout,
        hidden_dropout=model.hidden_dropout,
        pipeline_model_parallel_size=_shape(layout).num_stages,
        virtual_pipeline_model_parallel_size=_num_chunks(layout),
        microbatch_group_size_per_vp_stage=group_size,
        pipeline_dtype=dtype,
        batch_p2p_comm=False,
        use_cpu_initialization=True,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        cuda_graph_scope=[],
        finalize_model_grads_func=finalize_model_grads,
    )


def _copy_initial_weights(module: GPTModel, options: Options, place: ChunkPlace) -> None:
    alone = ProcessGroupCollection()
    for name in local_groups._MEMBERSHIPS:
        setattr(alone, name, parallel_state.get_tensor_model_parallel_group())
    dropout = DropoutSeeds(options.training.seed)
    source = build_chunk(Recipe.of(options, model_provider, alone, dropout), place)
    weights = dict(_named(source, place))
    with torch.no_grad():
        for name, parameter in _named(module, place):
            parameter.copy_(weights.pop(name))
    assert not weights, f"Megatron's stage has no {sorted(weights)}"


def _build_optimizer(
    options: Options, model: list[DistributedDataParallel], batch: int
) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
    chosen, train_iters = options.optimizer, options.training.train_iters
    precision = options.precision
    config = OptimizerConfig(
        optimizer="adam",
        bf16=precision.bf16,
        fp16=precision.fp16,
        params_dtype=dtype_of(precision),
        loss_scale=precision.loss_scale,
        initial_loss_scale=precision.initial_loss_scale,
        min_loss_scale=precision.min_loss_scale,
        loss_scale_window=precision.loss_scale_window,
        hysteresis=precision.hysteresis,
        lr=chosen.lr,
        min_lr=chosen.min_lr,
        weight_decay=chosen.weight_decay,
        adam_beta1=chosen.adam_beta1,
        adam_beta2=chosen.adam_beta2,
        adam_eps=chosen.adam_eps,
        clip_grad=chosen.clip_grad,
    )
    overrides = get_standard_config_overrides(config)
    made = get_megatron_optimizer(config, model, overrides, use_gloo_process_groups=False)
    scheduler = OptimizerParamScheduler(
        made,
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
    return made, scheduler


def _named(chunk: GPTModel, place: ChunkPlace) -> Iterator[tuple[str, nn.Parameter]]:
    for unit, parts in units_of(chunk, place).items():
        for name, parameter in parts.named_parameters():
            yield f"{unit}/{name}", parameter
