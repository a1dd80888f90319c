import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch
from safetensors.torch import load_file, save_file
from saved_state import LOSSES, Losses, save_job, save_losses, save_state

from megatron_bamboo.cli import main as bamboo
from megatron_bamboo.errors import UserError
from megatron_bamboo.observe.compare import compare_runs

METADATA = {
    "pipeline": "0",
    "stage": "0",
    "role": "primary",
    "step": "2",
    "loss_scale": (1.0).hex(),
}


def flip_bit(path: Path, name: str, byte: int, bit: int = 0) -> None:
    """Change one bit of one tensor on disk."""
    tensors = load_file(path)
    raw = tensors[name].reshape(-1).view(torch.uint8).numpy()
    raw[byte] ^= numpy.uint8(1 << bit)
    save_file({key: tensor.clone() for key, tensor in tensors.items()}, path, METADATA)


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    """An undisturbed run with two holders, and one that lost a node."""
    undisturbed, disturbed = tmp_path / "undisturbed", tmp_path / "disturbed"
    save_state(undisturbed, "node0-stage0-primary")
    save_state(undisturbed, "node1-stage0-primary")
    save_state(disturbed, "node1-stage0-replica")
    for folder in (undisturbed, disturbed):
        save_job(folder)
        save_losses(folder, LOSSES)
    return undisturbed, disturbed


