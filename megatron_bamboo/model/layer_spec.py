"""Which modules a GPT's layers are made of, on this machine."""

import argparse
import importlib.util

import torch
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from megatron_bamboo.config.emulation import EMULATED
from megatron_bamboo.errors import UserError
from megatron_bamboo.model.emulated import emulated_layer_spec
from megatron_bamboo.model.local_norm import LocalNorm


def gpt_layer_spec(args: argparse.Namespace, num_layers: int) -> TransformerBlockSubmodules:
    """So many layers of Transformer Engine's modules or of Megatron-core's own, and a last norm;
    or emulated ones.

    Megatron-core's local layers take torch's norms without sequence parallelism only; with the
    norms of ``local_norm.py`` they take them with it too.
    """
    if args.transformer_impl == EMULATED:
        spec, norm = emulated_layer_spec(args), LocalNorm
    elif uses_transformer_engine(args.transformer_impl):
        from megatron.core.extensions.transformer_engine import TENorm

        spec, norm = get_gpt_layer_with_transformer_engine_spec(), TENorm
    else:
        spec, norm = _local_spec(args), LocalNorm
    return TransformerBlockSubmodules(layer_specs=[spec] * num_layers, layer_norm=norm)


def uses_transformer_engine(transformer_impl: str) -> bool:
    """Whether the layers are Transformer Engine's: where it is installed, unless told otherwise."""
    if transformer_impl == "local" or not torch.cuda.is_available():
        return False
    installed = importlib.util.find_spec("transformer_engine") is not None
    if transformer_impl == "transformer_engine" and not installed:
        raise UserError("--transformer-impl transformer_engine: it is not installed")
    return installed


def _local_spec(args: argparse.Namespace) -> ModuleSpec:
    spec = get_gpt_layer_local_spec(normalization=args.normalization)
    spec.submodules.input_layernorm = LocalNorm
    spec.submodules.pre_mlp_layernorm = LocalNorm
    return spec
