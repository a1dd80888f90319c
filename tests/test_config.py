"""The flags of a training run: Megatron's names and defaults, and one line for each bad one."""

import dataclasses
from pathlib import Path

import pytest

from megatron_bamboo.config import (
    UNSUPPORTED,
    BambooOptions,
    Layout,
    Options,
    check_options,
    parse_flags,
    parse_options,
)
from megatron_bamboo.config.emulation import layer_seconds
from megatron_bamboo.errors import UserError
from megatron_bamboo.planner.arrangement import equal_pipelines
from megatron_bamboo.schedule.redundancy import Redundancy

REQUIRED = {
    "num-layers": "8",
    "hidden-size": "64",
    "num-attention-heads": "4",
    "seq-length": "32",
    "max-position-embeddings": "32",
    "micro-batch-size": "2",
    "train-iters": "10",
    "lr": "1e-3",
}


@pytest.fixture
def data_files(tmp_path: Path) -> dict[str, str]:
    for name in ("text.bin", "text.idx", "vocab.json", "merges.txt"):
        (tmp_path / name).touch()
    return {
        "data-path": str(tmp_path / "text"),
        "vocab-file": str(tmp_path / "vocab.json"),
        "merge-file": str(tmp_path / "merges.txt"),
    }


def argv(values: dict[str, str], *more: str) -> list[str]:
    return [word for name, value in values.items() for word in (f"--{name}", value)] + [*more]


def read(data_files: dict[str, str], flags: str = "") -> Options:
    """Options from the required flags and some more; a flag given again wins."""
    return parse_options(argv(REQUIRED | data_files, *flags.split()))


def refusal(data_files: dict[str, str], flags: str, nodes: int) -> str:
    """The line that says what is wrong."""
    with pytest.raises(UserError) as raised:
        check_options(read(data_files, flags), nodes)
    (line,) = str(raised.value).splitlines()
    return line


def test_defaults_are_megatrons(data_files: dict[str, str]) -> None:
    options = read(data_files)
    model, training, optimizer = options.model, options.training, options.optimizer
    assert (model.attention_dropout, model.hidden_dropout) == (0.1, 0.1)
    assert (model.normalization, model.norm_epsilon) == ("LayerNorm", 1e-5)
    assert (model.position_embedding_type, model.init_method_std) == ("learned_absolute", 0.02)
    assert not model.untie_embeddings_and_output_weights
    assert not model.swiglu and not model.disable_bias_linear
    assert model.make_vocab_size_divisible_by == 128
    assert (training.seed, training.global_batch_size) == (1234, None)
    assert (optimizer.adam_beta1, optimizer.adam_beta2, optimizer.adam_eps) == (0.9, 0.999, 1e-8)
    assert (optimizer.weight_decay, optimizer.clip_grad) == (0.01, 1.0)
    assert (optimizer.min_lr, optimizer.lr_decay_style) == (0.0, "linear")
    assert (optimizer.lr_warmup_iters, optimizer.lr_warmup_init) == (0, 0.0)
    assert optimizer.lr_decay_iters is None
    assert (options.data.split, options.data.data_cache_path) == ("969,30,1", None)
    assert options.parallel.pipeline_model_parallel_size == 1
    assert options.parallel.tensor_model_parallel_size == 1
    assert options.parallel.distributed_timeout_minutes == 10
    assert options.bamboo.bamboo_redundancy is Redundancy.LAZY


@pytest.mark.parametrize(
    ("flags", "width"),
    [
        ("", 256),
        ("--swiglu", 128),  # 170 and two thirds, down to a multiple of 64
        ("--swiglu --hidden-size 4096", 10880),
        ("--swiglu --ffn-hidden-size 100", 100),
        ("--ffn-hidden-size 100", 100),
    ],
)
def test_the_width_of_the_feed_forward_part(
    data_files: dict[str, str], flags: str, width: int
) -> None:
    assert read(data_files, flags).model.feed_forward_size == width


def test_only_our_own_flags_begin_with_bamboo() -> None:
    names = {
        field.name: group.name
        for group in dataclasses.fields(Options)
        if isinstance(group.type, type)
        for field in dataclasses.fields(group.type)
    }
    ours = {field.name for field in dataclasses.fields(BambooOptions)}
    assert {name for name in names if name.startswith("bamboo_")} == ours
    assert "global_batch_size" in names and "data_path" in names


