"""A run that goes on from a checkpoint has the bits of one that was never interrupted."""

from pathlib import Path

import pytest
from forked_jobs import FinishedJob
from in_ci import in_ci
from scenario_runner import ScenarioRunner
from tiny_gpt import Shape

from megatron_bamboo.observe.compare import compare_runs, format_comparison
from megatron_bamboo.observe.saved_run import open_run

pytestmark = pytest.mark.multiprocess

SAVED_STEP = 3


def save(
    scenarios: ScenarioRunner,
    shape: Shape,
    root: Path,
    *injections: str,
    more: tuple[str, ...] = (),
) -> FinishedJob:
    """A run that leaves a checkpoint of step 3."""
    flags = ("--save", str(root), "--save-interval", str(SAVED_STEP), *more)
    job = scenarios.run(shape, "lazy", *injections, more_flags=flags)
    assert job.result.status == 0, job.result.message
    return job


def go_on(
    scenarios: ScenarioRunner,
    shape: Shape,
    root: Path,
    *injections: str,
    more: tuple[str, ...] = (),
) -> FinishedJob:
    """A run that goes on from there."""
    flags = ("--load", str(root), "--ckpt-step", str(SAVED_STEP), *more)
    job = scenarios.run(shape, "lazy", *injections, more_flags=flags)
    assert job.result.status == 0, job.result.message
    assert any(f"loaded step 3 from {root}" in line for line in job.result.lines)
    return job


def differences(undisturbed: Path, job: FinishedJob) -> str:
    """What the comparison says; empty if steps 4 to 7 and the state are equal bit for bit."""
    comparison = compare_runs(undisturbed, job.job_dir)
    is_equal = comparison.equal and comparison.num_losses == 4
    return "" if is_equal else format_comparison(comparison)


SHAPES = (
    Shape(2, 2),
    Shape(2, 1, num_chunks=2),
    Shape(2, 1, tensor_size=2, variant="sequence-parallel"),
    Shape(2, 1, variant="untied-rope"),
    Shape(2, 1, variant="bf16"),
    # The steps before the save are skipped, one after it too.
    Shape(2, 2, variant="fp16"),
    Shape(2, 2, variant="zero-bf16", num_chunks=2),
)


@pytest.mark.parametrize("shape", in_ci(SHAPES, SHAPES[2], SHAPES[6]), ids=str)
def test_a_restart_changes_no_bit(scenarios: ScenarioRunner, tmp_path: Path, shape: Shape) -> None:
    save(scenarios, shape, tmp_path / "save")
    job = go_on(scenarios, shape, tmp_path / "save")
    assert differences(scenarios.undisturbed(shape), job) == ""


@pytest.mark.parametrize("variant", in_ci(["", "untied-rope"], ""))
def test_losses_before_the_save_and_after_the_restart_change_no_bit(
    scenarios: ScenarioRunner, tmp_path: Path, variant: str
) -> None:
    shape = Shape(2, 2, variant=variant)
    save(scenarios, shape, tmp_path / "save", "node3@iter2:1.0B1")
    job = go_on(scenarios, shape, tmp_path / "save", "node0@iter4:0.0F0", "node3@iter6:1.0B2")
    assert differences(scenarios.undisturbed(shape), job) == ""


def test_four_stages_go_on_as_two_with_two_chunks_each(
    scenarios: ScenarioRunner, tmp_path: Path
) -> None:
    save(scenarios, Shape(2, 1, num_chunks=2), tmp_path / "save")
    job = go_on(scenarios, Shape(4, 1), tmp_path / "save")
    assert differences(scenarios.undisturbed(Shape(4, 1)), job) == ""


@pytest.mark.parametrize(
    ("before", "after", "more"),
    [
        (Shape(2, 2), Shape(2, 1, num_microbatches=8), ""),
        (Shape(2, 1), Shape(2, 1, tensor_size=2), "--make-vocab-size-divisible-by 64"),
        (Shape(2, 1, tensor_size=2), Shape(2, 1), "--make-vocab-size-divisible-by 256"),
    ],
    ids=str,
)
def test_another_layout_goes_on_with_the_same_losses_but_for_rounding(
    scenarios: ScenarioRunner, tmp_path: Path, before: Shape, after: Shape, more: str
) -> None:
    no_dropout = ("--attention-dropout", "0", "--hidden-dropout", "0")
    first = save(scenarios, before, tmp_path / "save", more=no_dropout)
    second = go_on(scenarios, after, tmp_path / "save", more=(*no_dropout, *more.split()))
    before_losses, after_losses = open_run(first.job_dir).losses, open_run(second.job_dir).losses
    assert list(after_losses) == [4, 5, 6, 7]
    for step, (loss, _) in after_losses.items():
        expected = float.fromhex(before_losses[step][0])
        assert float.fromhex(loss) == pytest.approx(expected, rel=1e-4), step


def test_a_checkpoint_whose_content_is_damaged_ends_the_job_with_a_reason(
    scenarios: ScenarioRunner, tmp_path: Path
) -> None:
    shape, root = Shape(2, 1), tmp_path / "save"
    save(scenarios, shape, root)
    data = root / "iter_0000003" / "__0_0.distcp"
    content = bytearray(data.read_bytes())
    content[:4096] = bytes(4096)
    data.write_bytes(content)
    flags = ("--load", str(root), "--ckpt-step", "3")
    job = scenarios.run(shape, "lazy", more_flags=flags)
    assert (job.result.status, job.result.lost) == (1, [])
    assert "step 3 cannot be loaded from" in job.result.message
    assert len(job.result.message.splitlines()) == 1


def test_a_script_can_be_started_again_and_again(scenarios: ScenarioRunner, tmp_path: Path) -> None:
    shape, root = Shape(2, 1), tmp_path / "save"
    flags = ("--save", str(root), "--load", str(root))
    first = scenarios.run(shape, "lazy", more_flags=flags)
    launched = (Path(first.request.folder) / "launcher.log").read_text()
    assert f"--load {root} holds no checkpoint: training starts anew" in launched
    assert [path.name for path in root.glob("iter_*")] == ["iter_0000007"]
    again = scenarios.run(shape, "lazy", more_flags=flags)
    assert again.result.status == 0
    assert list(again.result.lines) == [f"nothing to train: {root} holds step 7 already"]
    third = scenarios.run(shape, "lazy", more_flags=("--save", str(root)))
    assert third.result.status == 2
