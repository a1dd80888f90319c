"""A node dies at each moment of a save: the save is done anew, and no checkpoint is lost [9].

With two pipelines stage 0 is written by node0, which leads, and stage 1 by node3.
"""

import os
import signal
import time
from pathlib import Path

import pytest
from evidence import Expected
from in_ci import in_ci, several_in_ci
from saved_checkpoints import TRACKER, complaints
from scenario_runner import ScenarioRunner
from tiny_gpt import Shape

from megatron_bamboo.checkpoint.moments import SaveMoment
from megatron_bamboo.observe.compare import compare_runs

pytestmark = pytest.mark.multiprocess

SHAPE = Shape(2, 2)
ALONE = Shape(2, 1)
LEAD, OTHER_WRITER, NO_WRITER = "node0", "node3", "node2"
SAVED_STEPS = (3, 6, 7)
CASES = [
    *(((LEAD,), moment, 3) for moment in SaveMoment),
    ((OTHER_WRITER,), SaveMoment.BEGIN, 3),
    ((OTHER_WRITER,), SaveMoment.WRITE, 3),
    ((NO_WRITER,), SaveMoment.BEGIN, 3),
    ((LEAD, OTHER_WRITER), SaveMoment.WRITE, 3),
    # After the last step: whoever has the outcome first ends, and leaves the others to a takeover.
    ((LEAD,), SaveMoment.WRITE, 7),
    ((LEAD,), SaveMoment.TELL, 7),
]


def save_flags(root: Path) -> tuple[str, ...]:
    return ("--save", str(root), "--save-interval", "3")


@pytest.fixture(scope="module")
def undisturbed_save(scenarios: ScenarioRunner, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a run without redundancy and without a loss saves."""
    return saved_by(scenarios, tmp_path_factory.mktemp("undisturbed"), SHAPE)


@pytest.fixture(scope="module")
def saved_alone(scenarios: ScenarioRunner, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of one pipeline, whose state no other has."""
    return saved_by(scenarios, tmp_path_factory.mktemp("undisturbed"), ALONE)


def saved_by(scenarios: ScenarioRunner, folder: Path, shape: Shape) -> Path:
    root = folder / "save"
    job = scenarios.run(shape, "none", more_flags=save_flags(root))
    assert scenarios.complaints(job, Expected(shape, "none", ())) == []
    return root


@pytest.mark.parametrize(("victims", "moment", "step"), several_in_ci(CASES, *CASES[1::3]), ids=str)
def test_a_loss_in_a_save_is_survived(
    scenarios: ScenarioRunner,
    undisturbed_save: Path,
    tmp_path: Path,
    victims: tuple[str, ...],
    moment: SaveMoment,
    step: int,
) -> None:
    root = tmp_path / "save"
    injections = [f"{victim}@iter{step}:{moment}" for victim in victims]
    job = scenarios.run(SHAPE, "lazy", *injections, more_flags=save_flags(root))
    said = [line.split("] ")[1] for line in job.result.lines if "saved step" in line]
    assert [line.split()[2] for line in said] == [str(step) for step in SAVED_STEPS]
    assert scenarios.complaints(job, Expected(SHAPE, "lazy", victims)) == []
    assert list(complaints(root, SAVED_STEPS, undisturbed_save)) == []


@pytest.mark.parametrize("moment", in_ci(SaveMoment, SaveMoment.TELL))
def test_a_job_that_ends_in_a_save_goes_on_when_it_is_started_again(
    scenarios: ScenarioRunner, saved_alone: Path, tmp_path: Path, moment: SaveMoment
) -> None:
    root = tmp_path / "save"
    flags = (*save_flags(root), "--load", str(root))
    stops = (*flags, "--bamboo-on-no-holder", "stop")
    first = scenarios.run(ALONE, "none", f"{LEAD}@iter6:{moment}", more_flags=stops)
    is_published = moment in (SaveMoment.END, SaveMoment.TELL)
    assert first.result.status == 3
    assert f"--load {root}, which holds step 3" in first.result.message
    again = scenarios.run(ALONE, "none", more_flags=flags)
    assert again.result.status == 0, again.result.message
    aside = root / "iter_0000006.unpublished-1"
    assert aside.is_dir() == (moment is SaveMoment.TRACK)
    if aside.is_dir():
        os.rename(aside, tmp_path / "aside")
    comparison = compare_runs(scenarios.undisturbed(ALONE), again.job_dir)
    assert (comparison.equal, comparison.num_losses) == (True, 1 if is_published else 4)
    assert list(complaints(root, SAVED_STEPS, saved_alone)) == []


def test_a_save_that_fails_stops_no_training_but_the_last_is_said_by_the_status(
    scenarios: ScenarioRunner, tmp_path: Path
) -> None:
    shape, root = Shape(2, 1, num_steps=12), tmp_path / "save"
    flags = ("--save", str(root), "--save-interval", "10")
    job = scenarios.start(shape, "lazy", more_flags=flags)
    job.wait_for_step("node0", 1)
    os.rename(root, tmp_path / "elsewhere")
    root.touch()  # nothing can be made in a file
    finished = job.finish()
    lines = [line.split("] ", 1)[1] for line in finished.result.lines if "saved" in line]
    assert lines == [f"step {n} was not saved to {root}: FileExistsError: [Errno 17] File exists: "
                     f"'{root}'" for n in (10, 12)]  # fmt: skip
    assert (finished.result.status, finished.result.lost) == (1, [])
    assert "the training is done, but step 12 was not saved" in finished.result.message
    assert sum("] iteration " in line for line in finished.result.lines) == 12


def test_a_job_that_is_killed_whole_while_it_writes_goes_on_when_it_is_started_again(
    scenarios: ScenarioRunner, undisturbed_save: Path, tmp_path: Path
) -> None:
    root = tmp_path / "save"
    flags = (*save_flags(root), "--load", str(root))
    job = scenarios.start(SHAPE, "lazy", more_flags=flags)
    until = time.monotonic() + 60
    while not ((root / TRACKER).exists() and list(root.glob("iter_0000006.partial-*"))):
        assert time.monotonic() < until and not job.ended.is_set()
        time.sleep(0.0005)
    os.kill(job.pid, signal.SIGKILL)
    assert job.ended.wait(30)
    again = scenarios.run(SHAPE, "lazy", more_flags=flags)
    assert again.result.status == 0, again.result.message
    comparison = compare_runs(scenarios.undisturbed(SHAPE), again.job_dir)
    assert comparison.equal and comparison.num_losses in (1, 4)
    for left in root.glob("iter_0000006.unpublished-*"):
        os.rename(left, tmp_path / left.name)
    assert list(complaints(root, SAVED_STEPS, undisturbed_save)) == []