@pytest.mark.parametrize(
    ("flags", "nodes", "layout"),
    [
        ("--pipeline-model-parallel-size 4 --global-batch-size 16", 8, (4, 2, 4, 16)),
        ("--pipeline-model-parallel-size 4", 8, (4, 2, 1, 4)),
        ("--pipeline-model-parallel-size 2 --global-batch-size 6", 6, (2, 3, 1, 6)),
        ("--bamboo-redundancy none --global-batch-size 8", 2, (1, 2, 2, 8)),
    ],
)
def test_the_layout_follows_from_flags_and_nodes(
    data_files: dict[str, str], flags: str, nodes: int, layout: tuple[int, int, int, int]
) -> None:
    found: Layout = check_options(read(data_files, flags), nodes)
    stages, pipelines, microbatches, batch = layout
    per_stage = read(data_files, flags).model.num_layers // stages
    assert found.arrangement == equal_pipelines(stages, pipelines, microbatches, per_stage)
    assert found.global_batch_size == batch


@pytest.mark.parametrize(
    ("flags", "restores"),
    [
        ("", False),
        ("--save x", True),
        ("--load x", True),
        ("--save x --bamboo-on-no-holder stop", False),
        ("--bamboo-on-no-holder restore", True),
    ],
)
def test_all_go_back_where_a_folder_is_given_or_it_is_wanted(
    data_files: dict[str, str], flags: str, restores: bool
) -> None:
    assert read(data_files, flags).restores == restores


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--num-layer 4", "there is no flag --num-layer; did you mean --num-layers?"),
        ("--bamboo-redundency eager", "did you mean --bamboo-redundancy?"),
        ("--zzz=1", "there is no flag --zzz"),
        ("stray", "stray is neither a flag nor the value of one"),
        ("--num-layers four", "--num-layers: invalid int value: 'four'"),
        ("--lr", "--lr: expected one argument"),
        ("--normalization BatchNorm", "--normalization: invalid choice: 'BatchNorm'"),
        ("--bamboo-redundancy always", "--bamboo-redundancy: invalid"),
        ("--tokenizer-type SentencePiece", "--tokenizer-type: invalid choice"),
        ("--lr-decay-style WSD", "--lr-decay-style: invalid choice"),
    ],
)
def test_a_bad_flag_is_one_line(data_files: dict[str, str], flags: str, message: str) -> None:
    assert message in refusal(data_files, flags, 1)


@pytest.mark.parametrize("name", [*REQUIRED, "vocab-file", "merge-file"])
def test_a_missing_flag_is_named(data_files: dict[str, str], name: str) -> None:
    values = REQUIRED | data_files
    del values[name]
    with pytest.raises(UserError, match=f"required: --{name}$"):
        parse_options(argv(values))


@pytest.mark.parametrize("flag", UNSUPPORTED)
def test_what_megatron_has_and_we_have_not_is_refused_by_name(
    data_files: dict[str, str], flag: str
) -> None:
    for value in ("", " 2"):
        line = refusal(data_files, flag + value, 1)
        assert line == f"{flag}: {UNSUPPORTED[flag]} is not supported yet; leave the flag out"


