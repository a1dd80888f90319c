"""Megatron-core's configuration of a model's layers, from the options of a run.

A worker builds any range of layers, its own and those of replicas, and later ranges that no equal
cut gives. So a chunk is built as a small model of its own: the configuration says pipeline size 1
and, while the chunk is built, how many layers it has. Everything that depends on the depth of the
whole model, such as the initial values of residual outputs, is settled before.
"""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields

import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

_layers_to_build: int | None = None
_draws = True


@contextmanager
def building(num_layers: int, draws: bool = True) -> Iterator[None]:
    """Let configurations that are made inside of the block build so many layers.

    Args:
        draws: Megatron gives its weights initial values.
    """
    global _layers_to_build, _draws
    _layers_to_build, _draws = num_layers, draws
    try:
        yield
    finally:
        _layers_to_build, _draws = None, True


def core_transformer_config_from_args(
    args: argparse.Namespace, config_class: type[TransformerConfig] | None = None
) -> TransformerConfig:
    """As Megatron-LM's function of this name: the options that the configuration has a field for.

    Args:
        config_class: a subclass with fields of its own, filled from options of the same names.
    """
    kind = config_class or TransformerConfig
    options = {f.name: getattr(args, f.name) for f in fields(kind) if hasattr(args, f.name)}
    config = kind(**options | _settled(args))
    if _layers_to_build is not None:
        config.num_layers = _layers_to_build
    if not _draws:
        # Megatron's own switch for this leaves the marks of what tensor ranks share away, too.
        config.init_method = config.output_layer_init_method = _leave
        config.embedding_init_method = _leave
    return config


def _leave(weight: Tensor) -> Tensor:
    """An initialization that leaves memory as it is."""
    return weight


def _settled(args: argparse.Namespace) -> dict[str, object]:
    """What has another name or form than the option, and what is not the user's to choose."""
    return {
        "layernorm_epsilon": args.norm_epsilon,
        "gated_linear_unit": args.swiglu,
        "activation_func": nn.functional.silu if args.swiglu else nn.functional.gelu,
        "add_bias_linear": not args.disable_bias_linear,
        "use_cpu_initialization": not torch.cuda.is_available(),
        "pipeline_model_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": None,
        "pipeline_dtype": args.params_dtype,
        # Fusions are CUDA kernels; an output that is being sent must not be freed early.
        "bias_dropout_fusion": False,
        "bias_activation_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "apply_rope_fusion": False,
        "deallocate_pipeline_outputs": False,
        # None at all; the default is a deprecated word for it, with a warning in each worker's log.
        "cuda_graph_scope": [],
    }
