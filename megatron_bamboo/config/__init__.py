"""The options of a run: what there is, how it is read and checked, and what follows."""

from megatron_bamboo.config.check import check_options
from megatron_bamboo.config.costs import costs_of, read_costs, read_unit_bytes, read_works
from megatron_bamboo.config.layout import Layout
from megatron_bamboo.config.options import (
    BambooOptions,
    CheckpointOptions,
    DataOptions,
    EvaluationOptions,
    ModelOptions,
    OptimizerOptions,
    Options,
    ParallelOptions,
    PrecisionOptions,
    ReplicaMemory,
    TrainingOptions,
)
from megatron_bamboo.config.parse import UNSUPPORTED, ExtraArgsProvider, parse_flags, parse_options
from megatron_bamboo.config.pipelines import without_nodes

__all__ = (
    "UNSUPPORTED",
    "BambooOptions",
    "CheckpointOptions",
    "DataOptions",
    "EvaluationOptions",
    "ExtraArgsProvider",
    "Layout",
    "ModelOptions",
    "OptimizerOptions",
    "Options",
    "ParallelOptions",
    "PrecisionOptions",
    "ReplicaMemory",
    "TrainingOptions",
    "check_options",
    "costs_of",
    "parse_flags",
    "parse_options",
    "read_costs",
    "read_unit_bytes",
    "read_works",
    "without_nodes",
)