@pytest.mark.parametrize(
    ("flags", "nodes", "message"),
    [
        ("--save-interval 5", 1, "--save-interval does nothing without --save: give the folder"),
        ("--save x --save-interval 0", 1, "--save-interval must be at least 1, not 0"),
        ("--ckpt-step 5", 1, "--ckpt-step does nothing without --load: give the folder"),
        (
            "--exit-on-missing-checkpoint",
            1,
            "--exit-on-missing-checkpoint does nothing without --load: give the folder",
        ),
        ("--load=", 1, "--load: the name of the folder is empty"),
        (
            "--pipeline-model-parallel-size 3",
            3,
            "8 layers cannot be cut into 3 equal stages: make --num-layers a multiple",
        ),
        ("--pipeline-model-parallel-size 16", 16, "16 stages cannot share 8 layers: lower"),
        ("--pipeline-model-parallel-size 4", 6, "start 4 nodes or change"),
        ("--pipeline-model-parallel-size 4", 3, "start 4 nodes or change"),
        (
            "--pipeline-model-parallel-size 2 --global-batch-size 10",
            4,
            "--global-batch-size 10 does not divide into microbatches of 2 over 2 pipelines: "
            "make it a multiple of 4",
        ),
        ("--tensor-model-parallel-size 2", 2, "needs bamboo run --workers-per-node 2, not 1"),
        ("", 1, "use --bamboo-redundancy none or --pipeline-model-parallel-size 2 or more"),
        (
            "--bamboo-on-too-few wait --pipeline-model-parallel-size 2",
            2,
            "--bamboo-on-too-few wait saves first: add --save and the folder",
        ),
        (
            "--bamboo-on-too-few wait --save x --bamboo-redundancy none",
            1,
            "--bamboo-on-too-few wait is about pipelines with replicas: leave it out, or use",
        ),
        (
            "--bamboo-least-nodes 3 --pipeline-model-parallel-size 4",
            4,
            "--bamboo-least-nodes: with --bamboo-policy bamboo no node changes its pipeline; use",
        ),
        (
            "--bamboo-policy auto --bamboo-least-nodes 3 --pipeline-model-parallel-size 2",
            4,
            "--bamboo-least-nodes must be between 2 and 2, the stages of the shortest pipeline, "
            "not 3",
        ),
        (
            "--bamboo-policy oobleck --pipeline-model-parallel-size 2",
            2,
            "--bamboo-policy oobleck does without replicas: add --bamboo-redundancy none",
        ),
        (
            "--bamboo-policy checkpoint --bamboo-redundancy none --bamboo-on-no-holder stop",
            1,
            "--bamboo-policy checkpoint goes back to a checkpoint at each loss: leave out",
        ),
        (
            "--bamboo-mirror-gradients 2 --bamboo-redundancy none",
            1,
            "--bamboo-mirror-gradients needs replicas to send to: use --bamboo-redundancy lazy",
        ),
        (
            "--bamboo-mirror-gradients -1 --pipeline-model-parallel-size 2",
            2,
            "--bamboo-mirror-gradients must be between 0 and 16384, not -1",
        ),
        (
            "--bamboo-link-bandwidth 0 --pipeline-model-parallel-size 2",
            2,
            "--bamboo-link-bandwidth must be between 0.001 and 1e+06 MB/s, not 0",
        ),
        (
            "--bamboo-link-bandwidth 1250 --pipeline-model-parallel-size 2",
            2,
            "--bamboo-link-bandwidth needs to know what forwards and backwards take: give --bamboo",
        ),
        (
            "--bamboo-link-bandwidth 10 --pipeline-model-parallel-size 2 "
            "--transformer-impl emulated --bamboo-emulated-forward-ms 1 "
            "--bamboo-emulated-backward-ms 1",
            2,
            "--bamboo-link-bandwidth: with --transformer-impl emulated give --bamboo-emulated-band",
        ),
        (
            "--bamboo-max-deferred -1 --pipeline-model-parallel-size 2",
            2,
            "--bamboo-max-deferred must be between 0 and 16384, not -1",
        ),
        (
            "--bamboo-replica-memory host --pipeline-model-parallel-size 2",
            2,
            "--bamboo-replica-memory host is about forwards that run before a loss: use",
        ),
        (
            "--bamboo-verify-replicas -1 --pipeline-model-parallel-size 2",
            2,
            "--bamboo-verify-replicas must be between 0 and 2147483647, not -1",
        ),
        (
            "--bamboo-verify-replicas 5 --bamboo-redundancy none --pipeline-model-parallel-size 2",
            2,
            "--bamboo-verify-replicas has nothing to compare in one pipeline without replicas",
        ),
        ("--hidden-size 66", 1, "--hidden-size 66 must be a multiple of --num-attention-heads 4"),
        ("--seq-length 64", 1, "--seq-length 64 needs --max-position-embeddings of at least"),
        ("--swiglu --hidden-size 16", 1, "give --ffn-hidden-size"),
        ("--attention-dropout 1.0", 1, "--attention-dropout must be at least 0 and less than 1"),
        ("--hidden-dropout -0.1", 1, "--hidden-dropout must be at least 0"),
        ("--adam-beta2 1", 1, "--adam-beta2 must be at least 0 and less than 1"),
        ("--adam-eps 0", 1, "--adam-eps must be more than 0"),
        ("--norm-epsilon nan", 1, "--norm-epsilon must be more than 0"),
        ("--init-method-std -1", 1, "--init-method-std must be more than 0"),
        *(
            (
                f"--distributed-timeout-minutes {minutes}",
                1,
                f"must be between 0.01 and 10080 (a week), not {minutes}",
            )
            for minutes in ("0", "0.001", "10081", "1e+300", "nan", "inf")
        ),
        (
            "--num-layers 257 --pipeline-model-parallel-size 257",
            257,
            "--pipeline-model-parallel-size 257 is more than the 256 stages",
        ),
        (
            "--num-layers 66 --pipeline-model-parallel-size 2 "
            "--num-layers-per-virtual-pipeline-stage 1",
            2,
            "33 chunks are more than the 32 that a stage can have: raise",
        ),
        (
            "--pipeline-model-parallel-size 2 --global-batch-size 32770",
            2,
            "16385 microbatches are more than the 16384 that a pipeline can have: lower",
        ),
        (
            "--pipeline-model-parallel-size 2 --train-iters 1073741824",
            2,
            "1073741824 steps of 2 samples are more than 2147483647 samples: lower --train-iters",
        ),
        (
            "--position-embedding-type rope --hidden-size 20",
            1,
            "rope needs heads of an even width, not 5: change --hidden-size",
        ),
        ("--seed -1", 1, "--seed -1 must be at least 0"),
        ("--seed 4294967296", 1, "--seed 4294967296 must be at least 0 and below 2**32"),
        ("--min-lr 1", 1, "--lr must not be below --min-lr"),
        ("--lr nan", 1, "--lr must not be below"),
        ("--lr-warmup-init -1", 1, "--lr must not be below --min-lr or --lr-warmup-init"),
        ("--lr-warmup-iters -1", 1, "--lr-warmup-iters must not be negative"),
        ("--lr-warmup-iters 10", 1, "--lr-warmup-iters must be less than --lr-decay-iters"),
        ("--lr-decay-iters 0", 1, "--lr-decay-iters must be at least 1, not 0"),
        ("--clip-grad -1", 1, "--clip-grad and --weight-decay must not be negative"),
        ("--weight-decay nan", 1, "--clip-grad and --weight-decay must not be negative"),
    ],
)
def test_a_bad_value_is_one_line(
    data_files: dict[str, str], flags: str, nodes: int, message: str
) -> None:
    assert message in refusal(data_files, flags, nodes)


