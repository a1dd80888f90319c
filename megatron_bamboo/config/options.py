"""The options of a training run, under Megatron's flag names; ours begin with ``--bamboo-``.

The dataclasses are the single source: argparse, defaults and help texts are derived from them.
"""

import dataclasses
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from megatron_bamboo.evaluation.due import EvaluationPlan
from megatron_bamboo.recovery.names import PolicyName
from megatron_bamboo.schedule.redundancy import Redundancy
from megatron_bamboo.schedule.schedule import MAX_MICROBATCHES

_MEGATRONS_EVAL_ITERS = 100


class OnNoHolder(StrEnum):
    """What is done when some of the state has no live holder any more."""

    STOP = "stop"
    RESTORE = "restore"  # all begin again from the last checkpoint


class OnTooFew(StrEnum):
    """What is done when one node alone runs a pipeline, so that nothing protects it."""

    GO_ON = "go-on"
    WAIT = "wait"  # the step is saved, and the next one begins when there is another node


class ReplicaMemory(StrEnum):
    """Where a redundant forward leaves what its backward would need."""

    DEVICE = "device"
    HOST = "host"
    RECOMPUTE = "recompute"  # nowhere: it runs again before that backward


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
        "layers of Megatron-core or of Transformer Engine (default: the latter where installed); "
        "emulated ones compute little and take a given time",
        "auto",
        ("auto", "local", "transformer_engine", "emulated"),
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
class EvaluationOptions:
    """Losses on samples that are not trained on."""

    eval_interval: int | None = _option(
        "steps between evaluations on the validation part (default: no evaluation)", None
    )
    eval_iters: int | None = _option(
        "global batches of an evaluation; 0: no evaluation (default: 100)", None
    )

    @property
    def num_batches(self) -> int:
        """Of each evaluation; 0 where there is none."""
        if self.eval_interval is None:
            return 0
        return _MEGATRONS_EVAL_ITERS if self.eval_iters is None else self.eval_iters


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionOptions:
    """Half precision, with gradients and the optimizer's copy of the weights in float32."""

    bf16: bool = _option("compute in bfloat16", False)
    fp16: bool = _option("compute in float16, with a scaled loss", False)
    loss_scale: float | None = _option(
        "constant scale of the loss (default: none with bf16, one that adapts with fp16)", None
    )
    initial_loss_scale: float = _option("with fp16: the first scale of the loss", 2.0**32)
    min_loss_scale: float = _option("with fp16: the least scale of the loss", 1.0)
    loss_scale_window: int = _option("with fp16: steps without overflow until it doubles", 1000)
    hysteresis: int = _option("with fp16: steps with overflow until it is halved", 2)


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
    use_distributed_optimizer: bool = _option(
        "share the optimizer's state out over the pipelines (ZeRO-1)", False
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DataOptions:
    """Where the text is."""

    data_path: str | None = _option(
        "prefix of the .bin and .idx files, which --split makes parts of", None
    )
    train_data_path: str | None = _option("in place of it: prefix of what to train on", None)
    valid_data_path: str | None = _option("with it: prefix of what is for validation", None)
    test_data_path: str | None = _option("with it: prefix of what is for a test", None)
    data_cache_path: str | None = _option("folder of index caches (default: beside the data)", None)
    split: str = _option("weights of training, validation and test parts", "969,30,1")
    seq_length: int = _option("tokens in a sample")
    tokenizer_type: str = _option("tokenizer", "GPT2BPETokenizer", ("GPT2BPETokenizer",))
    vocab_file: str = _option("vocab.json of the tokenizer")
    merge_file: str = _option("merges.txt of the tokenizer")

    @property
    def sources(self) -> tuple[tuple[str, str], ...]:
        """The flags that name data, each with its prefix."""
        names = ("data_path", "train_data_path", "valid_data_path", "test_data_path")
        given = ((flag_of(name), getattr(self, name)) for name in names)
        return tuple((flag, prefix) for flag, prefix in given if prefix)

    @property
    def training_prefix(self) -> str:
        """Of the files that hold the training samples."""
        prefix = self.data_path or self.train_data_path
        assert prefix, "checked before: one of them is given"
        return prefix

    @property
    def prefixes_apart(self) -> tuple[str | None, str | None] | None:
        """Those of validation and test, if they have files of their own, and are no parts."""
        return None if self.data_path else (self.valid_data_path, self.test_data_path)


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
class CheckpointOptions:
    """Where the training is saved, and where it goes on from."""

    save: str | None = _option("folder to save checkpoints in (default: none is saved)", None)
    save_interval: int | None = _option(
        "save each time that so many steps are done (default: only after the last one)", None
    )
    load: str | None = _option(
        "folder to go on from, with the step that its tracker names; if it holds none, training "
        "starts anew",
        None,
    )
    ckpt_step: int | None = _option("go on from this step instead", None)
    exit_on_missing_checkpoint: bool = _option("refuse to start anew", False)
    ckpt_format: str = _option("format of checkpoints", "torch_dist", ("torch_dist",))


@dataclass(frozen=True, slots=True, kw_only=True)
class BambooOptions:
    """What this project adds."""

    bamboo_pipelines: str | None = _option(
        "unequal pipelines: the number of stages of each, like 3,2, or the layers of each stage, "
        "like 2+2+1,3+2 (default: all of --pipeline-model-parallel-size)",
        None,
    )
    bamboo_microbatches: str | None = _option(
        "microbatches of each pipeline in a step, like 5,3 (default: equal ones for pipelines that "
        "are cut alike, else those with which the slowest is fastest)",
        None,
    )
    bamboo_policy: PolicyName = _option(
        "what is done about losses: bamboo (replicas take over, each pipeline keeps its "
        "microbatches, and losses change no bit), auto (from the next iteration on slower "
        "pipelines get fewer, one is cut anew for the nodes that it has where that pays, and one "
        "that nobody has whole is dissolved), oobleck (without replicas: whatever pipeline is hit "
        "is dissolved, and begins again on standbys) or checkpoint (without replicas: all go back "
        "to the last checkpoint)",
        PolicyName.BAMBOO,
        tuple(PolicyName),
    )
    bamboo_least_nodes: int | None = _option(
        "with --bamboo-policy auto: nodes without which a pipeline's stages do not fit, replicas "
        "counted; one that has fewer left gets some of another pipeline, or becomes one with it, "
        "and none begins again on fewer (default: that is weighed, and half of the stages of the "
        "shortest pipeline are enough)",
        None,
    )
    bamboo_redundancy: Redundancy = _option(
        "redundant forward passes: none (no replicas), lazy (after a loss), eager (always) or "
        "bubble (where a pipeline waits anyway)",
        Redundancy.LAZY,
        tuple(Redundancy),
    )
    bamboo_on_no_holder: OnNoHolder | None = _option(
        "where no live node has some of the state: stop (the job ends) or restore (all who live "
        "begin again from the last checkpoint, or from the beginning if there is none, on fewer "
        "pipelines if need be, and then with the bits of these; default: restore with --save or "
        "--load, else stop)",
        None,
        tuple(OnNoHolder),
    )
    bamboo_on_too_few: OnTooFew = _option(
        "where one node is left of a pipeline: go-on (unprotected, with a warning) or wait (save, "
        "and go on when another node has come)",
        OnTooFew.GO_ON,
        tuple(OnTooFew),
    )
    bamboo_mirror_gradients: int = _option(
        "each stage sends its replica the gradient so far, so often a step, so that a takeover "
        "repeats only the backward passes since (default: 0, never)",
        0,
    )
    bamboo_link_bandwidth: float | None = _option(
        "MB/s that the link of a node brings it: mirrored gradients that it cannot carry are "
        "refused (needs --bamboo-costs in seconds, as bamboo profile writes them)",
        None,
    )
    bamboo_max_deferred: int = _option(
        "gradients of a chunk that may wait in host memory to be summed in order while a takeover "
        "runs later backward passes first, for which others wait (default: any number)",
        MAX_MICROBATCHES,
    )
    bamboo_replica_memory: ReplicaMemory = _option(
        "where eager or bubble redundant forwards keep what their backwards would need: on the "
        "device, in host memory, or nowhere (recompute: they run again after a loss)",
        ReplicaMemory.DEVICE,
        tuple(ReplicaMemory),
    )
    bamboo_verify_replicas: int = _option(
        "compare all copies of the state every so many steps, and mend what differs (default: 0, "
        "never)",
        0,
    )
    bamboo_account_memory: bool = _option(
        "count what each worker's tensors take, and leave the peak in its event log", False
    )
    bamboo_costs: str | None = _option(
        "JSON file of what forwards and backwards take, for the gaps that bubble fills and for how "
        "many microbatches unequal pipelines get (default: 1 and 2, each layer the same)",
        None,
    )
    bamboo_lease: float = _option(
        "seconds after which a node of which nothing was heard is lost", 5.0
    )
    bamboo_interface: str | None = _option(
        "network interface by which workers speak to each other, like eth0 (default: with bamboo "
        "run lo, with bamboo agent the one that leads to the coordinator)",
        None,
    )
    bamboo_emulated_forward_ms: str | None = _option(
        "with emulated layers: what a layer's forward takes, or a list with one a layer: 50,60",
        None,
    )
    bamboo_emulated_backward_ms: str | None = _option(
        "with emulated layers: what a layer's backward takes, likewise", None
    )
    bamboo_emulated_bandwidth: float | None = _option(
        "with emulated layers: MB/s of the link by which a node gets its messages (default: as is)",
        None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """All options of a run."""

    model: ModelOptions
    training: TrainingOptions
    evaluation: EvaluationOptions
    precision: PrecisionOptions
    optimizer: OptimizerOptions
    data: DataOptions
    parallel: ParallelOptions
    checkpoint: CheckpointOptions
    bamboo: BambooOptions

    @property
    def restores(self) -> bool:
        """Whether all begin again from the last checkpoint where some state has no holder."""
        if self.bamboo.bamboo_policy is PolicyName.CHECKPOINT:
            return True
        if self.bamboo.bamboo_on_no_holder is None:
            return self.checkpoint.save is not None or self.checkpoint.load is not None
        return self.bamboo.bamboo_on_no_holder is OnNoHolder.RESTORE

    @property
    def evaluations(self) -> EvaluationPlan:
        """Which evaluations the run has."""
        evaluation = self.evaluation
        num_batches, last = evaluation.num_batches, self.training.train_iters
        return EvaluationPlan(evaluation.eval_interval, num_batches, last)


def flag_of(name: str) -> str:
    """The flag of an option."""
    return "--" + name.replace("_", "-")


def value_type(field: dataclasses.Field[Any]) -> Any:
    """The type of an option's value, without its "or None"."""
    if isinstance(field.type, types.UnionType):
        return next(kind for kind in typing.get_args(field.type) if kind is not types.NoneType)
    return field.type
