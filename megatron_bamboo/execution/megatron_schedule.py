"""This project's schedule in a training loop of Megatron's own: no replicas, no takeover.

Megatron's groups, DDP, optimizer and loop stay as they are; in place of its hand-written pipeline
schedules the same list of actions is executed that the product executes, so that any number of
microbatches can be interleaved. With the shapes that Megatron accepts the bits are Megatron's.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
from megatron.core.pipeline_parallel.schedules import (
    backward_step,
    deallocate_output_tensor,
    forward_step,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.utils import get_model_config
from torch import Tensor, nn

from megatron_bamboo.execution.stage_links import StageLinks, links_over
from megatron_bamboo.model.place import set_current_chunk
from megatron_bamboo.schedule.actions import Action, Op
from megatron_bamboo.schedule.generate import compute_schedule
from megatron_bamboo.schedule.lower import lower
from megatron_bamboo.script.providers import ForwardStepFunc

_FORWARD_OPS = frozenset({Op.F, Op.SEND_F, Op.RECV_F})
_GROUPS = ("tp", "cp", "pp", "embd", "pos_embd", "dp_cp")
# What Megatron's schedules do when these are set, and this one does not.
_REFUSED_CONFIG = (
    "variable_seq_lengths",
    "num_microbatches_with_partial_activation_checkpoints",
    "defer_embedding_wgrad_compute",
    "overlap_moe_expert_parallel_comm",
    "fine_grained_activation_offloading",
)


class MegatronSchedule:
    """Stands in for what Megatron-core's ``get_forward_backward_func`` returns.

    Args:
        timeout: the longest wait for a neighbour's message.
    """

    def __init__(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def __call__(
        self,
        *,
        forward_step_func: ForwardStepFunc,
        data_iterator: Any,
        model: Any,
        num_microbatches: int,
        seq_length: int,
        micro_batch_size: int,
        decoder_seq_length: int | None = None,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
        first_val_step: bool | None = None,
        adjust_tensor_shapes_fn: None = None,
        p2p_communicator: Any = None,
        pg_collection: ProcessGroupCollection | None = None,
        force_all_reduce: bool = False,
    ) -> list[Any]:
        """Run all forward and backward passes of the microbatches, and reduce the gradients.

        Args:
            model: a chunk, or with interleaving the list of this stage's.
            data_iterator: an iterator, or with interleaving a list of one for each chunk.
            p2p_communicator: not used; messages go over channels of their own.

        Returns what the loss function reported, by microbatch, on the last stage; an empty list
        elsewhere.

        Raises:
            ValueError: for what this schedule does not do, before any work.
            ConnectionError: a neighbour is gone, or its message did not come in time.
        """
        chunks = model if isinstance(model, list) else [model]
        config = get_model_config(chunks[0])
        _check(config, seq_length, decoder_seq_length, adjust_tensor_shapes_fn)
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(list(_GROUPS))
        one = _Pass(
            forward_step_func=forward_step_func,
            data=data_iterator if isinstance(data_iterator, list) else [data_iterator],
            chunks=chunks,
            config=config,
            num_microbatches=num_microbatches,
            forward_only=forward_only,
            collect_non_loss_data=collect_non_loss_data,
            # As Megatron's check_first_val_step().
            may_be_first=first_val_step is not False or not forward_only,
            cp_size=groups.cp.size(),
            links=links_over(groups.pp, self._timeout),
        )
        with _timed(config):
            one.run(_activation_size(config, groups, seq_length, micro_batch_size))
            if config.finalize_model_grads_func is not None and not forward_only:
                config.finalize_model_grads_func(
                    chunks,
                    one.num_tokens if config.calculate_per_token_loss else None,
                    pg_collection=groups,
                    force_all_reduce=force_all_reduce,
                )
        return one.reports


class _Pass:
    """One call: the forward and backward passes of one stage."""

    def __init__(
        self,
        forward_step_func: ForwardStepFunc,
        data: list[Iterator[Any]],
        chunks: list[nn.Module],
        config: TransformerConfig,
        num_microbatches: int,
        forward_only: bool,
        collect_non_loss_data: bool,
        may_be_first: bool,
        cp_size: int,
        links: StageLinks,
    ) -> None:
        self._forward_step_func = forward_step_func
        self._data = data
        self._chunks = chunks
        self._config = config
        self._num_microbatches = num_microbatches
        self._forward_only = forward_only
        self._collect_non_loss_data = collect_non_loss_data
        self._may_be_first = may_be_first
        self._cp_size = cp_size
        self._links = links
        schedule = compute_schedule(links.num_stages, len(chunks), num_microbatches)
        self._schedule = lower(schedule)
        self._saved: dict[Action, tuple[Tensor | None, Tensor]] = {}
        self._to_send: dict[Action, Tensor] = {}
        self._received: dict[Action, Tensor] = {}
        self.reports: list[Any] = []
        self.num_tokens = torch.zeros([], dtype=torch.int, device=torch.cuda.current_device())

    def run(self, size: tuple[int, ...]) -> None:
        """Run the stage's program; messages are of the size given."""
        program = [
            action
            for action in self._schedule.programs[self._links.stage]
            if not self._forward_only or action.op in _FORWARD_OPS
        ]
        perform: dict[Op, Callable[[Action], None]] = {
            Op.F: self._forward,
            Op.B: self._backward,
            Op.SEND_F: self._send,
            Op.SEND_B: self._send,
            Op.RECV_F: self._receive,
            Op.RECV_B: self._receive,
        }
        self._links.begin(program, size, self._config.pipeline_dtype)
        for action in program:
            perform[action.op](action)
        self._links.finish()

    def _forward(self, action: Action) -> None:
        chunk = self._chunk(action)
        input_tensor = self._received.pop(action.with_op(Op.RECV_F), None)
        if input_tensor is not None:
            input_tensor.requires_grad_()
        is_last = self._schedule.downstream(action, Op.F) is None
        set_current_chunk(chunk, len(self._chunks))
        output, num_tokens = forward_step(
            self._forward_step_func,
            self._data[chunk],
            self._chunks[chunk],
            self._num_microbatches,
            input_tensor,
            self.reports,
            self._config,
            self._cp_size,
            collect_non_loss_data=self._collect_non_loss_data,
            is_first_microbatch=self._may_be_first and action.microbatch == 0,
            current_microbatch=action.microbatch,
            vp_stage=chunk if len(self._chunks) > 1 else None,
            is_last_stage=is_last,
        )
        self.num_tokens += num_tokens
        if not is_last:
            # It shares the output's memory, which lives until it is sent.
            self._to_send[action.with_op(Op.SEND_F)] = output.detach().contiguous()
        if not self._forward_only:
            self._saved[action] = (input_tensor, output)
            if not is_last:
                deallocate_output_tensor(output, self._config.deallocate_pipeline_outputs)

    def _backward(self, action: Action) -> None:
        input_tensor, output = self._saved.pop(action.with_op(Op.F))
        gradient = self._received.pop(action.with_op(Op.RECV_B), None)
        chunk = self._chunk(action)
        set_current_chunk(chunk, len(self._chunks))
        is_last = action.microbatch == self._num_microbatches - 1
        sync = _of_chunk(self._config.grad_sync_func, chunk)
        with nullcontext() if is_last and sync is None else self._no_sync(chunk):
            # The model type has meant nothing since Megatron gave up encoder stages.
            input_gradient = backward_step(input_tensor, output, gradient, None, self._config)
        if is_last and sync is not None:
            sync(self._chunks[chunk].parameters())
        if input_gradient is not None:
            self._to_send[action.with_op(Op.SEND_B)] = input_gradient.contiguous()

    def _send(self, action: Action) -> None:
        self._links.send(self._schedule.receive_of(action), self._to_send.pop(action))

    def _receive(self, action: Action) -> None:
        self._received[action] = self._links.receive(action)

    def _no_sync(self, chunk: int) -> AbstractContextManager[Any]:
        """Megatron's way to let gradients accumulate without starting their reduction."""
        no_sync = _of_chunk(self._config.no_sync_func, chunk)
        context: AbstractContextManager[Any] = nullcontext() if no_sync is None else no_sync()
        return context

    def _chunk(self, action: Action) -> int:
        assert action.chunk is not None
        return action.chunk