def test_the_gated_width_is_shared_too(data_files: dict[str, str]) -> None:
    flags = "--hidden-size 384 --num-attention-heads 384 --tensor-model-parallel-size 384"
    flags += " --pipeline-model-parallel-size 2"
    check_options(read(data_files, flags), 2, 384)
    with pytest.raises(UserError, match="tensor parallel size 384, not 1024"):
        check_options(read(data_files, f"{flags} --swiglu"), 2, 384)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[" * 100_000, "recursion"),
        (b"{}", "costs are an object like"),
        (b"\xa4", "can't decode byte 0xa4"),
        (b'{"forward": [1, 1, 1], "backward": 2}', "forward has costs of 3 stages, not of 2"),
        (None, "No such file or directory"),
    ],
)
def test_bad_costs_name_their_flag_once(
    data_files: dict[str, str], tmp_path: Path, content: bytes | None, message: str
) -> None:
    path = tmp_path / "costs.json"
    if content is not None:
        path.write_bytes(content)
    flags = f"--pipeline-model-parallel-size 2 --bamboo-costs {path}"
    line = refusal(data_files, flags, 2)
    assert message in line and line.count("--bamboo-costs") == 1


@pytest.mark.parametrize("flag", ["--data-path", "--vocab-file", "--merge-file", "--bamboo-costs"])
def test_a_path_that_is_too_long_is_one_line(data_files: dict[str, str], flag: str) -> None:
    line = refusal(data_files, f"--pipeline-model-parallel-size 2 {flag} {'x' * 300}", 2)
    assert line.startswith(flag) and "File name too long" in line


@pytest.mark.parametrize(
    "name", ["num-layers", "hidden-size", "make-vocab-size-divisible-by", "train-iters"]
)
def test_sizes_have_an_end(data_files: dict[str, str], name: str) -> None:
    line = refusal(data_files, f"--{name} {2**31}", 1)
    assert line == f"--{name} must be at most 2147483647, not 2147483648"


