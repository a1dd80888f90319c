"""The options of a training run, under Megatron's flag names; ours begin with ``--bamboo-``.

The dataclasses are the single source: argparse, defaults and help texts are derived from them.
Everything is checked here, without torch, before any worker starts. What Megatron has and this
project does not support yet is refused by name, so that nothing ever trains silently wrong.
"""

import argparse
import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_bamboo.errors import UserError
from megatron_bamboo.schedule.costs import EQUAL_COSTS, Costs
from megatron_bamboo.schedule.redundancy import Redundancy
from megatron_bamboo.schedule.schedule import MAX_CHUNKS, MAX_MICROBATCHES, MAX_STAGES

LARGEST_SIZE = 2**31 - 1
# Below, a wait rounds to nothing; above, it is no wait that anyone means.
SHORTEST_TIMEOUT_MINUTES, LONGEST_TIMEOUT_MINUTES = 0.01, 7 * 24 * 60


def _option(help_text: str, default: Any = dataclasses.MISSING, choices: Sequence[str] = ()) -> Any:
    return dataclasses.field(default=default, metadata={"help": help_text, "choices": choices})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """The shape of the model."""

    num_layers: int = _option("transformer layers")
    hidden_size: int = _option("width of the residual stream")
    num_attention_heads: int = _option("attention heads")
    ffn_hidden_size: int | None = _option(
        "width of the feed-forward part (default: 4 x hidden; with --swiglu two thirds of it)", None
    )
    max_position_embeddings: int = _option("most positions that the model can tell apart")
    position_embedding_type: str = _option(
        "how positions are told apart", "learned_absolute", ("learned_absolute", "rope")
    )
    untie_embeddings_and_output_weights: bool = _option("give the head a weight of its own", False)
    normalization: str = _option("kind of normalization", "LayerNorm", ("LayerNorm", "RMSNorm"))
    norm_epsilon: float = _option("epsilon of the normalization", 1e-5)
    swiglu: bool = _option("gated linear units with SiLU instead of GELU", False)
    disable_bias_linear: bool = _option("no biases in linear layers", False)
    attention_dropout: float = _option("dropout in attention", 0.1)
    hidden_dropout: float = _option("dropout in the residual stream", 0.1)
    init_method_std: float = _option("standard deviation of initial weights", 0.02)
    make_vocab_size_divisible_by: int = _option("pad the vocabulary to a multiple of this", 128)
    recompute_granularity: str | None = _option(
        "what is computed again in the backward pass instead of being kept (default: nothing)",
        None,
        ("selective", "full"),
    )
    recompute_method: str | None = _option(
        "with full: which layers, uniform groups or a block", None, ("uniform", "block")
    )
    recompute_num_layers: int | None = _option("with full: layers in a group or block", None)
    transformer_impl: str = _option(
        "layers of Megatron-core or of Transformer Engine (default: the latter where installed)",
        "auto",
        ("auto", "local", "transformer_engine"),
    )

    @property
    def feed_forward_size(self) -> int:
        """The width of the feed-forward part, by default as Megatron-LM chooses it."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        # With a gate there is a third matrix: two thirds of the width, in multiples of 64.
        return int(4 * self.hidden_size * 2 / 3) // 64 * 64 if self.swiglu else 4 * self.hidden_size


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOptions:
    """How long and on how much data at a time."""

    micro_batch_size: int = _option("samples in a microbatch")
    global_batch_size: int | None = _option("samples in a step (default: micro x pipelines)", None)
    train_iters: int = _option("steps to train")
    seed: int = _option("seed of weights, dropout and the order of samples", 1234)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerOptions:
    """AdamW, clipping and the learning rate's course."""

    lr: float = _option("highest learning rate")
    min_lr: float = _option("lowest learning rate", 0.0)
    lr_decay_style: str = _option(
        "course of the learning rate",
        "linear",
        ("constant", "linear", "cosine", "inverse-square-root"),
    )
    lr_decay_iters: int | None = _option("steps until min-lr (default: train-iters)", None)
    lr_warmup_iters: int = _option("steps of linear warm-up", 0)
    lr_warmup_init: float = _option("learning rate at the start of the warm-up", 0.0)
    weight_decay: float = _option("weight decay of matrices", 0.01)
    adam_beta1: float = _option("decay of the first moment", 0.9)
    adam_beta2: float = _option("decay of the second moment", 0.999)
    adam_eps: float = _option("Adam's epsilon", 1e-8)
    clip_grad: float = _option("clip the gradient to this norm (0: no clipping)", 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataOptions:
    """Where the text is."""

    data_path: str = _option("prefix of the .bin and .idx files")
    data_cache_path: str | None = _option("folder of index caches (default: beside the data)", None)
    split: str = _option("weights of training, validation and test parts", "969,30,1")
    seq_length: int = _option("tokens in a sample")
    tokenizer_type: str = _option("tokenizer", "GPT2BPETokenizer", ("GPT2BPETokenizer",))
    vocab_file: str = _option("vocab.json of the tokenizer")
    merge_file: str = _option("merges.txt of the tokenizer")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelOptions:
    """How the model is cut; the number of pipelines follows from the number of nodes."""

    pipeline_model_parallel_size: int = _option("stages of a pipeline", 1)
    num_layers_per_virtual_pipeline_stage: int | None = _option(
        "layers of a chunk; fewer than a stage has means interleaving (default: all of them)", None
    )
    tensor_model_parallel_size: int = _option("workers of a node, which share its layers", 1)
    sequence_parallel: bool = _option("share norms and dropouts too, along the sequence", False)
    distributed_timeout_minutes: float = _option("longest wait for another worker", 10.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class BambooOptions:
    """What this project adds."""

    bamboo_redundancy: Redundancy = _option(
        "redundant forward passes: none (no replicas), lazy (after a loss), eager (always) or "
        "bubble (where a pipeline waits anyway)",
        Redundancy.LAZY,
        tuple(Redundancy),
    )
    bamboo_costs: str | None = _option(
        "with bubble: JSON file of what forwards and backwards take (default: 1 and 2)",
        None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """All options of a run."""

    model: ModelOptions
    training: TrainingOptions
    optimizer: OptimizerOptions
    data: DataOptions
    parallel: ParallelOptions
    bamboo: BambooOptions


@dataclass(frozen=True, slots=True)
class Layout:
    """How many of what: follows from the options and the number of nodes."""

    num_stages: int
    num_chunks: int  # a stage
    num_pipelines: int
    num_microbatches: int  # a pipeline and step
    global_batch_size: int
    tensor_size: int = 1

    @property
    def total_microbatches(self) -> int:
        """Microbatches of one step, over all pipelines."""
        return self.num_pipelines * self.num_microbatches


# Flags of Megatron-LM that its users know and that would train something else if ignored.
UNSUPPORTED: Mapping[str, str] = {
    "--bf16": "bfloat16",
    "--fp16": "float16",
    "--use-distributed-optimizer": "the distributed optimizer",
    "--context-parallel-size": "context parallelism",
    "--expert-model-parallel-size": "expert parallelism",
    "--num-experts": "mixtures of experts",
    "--num-virtual-stages-per-pipeline-rank": "interleaving by the number of chunks",
    "--overlap-grad-reduce": "overlapped gradient reduction",
    "--overlap-param-gather": "overlapped parameter gather",
    "--save": "saving checkpoints",
    "--load": "loading checkpoints",
    "--save-interval": "saving checkpoints",
    "--rampup-batch-size": "a growing batch",
    "--train-samples": "a run length in samples",
    "--eval-iters": "evaluation",
    "--eval-interval": "evaluation",
    "--group-query-attention": "grouped-query attention",
    "--reset-position-ids": "positions that start anew at each document",
    "--reset-attention-mask": "attention that ends at documents",
    "--eod-mask-loss": "masking the end of documents",
    "--log-interval": "another log interval than every iteration",
}


def parse_options(argv: Sequence[str]) -> Options:
    """Read Megatron's flags.

    Raises:
        UserError: with one line that names the bad flag.
    """
    parser = _Parser(allow_abbrev=False)
    groups = {field.name: _option_class(field) for field in dataclasses.fields(Options)}
    for option_class in groups.values():
        _add_group(parser, option_class)
    for flag in UNSUPPORTED:
        parser.add_argument(flag, action=_Refuse, nargs="*", help=argparse.SUPPRESS)
    known, unknown = parser.parse_known_args(list(argv))
    if unknown:
        raise UserError(_unknown_flag(unknown[0], parser))
    values = vars(known)
    return Options(
        **{
            name: option_class(**{f.name: values[f.name] for f in dataclasses.fields(option_class)})
            for name, option_class in groups.items()
        }
    )


def check_options(options: Options, num_nodes: int, workers_per_node: int = 1) -> Layout:
    """Check everything that can be checked without a model; return the layout that follows.

    Raises:
        UserError: with one line that says how to mend it.
    """
    model, training, parallel = options.model, options.training, options.parallel
    _check_sizes(options)
    _check_recomputation(model)
    stages = parallel.pipeline_model_parallel_size
    if stages > MAX_STAGES:
        raise UserError(
            f"--pipeline-model-parallel-size {stages} is more than the {MAX_STAGES} stages that a "
            "pipeline can have: lower it"
        )
    _check_tensor_size(options, workers_per_node)
    if stages > model.num_layers:
        raise UserError(
            f"{stages} stages cannot share {model.num_layers} layers: lower "
            "--pipeline-model-parallel-size or raise --num-layers"
        )
    if model.num_layers % stages:
        raise UserError(
            f"{model.num_layers} layers cannot be cut into {stages} equal stages: make "
            f"--num-layers a multiple of --pipeline-model-parallel-size"
        )
    chunks = _count_chunks(model.num_layers // stages, parallel)
    _check_costs(options.bamboo, stages, chunks)
    if num_nodes % stages:
        raise UserError(
            f"{num_nodes} nodes do not make whole pipelines of {stages} stages: start "
            f"{max(1, num_nodes // stages) * stages} nodes or change "
            "--pipeline-model-parallel-size"
        )
    if stages == 1 and options.bamboo.bamboo_redundancy is not Redundancy.NONE:
        raise UserError(
            "a pipeline of one stage has no neighbour to hold its replica: use "
            "--bamboo-redundancy none or --pipeline-model-parallel-size 2 or more"
        )
    pipelines = num_nodes // stages
    batch = training.global_batch_size or training.micro_batch_size * pipelines
    if batch % (training.micro_batch_size * pipelines):
        raise UserError(
            f"--global-batch-size {batch} does not divide into microbatches of "
            f"{training.micro_batch_size} over {pipelines} pipelines: make it a multiple of "
            f"{training.micro_batch_size * pipelines}"
        )
    microbatches = batch // (training.micro_batch_size * pipelines)
    _check_amount(microbatches, training.train_iters, batch)
    _check_files(options.data)
    return Layout(
        num_stages=stages,
        num_chunks=chunks,
        num_pipelines=pipelines,
        num_microbatches=microbatches,
        global_batch_size=batch,
        tensor_size=workers_per_node,
    )


def read_costs(options: BambooOptions) -> Costs:
    """The costs by which redundant forwards are placed in gaps.

    Raises:
        UserError: the file is not there or holds no costs.
    """
    if options.bamboo_costs is None:
        return EQUAL_COSTS
    try:
        return Costs.from_json(Path(options.bamboo_costs).read_text())
    except OSError as error:
        raise UserError(f"--bamboo-costs {options.bamboo_costs}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"--bamboo-costs {options.bamboo_costs}: {error}") from error


def _check_amount(microbatches: int, train_iters: int, batch: int) -> None:
    if microbatches > MAX_MICROBATCHES:
        raise UserError(
            f"{microbatches} microbatches are more than the {MAX_MICROBATCHES} that a pipeline can "
            "have: lower --global-batch-size or raise --micro-batch-size"
        )
    if train_iters * batch > LARGEST_SIZE:
        raise UserError(
            f"{train_iters} steps of {batch} samples are more than {LARGEST_SIZE} samples: lower "
            "--train-iters or --global-batch-size"
        )


def _check_costs(options: BambooOptions, num_stages: int, num_chunks: int) -> None:
    costs = read_costs(options)
    try:
        costs.check_shape(num_stages, num_chunks)
    except ValueError as error:
        raise UserError(f"--bamboo-costs: {error}") from error


def _check_recomputation(model: ModelOptions) -> None:
    is_full = model.recompute_granularity == "full"
    given = (model.recompute_method is not None, model.recompute_num_layers is not None)
    if given != (is_full, is_full):
        raise UserError(
            "--recompute-method and --recompute-num-layers belong to --recompute-granularity full: "
            "give all three, or neither of the two"
        )


def _check_tensor_size(options: Options, workers_per_node: int) -> None:
    size = options.parallel.tensor_model_parallel_size
    if size != workers_per_node:
        raise UserError(
            f"--tensor-model-parallel-size {size} needs bamboo run --workers-per-node {size}, "
            f"not {workers_per_node}"
        )
    if options.model.num_attention_heads % size:
        raise UserError(
            f"--num-attention-heads {options.model.num_attention_heads} must be a multiple of "
            f"--tensor-model-parallel-size {size}"
        )
    if options.model.feed_forward_size % size:
        raise UserError(
            f"--ffn-hidden-size must be a multiple of the tensor parallel size {size}, not "
            f"{options.model.feed_forward_size}"
        )
    if options.parallel.sequence_parallel and (size == 1 or options.data.seq_length % size):
        raise UserError(
            "--sequence-parallel needs --tensor-model-parallel-size 2 or more, and a --seq-length "
            "that is a multiple of it"
        )


def _count_chunks(layers_per_stage: int, parallel: ParallelOptions) -> int:
    layers_per_chunk = parallel.num_layers_per_virtual_pipeline_stage or layers_per_stage
    if layers_per_stage % layers_per_chunk:
        raise UserError(
            f"the {layers_per_stage} layers of a stage cannot be cut into chunks of "
            f"{layers_per_chunk}: change --num-layers-per-virtual-pipeline-stage"
        )
    chunks = layers_per_stage // layers_per_chunk
    if chunks > MAX_CHUNKS:
        raise UserError(
            f"{chunks} chunks are more than the {MAX_CHUNKS} that a stage can have: raise "
            "--num-layers-per-virtual-pipeline-stage"
        )
    if chunks > 1 and parallel.pipeline_model_parallel_size == 1:
        raise UserError(
            "interleaving needs at least 2 stages: leave out "
            "--num-layers-per-virtual-pipeline-stage or raise --pipeline-model-parallel-size"
        )
    return chunks


def _check_sizes(options: Options) -> None:
    for name, value in _sizes(options):
        if value < 1:
            raise UserError(f"{_flag(name)} must be at least 1, not {value}")
        if value > LARGEST_SIZE:
            raise UserError(f"{_flag(name)} must be at most {LARGEST_SIZE}, not {value}")
    model = options.model
    if model.hidden_size % model.num_attention_heads:
        raise UserError(
            f"--hidden-size {model.hidden_size} must be a multiple of "
            f"--num-attention-heads {model.num_attention_heads}"
        )
    width = model.hidden_size // model.num_attention_heads
    if model.position_embedding_type == "rope" and width % 2:
        raise UserError(
            f"--position-embedding-type rope needs heads of an even width, not {width}: change "
            "--hidden-size or --num-attention-heads"
        )
    if options.data.seq_length > model.max_position_embeddings:
        raise UserError(
            f"--seq-length {options.data.seq_length} needs --max-position-embeddings of at least "
            f"as much, not {model.max_position_embeddings}"
        )
    if model.feed_forward_size < 1:
        raise UserError(
            f"--swiglu leaves no feed-forward part at --hidden-size {model.hidden_size}: "
            "give --ffn-hidden-size"
        )
    if not 0 <= options.training.seed < 2**32:
        raise UserError(f"--seed {options.training.seed} must be at least 0 and below 2**32")
    _check_ranges(options)
    _check_learning_rate(options)


def _sizes(options: Options) -> Iterator[tuple[str, int]]:
    """The name and the value of each number of things that is given."""
    groups = (
        options.model,
        options.training,
        options.optimizer,
        options.data,
        options.parallel,
    )
    for group in groups:
        for field in dataclasses.fields(group):
            value = getattr(group, field.name)
            is_size = field.name not in ("seed", "lr_warmup_iters")
            if _value_type(field) is int and is_size and value is not None:
                yield field.name, value


def _check_ranges(options: Options) -> None:
    model, optimizer = options.model, options.optimizer
    for name, value in (
        ("attention_dropout", model.attention_dropout),
        ("hidden_dropout", model.hidden_dropout),
        ("adam_beta1", optimizer.adam_beta1),
        ("adam_beta2", optimizer.adam_beta2),
    ):
        if not 0.0 <= value < 1.0:
            raise UserError(f"{_flag(name)} must be at least 0 and less than 1")
    for name, value in (
        ("norm_epsilon", model.norm_epsilon),
        ("init_method_std", model.init_method_std),
        ("adam_eps", optimizer.adam_eps),
    ):
        if not 0.0 < value < math.inf:
            raise UserError(f"{_flag(name)} must be more than 0")
    minutes = options.parallel.distributed_timeout_minutes
    if not SHORTEST_TIMEOUT_MINUTES <= minutes <= LONGEST_TIMEOUT_MINUTES:
        raise UserError(
            f"--distributed-timeout-minutes must be between {SHORTEST_TIMEOUT_MINUTES} and "
            f"{LONGEST_TIMEOUT_MINUTES} (a week), not {minutes:g}"
        )


def _check_learning_rate(options: Options) -> None:
    optimizer, training = options.optimizer, options.training
    for lowest in (optimizer.min_lr, optimizer.lr_warmup_init):
        if not 0.0 <= lowest <= optimizer.lr < math.inf:
            raise UserError("--lr must not be below --min-lr or --lr-warmup-init, and none below 0")
    if optimizer.lr_warmup_iters < 0:
        raise UserError("--lr-warmup-iters must not be negative")
    if optimizer.lr_warmup_iters >= (optimizer.lr_decay_iters or training.train_iters):
        raise UserError("--lr-warmup-iters must be less than --lr-decay-iters (or --train-iters)")
    if not (optimizer.clip_grad >= 0.0 and optimizer.weight_decay >= 0.0):
        raise UserError("--clip-grad and --weight-decay must not be negative")


def _check_files(data: DataOptions) -> None:
    data_hint = "give the prefix that `bamboo preprocess` wrote, without .bin"
    vocabulary_hint = "give the file that `bamboo preprocess` was given"
    for flag, path, hint in (
        ("--data-path", f"{data.data_path}.bin", data_hint),
        ("--data-path", f"{data.data_path}.idx", data_hint),
        ("--vocab-file", data.vocab_file, vocabulary_hint),
        ("--merge-file", data.merge_file, vocabulary_hint),
    ):
        try:
            is_there = Path(path).is_file()
        except OSError as error:
            raise UserError(f"{flag}: cannot read {path} ({error.strerror}); {hint}") from error
        if not is_there:
            raise UserError(f"{flag}: there is no file {path}; {hint}")


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the list of all flags before it."""

    def error(self, message: str) -> typing.NoReturn:
        raise UserError(message)


class _Refuse(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *args: Any) -> None:
        flag = self.option_strings[0]
        parser.error(f"{flag}: {UNSUPPORTED[flag]} is not supported yet; leave the flag out")


def _unknown_flag(word: str, parser: argparse.ArgumentParser) -> str:
    if not word.startswith("--"):
        return f"{word} is neither a flag nor the value of one"
    flag = word.partition("=")[0]
    flags = [name for action in parser._actions for name in action.option_strings]
    near = difflib.get_close_matches(flag, flags, n=1)
    return f"there is no flag {flag}" + (f"; did you mean {near[0]}?" if near else "")


def _add_group(parser: argparse.ArgumentParser, option_class: type) -> None:
    group = parser.add_argument_group(str(option_class.__doc__))
    for field in dataclasses.fields(option_class):
        help_text = field.metadata["help"]
        if _value_type(field) is bool:
            group.add_argument(_flag(field.name), action="store_true", help=help_text)
            continue
        required = field.default is dataclasses.MISSING
        group.add_argument(
            _flag(field.name),
            type=_value_type(field),
            required=required,
            default=None if required else field.default,
            choices=tuple(_value_type(field)(c) for c in field.metadata["choices"]) or None,
            help=help_text if required or field.default is None else f"{help_text} (%(default)s)",
        )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _value_type(field: dataclasses.Field[Any]) -> Any:
    """The type of an option's value, without its "or None"."""
    if isinstance(field.type, types.UnionType):
        return next(kind for kind in typing.get_args(field.type) if kind is not types.NoneType)
    return field.type


def _option_class(field: dataclasses.Field[Any]) -> type:
    assert isinstance(field.type, type)
    return field.type
