"""Which checkpoints a run may go on from, and what is said of the others in one line."""

from argparse import Namespace
from pathlib import Path

import pytest
import torch
from gpt_parts import VOCAB_SIZE, MakeGpt
from megatron.core import dist_checkpointing
from test_state import trained

from megatron_bamboo.checkpoint.common import check_continues, common_state, plain_args
from megatron_bamboo.checkpoint.folder import TRACKER, step_folder
from megatron_bamboo.checkpoint.start import prepare_checkpoints
from megatron_bamboo.checkpoint.state import sharded_state
from megatron_bamboo.checkpoint.strategy import PlainSaveStrategy
from megatron_bamboo.config import CheckpointOptions
from megatron_bamboo.errors import UserError
from megatron_bamboo.script.args import make_args

STEP = 10


@pytest.fixture
def args(gpt: MakeGpt) -> Namespace:
    made = gpt()
    return plain_args(make_args(made.options, made.layout, VOCAB_SIZE, {"odd": object()}))


@pytest.fixture
def root(gpt: MakeGpt, args: Namespace, tmp_path: Path) -> Path:
    """A folder with a checkpoint of step 10."""
    folder = step_folder(tmp_path / "save", STEP)
    folder.mkdir(parents=True)
    state = common_state(args, STEP, {"num_steps": 20}, [], order) | sharded_state(trained(gpt()))
    dist_checkpointing.save(state, str(folder), PlainSaveStrategy(lambda: None))
    (folder.parent / TRACKER).write_text(str(STEP))
    return folder.parent


def order(num_samples: int) -> str:
    """Tells the order of the samples."""
    return f"the first {num_samples}"


def start(root: Path, args: Namespace, **more: object) -> int:
    return prepare_checkpoints(CheckpointOptions(load=str(root), **more), args, order).step


def changed(args: Namespace, **values: object) -> Namespace:
    return Namespace(**vars(args) | values)


def test_the_common_part_is_megatrons_and_plain(root: Path, args: Namespace) -> None:
    common = torch.load(step_folder(root, STEP) / "common.pt", weights_only=True)
    assert (common["iteration"], common["checkpoint_version"]) == (10, 3.0)
    assert common["args"].consumed_train_samples == 10 * args.global_batch_size
    assert common["args"].add_bias_linear is True
    assert not hasattr(common["args"], "odd")


def test_the_tracker_says_where_to_go_on(root: Path, args: Namespace) -> None:
    assert start(root, args) == 10
    assert start(root, args, ckpt_step=10) == 10
    assert start(root, changed(args, lr=5.0, train_iters=99, micro_batch_size=7)) == 10
    (root / TRACKER).unlink()
    assert start(root, args) == 0
    assert start(root, args, ckpt_step=10) == 10
    assert start(root / "none", args) == 0
    with pytest.raises(UserError, match="--exit-on-missing-checkpoint"):
        start(root / "none", args, exit_on_missing_checkpoint=True)
    with pytest.raises(UserError, match=r"there is no .*iter_0000020"):
        start(root, args, ckpt_step=20)


def test_saving_where_something_newer_is_kept_is_refused(root: Path, args: Namespace) -> None:
    options = CheckpointOptions(save=str(root))
    with pytest.raises(UserError, match="holds step 10, but this run starts from step 0"):
        prepare_checkpoints(options, args, order)
    options = CheckpointOptions(save=str(root), load=str(root))
    assert prepare_checkpoints(options, args, order).step == 10
    (root / TRACKER).write_text("5")
    step_folder(root, 10).rename(step_folder(root, 5))
    with pytest.raises(UserError, match="is not a checkpoint of step 5"):
        start(root, args)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_layers": 5}, "--num-layers: .*iter_0000010 was saved with num_layers 4, not 5"),
        ({"hidden_size": 64}, "--hidden-size: .*give 32"),
        ({"swiglu": True, "ffn_hidden_size": 64}, "--swiglu: "),
        ({"add_bias_linear": False}, "--disable-bias-linear: "),
        ({"untie_embeddings_and_output_weights": True}, "--untie-embeddings-and-output-weights: "),
        ({"padded_vocab_size": 256}, "padded to 128, this run one of 256: .*--vocab-file"),
        ({"seed": 1}, "--seed: .*give 1234"),
        ({"seq_length": 8}, "--seq-length: "),
        ({"global_batch_size": 4}, "--global-batch-size 4: .* 20 samples in 10 steps.*give 2"),
    ],
    ids=str,
)
def test_another_model_or_order_of_samples_is_refused(
    root: Path, args: Namespace, change: dict[str, object], said: str
) -> None:
    with pytest.raises(UserError, match=said) as raised:
        start(root, changed(args, **change))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["common.pt", ".metadata", "__0_0.distcp"])
@pytest.mark.parametrize("kept", [0, 0.5, 0.99])
def test_a_damaged_file_is_refused(root: Path, args: Namespace, name: str, kept: float) -> None:
    path = step_folder(root, STEP) / name
    content = path.read_bytes()
    path.write_bytes(content[: int(kept * len(content))])
    with pytest.raises(UserError, match=rf"{name}") as raised:
        check_continues(path.parent, STEP, args, order)
    assert "\n" not in str(raised.value)


def test_a_missing_data_file_and_foreign_optimizer_state_are_refused(
    gpt: MakeGpt, root: Path, args: Namespace
) -> None:
    folder = step_folder(root, STEP)
    (folder / "__0_0.distcp").rename(root / "elsewhere")
    with pytest.raises(UserError, match=r"__0_0.distcp is missing"):
        check_continues(folder, STEP, args, order)
    other = root / "iter_0000020"
    other.mkdir()
    weights = gpt().stage(0).chunks[0].sharded_state_dict()
    dist_checkpointing.save(
        common_state(args, 20, {"num_steps": 40}, [], order) | {"model": weights},
        str(other),
        PlainSaveStrategy(lambda: None),
    )
    with pytest.raises(UserError, match="no optimizer state that can be used here"):
        check_continues(other, 20, args, order)


def test_other_samples_or_another_order_are_refused(root: Path, args: Namespace) -> None:
    options = CheckpointOptions(load=str(root))
    with pytest.raises(UserError, match=r"has seen other samples.*--data-path.*--train-iters"):
        prepare_checkpoints(options, args, lambda num_samples: "others")