@pytest.mark.parametrize(
    "name",
    [
        *("num-layers", "hidden-size", "num-attention-heads", "ffn-hidden-size", "seq-length"),
        *("max-position-embeddings", "make-vocab-size-divisible-by", "micro-batch-size"),
        *("global-batch-size", "train-iters", "pipeline-model-parallel-size"),
        "tensor-model-parallel-size",
    ],
)
def test_sizes_are_at_least_one(data_files: dict[str, str], name: str) -> None:
    assert refusal(data_files, f"--{name} 0", 1) == f"--{name} must be at least 1, not 0"


@pytest.mark.parametrize(
    ("missing", "flag"),
    [
        ("text.bin", "--data-path"),
        ("text.idx", "--data-path"),
        ("vocab.json", "--vocab-file"),
        ("merges.txt", "--merge-file"),
    ],
)
def test_a_missing_file_is_named(
    data_files: dict[str, str], tmp_path: Path, missing: str, flag: str
) -> None:
    (tmp_path / missing).unlink()
    line = refusal(data_files, "--bamboo-redundancy none", 1)
    assert line.startswith(f"{flag}: there is no file {tmp_path / missing}; ")


def test_a_scripts_defaults_stand_where_no_flag_is_given(data_files: dict[str, str]) -> None:
    words = argv(REQUIRED | data_files)
    without = [word for word in words if word not in ("--lr", "1e-3")]
    defaults = {"lr": 0.25, "seed": 5}
    options, _ = parse_flags(without, args_defaults=defaults)
    assert (options.optimizer.lr, options.training.seed) == (0.25, 5)
    options, _ = parse_flags([*words, "--seed", "6"], args_defaults=defaults)
    assert (options.optimizer.lr, options.training.seed) == (1e-3, 6)


def test_what_a_script_adds_wrongly_is_one_line(data_files: dict[str, str]) -> None:
    words = argv(REQUIRED | data_files)
    with pytest.raises(UserError, match="args_defaults: there is no option learning_rate"):
        parse_flags(words, args_defaults={"learning_rate": 1.0})
    with pytest.raises(UserError, match=r"extra_args_provider: .*--lr"):
        parse_flags(words, lambda parser: parser.add_argument("--lr"))


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--bf16 --fp16", "--bf16 and --fp16: give one of them"),
        ("--loss-scale 8", "--loss-scale belongs to --bf16 or --fp16"),
        ("--bf16 --loss-scale 1e-40", "--loss-scale must be between"),
        ("--fp16 --loss-scale 1e39", "--loss-scale must be between"),
        ("--fp16 --min-loss-scale 0", "--initial-loss-scale must not be below --min-loss-scale"),
        ("--fp16 --initial-loss-scale 0.5", "--initial-loss-scale must not be below"),
        ("--fp16 --initial-loss-scale inf", "--initial-loss-scale must not be below"),
        ("--fp16 --loss-scale-window 0", "--loss-scale-window must be at least 1"),
        ("--fp16 --hysteresis 0", "--hysteresis must be at least 1"),
    ],
)
def test_precisions_that_cannot_be(data_files: dict[str, str], flags: str, line: str) -> None:
    assert line in refusal(data_files, f"{flags} --bamboo-redundancy none", 1)


def test_all_flags_that_are_not_supported_are_named_at_once(data_files: dict[str, str]) -> None:
    flags = "--num-experts 2 --overlap-param-gather --context-parallel-size 2"
    with pytest.raises(UserError) as raised:
        read(data_files, flags)
    for flag in ("--num-experts", "--overlap-param-gather", "--context-parallel-size"):
        assert f"{flag} (" in str(raised.value)


@pytest.mark.parametrize("flag", ["--log-interval 1", "--context-parallel-size 1"])
def test_a_flag_that_asks_for_what_happens_anyway_is_taken(
    data_files: dict[str, str], flag: str
) -> None:
    assert read(data_files, flag) == read(data_files)