def test_equal_runs(runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    comparison = compare_runs(*runs)
    assert (comparison.num_tensors, comparison.num_copies, comparison.num_losses) == (7, 21, 2)
    assert comparison.equal and comparison.num_elements == 6 * 12 + 1
    assert bamboo(["compare", *map(str, runs)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "equal bit for bit"


@pytest.mark.parametrize("name", ["layer0/mlp.bias/parameter", "embedding/word.weight/exp_avg"])
@pytest.mark.parametrize("bit", [0, 7])
def test_one_flipped_bit_is_seen(
    runs: tuple[Path, Path], name: str, bit: int, capsys: pytest.CaptureFixture[str]
) -> None:
    flip_bit(runs[1] / "state" / "node1-stage0-replica.safetensors", name, byte=4, bit=bit)
    comparison = compare_runs(*runs)
    (difference,) = comparison.tensors
    assert (difference.name, difference.elements, difference.bits) == (name, 1, 1)
    assert difference.max_abs > 0
    assert comparison.losses_equal and not comparison.parameters_equal
    assert bamboo(["compare", *map(str, runs)]) == 1
    assert f"  {name}: 1 elements" in capsys.readouterr().out


def test_a_holder_that_disagrees_within_its_run_is_seen(runs: tuple[Path, Path]) -> None:
    flip_bit(runs[0] / "state" / "node1-stage0-primary.safetensors", "layer0/mlp.bias/parameter", 0)
    comparison = compare_runs(*runs)
    assert not comparison.tensors and len(comparison.copies) == 1
    assert not comparison.equal and "node1" in comparison.copies[0].second


def test_the_sign_of_zero_counts_and_equal_nans_do_not(runs: tuple[Path, Path]) -> None:
    for value, is_equal in ((float("nan"), True), (-0.0, False)):
        for folder, number in zip(runs, (value if is_equal else 0.0, value), strict=True):
            for path in (folder / "state").glob("*.safetensors"):
                tensors = load_file(path) | {"layer0/x/parameter": torch.full((2,), number)}
                save_file(tensors, path, METADATA)
        assert compare_runs(*runs).equal is is_equal


@pytest.mark.parametrize(
    "losses",
    [
        {1: (7.25, 3.1), 2: (7.0 + 2**-50, 0.1)},
        {1: (7.25, 3.1 + 2**-50), 2: (7.0, 0.1)},
    ],
    ids=["loss", "norm"],
)
def test_losses_count_to_the_last_bit(runs: tuple[Path, Path], losses: Losses) -> None:
    save_losses(runs[1], losses)
    comparison = compare_runs(*runs)
    assert comparison.parameters_equal and not comparison.losses_equal
    assert len(comparison.steps) == 1


def add_evaluation(folder: Path, loss: float, **more: int) -> None:
    line = {"evaluated": "interval", "step": 2, "losses": {"lm loss": loss.hex()}, **more}
    with (folder / "losses.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def test_losses_of_evaluations_count_where_both_have_them(
    runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    add_evaluation(runs[0], 2.5)
    assert (compare_runs(*runs).equal, compare_runs(*runs).num_evaluations) == (True, 0)
    add_evaluation(runs[1], 2.5 + 2**-50)
    comparison = compare_runs(*runs)
    assert comparison.evaluations == ("the interval evaluation of step 2",)
    assert comparison.parameters_equal and not comparison.losses_equal
    assert bamboo(["compare", *map(str, runs)]) == 1
    assert "evaluated              1           1" in capsys.readouterr().out
    add_evaluation(runs[1], 2.5, again=1)  # since all went back to a checkpoint
    assert compare_runs(*runs).equal
    add_evaluation(runs[1], 2.5)
    with pytest.raises(UserError, match="line 5 is not a step's losses"):
        compare_runs(*runs)


def test_a_missing_tensor_another_shape_and_another_scale_are_differences(
    runs: tuple[Path, Path],
) -> None:
    path = runs[1] / "state" / "node1-stage0-replica.safetensors"
    tensors = load_file(path)
    del tensors["layer0/mlp.bias/exp_avg"]
    tensors["layer0/mlp.bias/parameter"] = tensors["layer0/mlp.bias/parameter"].reshape(4, 3)
    save_file(tensors, path, METADATA | {"loss_scale": (2.0).hex()})
    names = [difference.name for difference in compare_runs(*runs).tensors]
    assert names == ["layer0/mlp.bias/exp_avg", "layer0/mlp.bias/parameter", "loss_scale"]


def break_folder(folder: Path) -> None:
    folder.rename(folder.with_name("gone"))


def break_state(folder: Path) -> None:
    for path in (folder / "state").iterdir():
        path.unlink()


def break_file(folder: Path) -> None:
    next((folder / "state").iterdir()).write_bytes(b"\x00" * 20)


def break_step(folder: Path) -> None:
    save_state(folder, "node1-stage0-replica", step=3)


def break_within(folder: Path) -> None:
    save_state(folder, "node2-stage0-replica", step=3)


def break_scale(folder: Path) -> None:
    save_state(folder, "node1-stage0-replica", loss_scale="much")


def break_job(folder: Path) -> None:
    (folder / "job.json").unlink()


def spoil_job(folder: Path) -> None:
    (folder / "job.json").write_bytes(b"\xff\xfe")


def add_stage(folder: Path) -> None:
    save_job(folder, num_layers=2)


def add_tensor_rank(folder: Path) -> None:
    save_job(folder, tensor_size=2)


def lose_losses(folder: Path) -> None:
    save_losses(folder, {1: (7.25, 3.1)})


def add_losses(folder: Path) -> None:
    save_losses(folder, LOSSES | {3: (6.0, 1.0)})


def double_losses(folder: Path) -> None:
    path = folder / "losses.jsonl"
    path.write_text(path.read_text(encoding="utf-8") * 2, encoding="utf-8")


@pytest.mark.parametrize(
    ("break_run", "message"),
    [
        (break_folder, "no such job folder"),
        (break_state, "no saved tensors"),
        (break_file, "cannot read"),
        (break_step, "not whole: its state is of step 3, its last is 2"),
        (break_scale, "loss scale 'much', which is no number"),
        (break_job, "no usable job.json: give the --job-dir"),
        (spoil_job, "no usable job.json: give the --job-dir"),
        (add_stage, "state has no file with unit layer1;"),
        (add_tensor_rank, "state has no file with unit embedding and tensor rank 0"),
        (lose_losses, "losses.jsonl lacks step 2 of 2"),
        (add_losses, "losses.jsonl has step 3, but the job has steps 1 to 2"),
        (break_within, "different steps: 2, 3"),
        (double_losses, "step 1 twice"),
    ],
)
def test_unusable_input_is_status_two(
    runs: tuple[Path, Path],
    break_run: Callable[[Path], None],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    break_run(runs[1])
    assert bamboo(["compare", *map(str, runs)]) == 2
    assert message in capsys.readouterr().err


def test_of_steps_done_again_the_last_time_counts(runs: tuple[Path, Path]) -> None:
    path = runs[1] / "losses.jsonl"
    first, second = path.read_text(encoding="utf-8").splitlines()
    undone = {"step": 2, "loss": "0x1.8p3", "grad_norm": "0x1p0"}
    again = json.loads(second) | {"again": 1}
    lines = [first, json.dumps(undone), json.dumps(again)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert compare_runs(*runs).equal
    path.write_text("\n".join([*lines, lines[-1]]) + "\n", encoding="utf-8")
    with pytest.raises(UserError, match="step 2 twice"):
        compare_runs(*runs)


@pytest.mark.parametrize(
    "content",
    [
        b'{"step": 1, "loss": "ham"}',
        b"\xff\xfe",
        b'{"step": 1e999, "loss": "0x1p1", "grad_norm": "0x1p1"}',
        b'{"step": 1, "loss": "0x1p99999", "grad_norm": "0x1p1"}',
        b"[" * 100_000,
        b"[]",
    ],
    ids=["half", "binary", "infinite step", "huge", "deep", "list"],
)
def test_malformed_losses_are_one_line(
    runs: tuple[Path, Path], content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    (runs[1] / "losses.jsonl").write_bytes(content)
    assert bamboo(["compare", *map(str, runs)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "line 1 is not a step's losses" in line or "cannot read" in line


def test_runs_of_other_lengths_are_not_compared(
    runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    save_job(runs[1], train_iters=3)
    save_state(runs[1], "node1-stage0-replica", step=3)
    save_losses(runs[1], LOSSES | {3: (6.0, 1.0)})
    assert bamboo(["compare", *map(str, runs)]) == 2
    assert "at step 2" in capsys.readouterr().err


def test_a_run_that_went_on_from_a_checkpoint_is_compared_by_its_own_steps(
    runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    save_job(runs[1], start_step=1)
    save_losses(runs[1], {2: LOSSES[2]})
    for pair in (runs, runs[::-1]):
        comparison = compare_runs(*pair)
        assert (comparison.equal, comparison.num_losses) == (True, 1)
    assert bamboo(["compare", *map(str, runs)]) == 0
    assert "losses of steps 1 to 1 not compared: one run has them" in capsys.readouterr().out
    save_losses(runs[1], {2: (LOSSES[2][0], 0.2)})
    assert compare_runs(*runs).steps == (2,)


@pytest.mark.parametrize("steps", [(1, 2), ()])
def test_a_run_has_exactly_the_steps_after_its_checkpoint(
    runs: tuple[Path, Path], steps: tuple[int, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    save_job(runs[1], start_step=1)
    save_losses(runs[1], {step: LOSSES[step] for step in steps})
    assert bamboo(["compare", *map(str, runs)]) == 2
    assert ("has step 1" if steps else "not a step's losses") in capsys.readouterr().err


def split_moments(folder: Path, *cuts: int) -> None:
    """Save the moments of the only file in parts, each in a file of its own."""
    (path,) = (folder / "state").glob("*.safetensors")
    tensors = load_file(path)
    moments = [name for name in tensors if name.endswith("/exp_avg")]
    rest = {name: tensors[name] for name in tensors if name not in moments}
    for start, end in itertools.pairwise((0, *cuts, 12)):
        parts = {f"{name}@{start}": tensors[name].reshape(-1)[start:end] for name in moments}
        save_file(rest | parts, path.with_stem(f"node{start}-stage0-primary"), METADATA)
    path.unlink()


def test_moments_in_parts_are_equal_to_whole_ones(runs: tuple[Path, Path]) -> None:
    split_moments(runs[1], 5, 7)
    comparison = compare_runs(*runs)
    assert comparison.equal
    assert (comparison.num_tensors, comparison.num_elements) == (7, 6 * 12 + 1)


def test_a_bit_of_a_part_is_seen_between_runs_and_between_copies(runs: tuple[Path, Path]) -> None:
    split_moments(runs[1], 5)
    name = "embedding/word.weight/exp_avg"
    part = runs[1] / "state" / "node5-stage0-primary.safetensors"
    copy = part.with_stem("node9-stage0-replica")
    shutil.copy(part, copy)
    flip_bit(copy, f"{name}@5", byte=8)
    comparison = compare_runs(*runs)
    assert [d.name for d in comparison.copies] == [name] and not comparison.tensors
    shutil.copy(copy, part)
    comparison = compare_runs(*runs)
    assert not comparison.copies
    assert [(d.name, d.bits) for d in comparison.tensors] == [(name, 1)]


def test_a_missing_part_is_no_whole_run(
    runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    split_moments(runs[1], 5, 7)
    (runs[1] / "state" / "node5-stage0-primary.safetensors").unlink()
    assert bamboo(["compare", *map(str, runs)]) == 2
    assert "it has 5 of 12 elements" in capsys.readouterr().err
