"""The namespace that Megatron's scripts know as ``args``."""

from dataclasses import fields
from pathlib import Path

import pytest

from megatron_bamboo.config import Options, check_options, parse_flags, parse_options
from megatron_bamboo.script.args import make_args


@pytest.fixture
def flags(tmp_path: Path) -> str:
    for name in ("text.bin", "text.idx", "vocab.json", "merges.txt"):
        (tmp_path / name).touch()
    shape = "--num-layers 8 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --lr 1e-3"
    shape += " --max-position-embeddings 8 --micro-batch-size 1 --train-iters 1"
    files = f"--data-path {tmp_path}/text --vocab-file {tmp_path}/vocab.json"
    return f"{shape} {files} --merge-file {tmp_path}/merges.txt --bamboo-redundancy none"


def test_every_option_is_there_by_its_name(flags: str) -> None:
    options = parse_options(flags.split())
    args = make_args(options, check_options(options, 1), 300, {"mine": 7})
    changed = {"data_path", "global_batch_size", "ffn_hidden_size", "eval_iters"}
    for group in fields(Options):
        values = getattr(options, group.name)
        for field in fields(values):
            if field.name not in changed:
                assert getattr(args, field.name) == getattr(values, field.name)
    assert args.data_path == [options.data.data_path]
    assert (args.global_batch_size, args.ffn_hidden_size, args.mine) == (1, 32, 7)
    assert args.eval_iters == 0


@pytest.mark.parametrize(
    ("more", "nodes", "workers", "expected"),
    [
        ("", 3, 1, (3, 3, None, 384)),
        ("--pipeline-model-parallel-size 2", 6, 1, (3, 6, None, 384)),
        (
            "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2",
            4,
            1,
            (2, 4, 2, 384),
        ),
        # The vocabulary is padded to a multiple for each of the workers that share layers.
        ("--tensor-model-parallel-size 2", 2, 2, (2, 4, None, 512)),
    ],
)
def test_what_follows_from_the_options(
    flags: str, more: str, nodes: int, workers: int, expected: tuple[object, ...]
) -> None:
    options = parse_options(f"{flags} {more}".split())
    args = make_args(options, check_options(options, nodes, workers), 300, {})
    assert expected == (
        args.data_parallel_size,
        args.world_size,
        args.virtual_pipeline_model_parallel_size,
        args.padded_vocab_size,
    )


def test_a_scripts_own_flags_come_apart_from_the_options(flags: str) -> None:
    def more_args(parser):
        parser.add_argument_group("mine").add_argument("--my-rate", type=float, default=0.5)
        return parser

    options, extras = parse_flags([*flags.split(), "--my-rate", "2"], more_args)
    assert extras == {"my_rate": 2.0}
    assert options == parse_options(flags.split())
    assert parse_flags(flags.split(), more_args)[1] == {"my_rate": 0.5}