EMULATED = "--bamboo-redundancy none --transformer-impl emulated"
EACH = "--bamboo-emulated-forward-ms 5 --bamboo-emulated-backward-ms"


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (EMULATED, "--transformer-impl emulated needs --bamboo-emulated-forward-ms"),
        (f"{EMULATED} {EACH} 0", "--bamboo-emulated-backward-ms 0: give a number above 0, or 8 of"),
        (f"{EMULATED} {EACH} nan", "--bamboo-emulated-backward-ms nan: give a number above 0"),
        (f"{EMULATED} {EACH} 1e9", "--bamboo-emulated-backward-ms 1e9: give a number above 0"),
        (f"{EMULATED} {EACH} ten", "--bamboo-emulated-backward-ms ten: give a number above 0"),
        (f"{EMULATED} {EACH} 1,2", "there are 2 times for 8 layers"),
        (
            f"--bamboo-redundancy none {EACH} 5",
            "--bamboo-emulated-backward-ms belongs to --transformer-impl emulated",
        ),
        (
            "--bamboo-redundancy none --bamboo-emulated-bandwidth 5",
            "--bamboo-emulated-bandwidth belongs to --transformer-impl emulated",
        ),
        (
            f"{EMULATED} {EACH} 5 --bamboo-emulated-bandwidth 0",
            "--bamboo-emulated-bandwidth must be between 0.001 and 1e+06 MB/s, not 0",
        ),
    ],
)
def test_times_belong_to_emulated_layers(data_files: dict[str, str], flags: str, line: str) -> None:
    assert line in refusal(data_files, flags, 1)


def test_layers_take_the_same_time_or_each_its_own() -> None:
    assert layer_seconds("50", 3) == (0.05, 0.05, 0.05)
    assert layer_seconds("10,20.5,1e2", 3) == (0.01, 0.0205, 0.1)


@pytest.mark.parametrize(("pipelines", "shards"), [(1, 1), (3, 3)])
def test_the_distributed_optimizer_has_a_shard_a_pipeline(
    data_files: dict[str, str], pipelines: int, shards: int
) -> None:
    flags = "--pipeline-model-parallel-size 2 --global-batch-size 12"
    options = read(data_files, f"{flags} --use-distributed-optimizer")
    assert check_options(options, 2 * pipelines).num_shards == shards
    assert check_options(read(data_files, flags), 2 * pipelines).num_shards == 1


def test_evaluations_are_asked_for_by_megatrons_flags(data_files: dict[str, str]) -> None:
    assert read(data_files).evaluations.is_empty
    assert read(data_files, "--eval-interval 10").evaluations.num_batches == 100
    asked = read(data_files, "--eval-interval 10 --eval-iters 5").evaluations
    assert (asked.interval, asked.num_batches) == (10, 5)
    assert read(data_files, "--eval-interval 10 --eval-iters 0").evaluations.is_empty


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--eval-iters 5", "--eval-iters does nothing without --eval-interval: give it too"),
        ("--eval-interval 0", "--eval-interval must be at least 1, not 0"),
        ("--eval-interval 1 --eval-iters -1", "--eval-iters must be at least 1, not -1"),
        ("--eval-interval 1 --eval-iters 2147483647", "raise --eval-interval or lower"),
    ],
)
def test_evaluations_that_cannot_be(data_files: dict[str, str], flags: str, line: str) -> None:
    assert line in refusal(data_files, f"{flags} --bamboo-redundancy none", 1)


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--train-data-path TEXT", "--data-path holds all samples: leave it out"),
        ("--valid-data-path TEXT", "--data-path holds all samples: leave it out"),
    ],
)
def test_samples_are_in_one_place_or_in_several(
    data_files: dict[str, str], flags: str, line: str
) -> None:
    text = data_files["data-path"]
    assert line in refusal(data_files, f"{flags.replace('TEXT', text)} --bamboo-redundancy none", 1)


def test_each_part_may_have_files_of_its_own(data_files: dict[str, str]) -> None:
    text = data_files.pop("data-path")
    apart = f"--bamboo-redundancy none --train-data-path {text}"
    assert read(data_files, apart).data.training_prefix == text
    assert check_options(read(data_files, apart), 1).num_shards == 1
    evaluated = f"{apart} --eval-interval 2"
    assert "needs --valid-data-path" in refusal(data_files, evaluated, 1)
    both = read(data_files, f"{evaluated} --valid-data-path {text}")
    assert both.data.prefixes_apart == (text, None)
    assert check_options(both, 1).num_shards == 1
    missing = f"{evaluated} --valid-data-path {text}-none"
    assert "--valid-data-path: there is no file" in refusal(data_files, missing, 1)
    assert "give --data-path or --train-data-path" in refusal(
        data_files, "--bamboo-redundancy none", 1
    )