def _of_chunk(functions: Any, chunk: int) -> Any:
    """A function of the configuration, which may be a list of one for each chunk."""
    return functions[chunk] if isinstance(functions, list) else functions


def _check(
    config: TransformerConfig,
    seq_length: int,
    decoder_seq_length: int | None,
    adjust_tensor_shapes_fn: None,
) -> None:
    refused = [name for name in _REFUSED_CONFIG if getattr(config, name, None)]
    if refused:
        raise ValueError(f"this schedule does not know the configuration's {', '.join(refused)}")
    if decoder_seq_length not in (None, seq_length) or adjust_tensor_shapes_fn is not None:
        raise ValueError("this schedule sends tensors of one shape: that of seq_length")


def _activation_size(
    config: TransformerConfig,
    groups: ProcessGroupCollection,
    seq_length: int,
    micro_batch_size: int,
) -> tuple[int, ...]:
    """As Megatron's ``get_tensor_shapes``."""
    length = seq_length // groups.cp.size()
    if config.sequence_parallel:
        length //= groups.tp.size()
    return length, micro_batch_size, config.hidden_size


@contextmanager
def _timed(config: TransformerConfig) -> Iterator[None]:
    if config.timers is not None:
        config.timers("forward-backward", log_level=1).start(barrier=config.barrier_with_L1_time)
    yield
    if config.timers is not None:
        config.timers("forward-backward").stop()
