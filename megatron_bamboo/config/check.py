"""Checks the options before any worker starts, without torch, and says what layout follows."""

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path

from megatron_bamboo.config.costs import read_costs
from megatron_bamboo.config.emulation import (
    EMULATED,
    LARGEST_BANDWIDTH,
    LEAST_BANDWIDTH,
    check_emulation,
)
from megatron_bamboo.config.layout import Layout
from megatron_bamboo.config.options import (
    BambooOptions,
    CheckpointOptions,
    DataOptions,
    ModelOptions,
    OnNoHolder,
    OnTooFew,
    Options,
    PrecisionOptions,
    ReplicaMemory,
    flag_of,
    value_type,
)
from megatron_bamboo.config.pipelines import arrange
from megatron_bamboo.errors import UserError
from megatron_bamboo.planner.arrangement import Arrangement
from megatron_bamboo.planner.new_cut import FEWEST_STAGES
from megatron_bamboo.recovery.names import PolicyName
from megatron_bamboo.schedule.redundancy import Redundancy
from megatron_bamboo.schedule.schedule import MAX_MICROBATCHES

LARGEST_SIZE = 2**31 - 1
_DATA_ENDS = (".bin", ".idx")
# Beyond, float32 could not hold what is scaled and unscaled.
LEAST_LOSS_SCALE, LARGEST_LOSS_SCALE = 2.0**-40, 2.0**60
# Shorter ones a busy machine would break; longer ones nobody waits for.
SHORTEST_LEASE, LONGEST_LEASE = 1.0, 3600.0
# Below, a wait rounds to nothing; above, it is no wait that anyone means.
SHORTEST_TIMEOUT_MINUTES, LONGEST_TIMEOUT_MINUTES = 0.01, 7 * 24 * 60


def check_options(options: Options, num_nodes: int, workers_per_node: int = 1) -> Layout:
    """Check everything that can be checked without a model; return the layout that follows.

    Raises:
        UserError: with one line that says how to mend it.
    """
    model, training, redundancy = (
        options.model,
        options.training,
        options.bamboo.bamboo_redundancy,
    )
    _check_sizes(options)
    _check_recomputation(model)
    check_emulation(model, options.bamboo)
    _check_checkpoints(options.checkpoint)
    _check_tensor_size(options, workers_per_node)
    arrangement = arrange(options, num_nodes)
    read_costs(options.bamboo, arrangement)
    if arrangement.pipelines[0].num_stages == 1 and redundancy is not Redundancy.NONE:
        raise UserError(
            "a pipeline of one stage has no neighbour to hold its replica: use "
            "--bamboo-redundancy none or --pipeline-model-parallel-size 2 or more"
        )
    _check_policy(options.bamboo)
    _check_least_nodes(options.bamboo, arrangement)
    _check_waiting(options)
    _check_mirrors(options.bamboo)
    _check_deferred(options.bamboo)
    _check_bandwidth(model, options.bamboo)
    _check_replica_memory(options.bamboo)
    num_pipelines = len(arrangement.pipelines)
    _check_verification(options.bamboo, num_pipelines)
    batch = training.micro_batch_size * arrangement.total_microbatches
    _check_amount(training.train_iters, batch)
    _check_evaluation(options, batch)
    _check_sources(options)
    _check_files(options.data)
    return Layout(
        arrangement=arrangement,
        global_batch_size=batch,
        tensor_size=workers_per_node,
        num_shards=num_pipelines if options.optimizer.use_distributed_optimizer else 1,
    )


def _check_amount(train_iters: int, batch: int) -> None:
    if train_iters * batch > LARGEST_SIZE:
        raise UserError(
            f"{train_iters} steps of {batch} samples are more than {LARGEST_SIZE} samples: lower "
            "--train-iters or --global-batch-size"
        )


def _check_policy(options: BambooOptions) -> None:
    policy = options.bamboo_policy
    does_without = policy.redundancy is Redundancy.NONE
    if does_without and options.bamboo_redundancy is not Redundancy.NONE:
        raise UserError(
            f"--bamboo-policy {policy} does without replicas: add --bamboo-redundancy none"
        )
    stops = options.bamboo_on_no_holder is OnNoHolder.STOP
    if policy is PolicyName.CHECKPOINT and stops:
        raise UserError(
            f"--bamboo-policy {policy} goes back to a checkpoint at each loss: leave out "
            "--bamboo-on-no-holder stop"
        )


def _check_least_nodes(options: BambooOptions, arrangement: Arrangement) -> None:
    number, policy = options.bamboo_least_nodes, options.bamboo_policy
    fewest = min(pipeline.num_stages for pipeline in arrangement.pipelines)
    if number is None:
        return
    if policy is not PolicyName.AUTO:
        raise UserError(
            f"--bamboo-least-nodes: with --bamboo-policy {policy} no node changes its pipeline; "
            "use --bamboo-policy auto, or leave it out"
        )
    if not FEWEST_STAGES <= number <= fewest:
        raise UserError(
            f"--bamboo-least-nodes must be between {FEWEST_STAGES} and {fewest}, the stages of the "
            f"shortest pipeline, not {number}"
        )


def _check_waiting(options: Options) -> None:
    if options.bamboo.bamboo_on_too_few is OnTooFew.GO_ON:
        return
    if options.checkpoint.save is None:
        raise UserError("--bamboo-on-too-few wait saves first: add --save and the folder")
    if options.bamboo.bamboo_redundancy is Redundancy.NONE:
        raise UserError(
            "--bamboo-on-too-few wait is about pipelines with replicas: leave it out, or use "
            "--bamboo-redundancy lazy, bubble or eager"
        )


def _check_evaluation(options: Options, batch: int) -> None:
    if options.evaluation.eval_interval is None and options.evaluation.eval_iters:
        raise UserError("--eval-iters does nothing without --eval-interval: give it too")
    if (number := options.evaluations.validation_batches * batch) > LARGEST_SIZE:
        raise UserError(
            f"the evaluations take {number} samples, more than {LARGEST_SIZE}: raise "
            "--eval-interval or lower --eval-iters"
        )


def _check_mirrors(options: BambooOptions) -> None:
    number = options.bamboo_mirror_gradients
    if not 0 <= number <= MAX_MICROBATCHES:
        raise UserError(
            f"--bamboo-mirror-gradients must be between 0 and {MAX_MICROBATCHES}, not {number}"
        )
    if number and options.bamboo_redundancy is Redundancy.NONE:
        raise UserError(
            "--bamboo-mirror-gradients needs replicas to send to: use --bamboo-redundancy lazy, "
            "bubble or eager, or leave it out"
        )


def _check_bandwidth(model: ModelOptions, options: BambooOptions) -> None:
    bandwidth = options.bamboo_link_bandwidth
    if bandwidth is None:
        return
    if model.transformer_impl == EMULATED:
        raise UserError(
            f"--bamboo-link-bandwidth: with --transformer-impl {EMULATED} give "
            "--bamboo-emulated-bandwidth"
        )
    if not LEAST_BANDWIDTH <= bandwidth <= LARGEST_BANDWIDTH:
        raise UserError(
            f"--bamboo-link-bandwidth must be between {LEAST_BANDWIDTH:g} and "
            f"{LARGEST_BANDWIDTH:g} MB/s, not {bandwidth:g}"
        )
    if options.bamboo_costs is None:
        raise UserError(
            "--bamboo-link-bandwidth needs to know what forwards and backwards take: give "
            "--bamboo-costs FILE, which bamboo profile writes"
        )


def _check_deferred(options: BambooOptions) -> None:
    if not 0 <= options.bamboo_max_deferred <= MAX_MICROBATCHES:
        raise UserError(
            f"--bamboo-max-deferred must be between 0 and {MAX_MICROBATCHES}, not "
            f"{options.bamboo_max_deferred}"
        )


def _check_replica_memory(options: BambooOptions) -> None:
    if options.bamboo_replica_memory is ReplicaMemory.DEVICE:
        return
    if options.bamboo_redundancy not in (Redundancy.BUBBLE, Redundancy.EAGER):
        raise UserError(
            f"--bamboo-replica-memory {options.bamboo_replica_memory} is about forwards that run "
            "before a loss: use --bamboo-redundancy bubble or eager, or leave it out"
        )


def _check_verification(options: BambooOptions, num_pipelines: int) -> None:
    every = options.bamboo_verify_replicas
    if not 0 <= every <= LARGEST_SIZE:
        raise UserError(
            f"--bamboo-verify-replicas must be between 0 and {LARGEST_SIZE}, not {every}"
        )
    if every and options.bamboo_redundancy is Redundancy.NONE and num_pipelines == 1:
        raise UserError(
            "--bamboo-verify-replicas has nothing to compare in one pipeline without replicas: use "
            "--bamboo-redundancy lazy, bubble or eager, start more nodes, or leave it out"
        )


def _check_checkpoints(checkpoint: CheckpointOptions) -> None:
    if checkpoint.save is None and checkpoint.save_interval is not None:
        raise UserError("--save-interval does nothing without --save: give the folder too")
    if checkpoint.load is None:
        for name in ("ckpt_step", "exit_on_missing_checkpoint"):
            if getattr(checkpoint, name):
                raise UserError(f"{flag_of(name)} does nothing without --load: give the folder too")
    for name in ("save", "load"):
        if getattr(checkpoint, name) == "":
            raise UserError(f"{flag_of(name)}: the name of the folder is empty")


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


def _check_sizes(options: Options) -> None:
    for name, value in _sizes(options):
        if value < 1:
            raise UserError(f"{flag_of(name)} must be at least 1, not {value}")
        if value > LARGEST_SIZE:
            raise UserError(f"{flag_of(name)} must be at most {LARGEST_SIZE}, not {value}")
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
    _check_precision(options.precision)
    _check_learning_rate(options)


def _sizes(options: Options) -> Iterator[tuple[str, int]]:
    """The name and the value of each number of things that is given."""
    groups = (
        options.model,
        options.training,
        options.evaluation,
        options.precision,
        options.optimizer,
        options.data,
        options.parallel,
        options.checkpoint,
    )
    for group in groups:
        for field in dataclasses.fields(group):
            value = getattr(group, field.name)
            is_size = field.name not in ("seed", "lr_warmup_iters")
            is_none = value is None or (field.name, value) == ("eval_iters", 0)
            if value_type(field) is int and is_size and not is_none:
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
            raise UserError(f"{flag_of(name)} must be at least 0 and less than 1")
    for name, value in (
        ("norm_epsilon", model.norm_epsilon),
        ("init_method_std", model.init_method_std),
        ("adam_eps", optimizer.adam_eps),
    ):
        if not 0.0 < value < math.inf:
            raise UserError(f"{flag_of(name)} must be more than 0")
    if not SHORTEST_LEASE <= options.bamboo.bamboo_lease <= LONGEST_LEASE:
        raise UserError(
            f"--bamboo-lease must be between {SHORTEST_LEASE:g} and {LONGEST_LEASE:g} seconds, "
            f"not {options.bamboo.bamboo_lease:g}"
        )
    minutes = options.parallel.distributed_timeout_minutes
    if not SHORTEST_TIMEOUT_MINUTES <= minutes <= LONGEST_TIMEOUT_MINUTES:
        raise UserError(
            f"--distributed-timeout-minutes must be between {SHORTEST_TIMEOUT_MINUTES} and "
            f"{LONGEST_TIMEOUT_MINUTES} (a week), not {minutes:g}"
        )


def _check_precision(precision: PrecisionOptions) -> None:
    if precision.bf16 and precision.fp16:
        raise UserError("--bf16 and --fp16: give one of them")
    lowest, first, constant = (
        precision.min_loss_scale,
        precision.initial_loss_scale,
        precision.loss_scale,
    )
    if not LEAST_LOSS_SCALE <= lowest <= first <= LARGEST_LOSS_SCALE:
        raise UserError(
            "--initial-loss-scale must not be below --min-loss-scale, and both between "
            f"{LEAST_LOSS_SCALE:g} and {LARGEST_LOSS_SCALE:g}"
        )
    if constant is None:
        return
    if not (precision.bf16 or precision.fp16):
        raise UserError("--loss-scale belongs to --bf16 or --fp16: leave it out")
    if not LEAST_LOSS_SCALE <= constant <= LARGEST_LOSS_SCALE:
        raise UserError(
            f"--loss-scale must be between {LEAST_LOSS_SCALE:g} and {LARGEST_LOSS_SCALE:g}"
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


def _check_sources(options: Options) -> None:
    data = options.data
    apart = (data.train_data_path, data.valid_data_path, data.test_data_path)
    if data.data_path and any(apart):
        raise UserError(
            "--data-path holds all samples: leave it out, or --train-data-path, --valid-data-path "
            "and --test-data-path"
        )
    if not data.data_path and not data.train_data_path:
        raise UserError("there is nothing to train on: give --data-path or --train-data-path")
    if data.train_data_path and not options.evaluations.is_empty and not data.valid_data_path:
        raise UserError("--eval-interval with --train-data-path needs --valid-data-path")


def _check_files(data: DataOptions) -> None:
    data_hint = "give the prefix that `bamboo preprocess` wrote, without .bin"
    vocabulary_hint = "give the file that `bamboo preprocess` was given"
    for flag, path, hint in (
        *((flag, f"{path}{end}", data_hint) for flag, path in data.sources for end in _DATA_ENDS),
        ("--vocab-file", data.vocab_file, vocabulary_hint),
        ("--merge-file", data.merge_file, vocabulary_hint),
    ):
        try:
            is_there = Path(path).is_file()
        except OSError as error:
            raise UserError(f"{flag}: cannot read {path} ({error.strerror}); {hint}") from error
        if not is_there:
            raise UserError(f"{flag}: there is no file {path}; {hint}")
