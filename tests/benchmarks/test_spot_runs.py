"""What the spot-trace benchmark makes of a run's jobs, and what it does without its trace."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from spot_trace import account, main
from step_times import Step
from trace_player import PRICES, Segment, Settings

from megatron_bamboo.simulator.timeline import Kind

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "spot_trace.py"
BATCH = 12


def step(number: int, seconds: float, end: float, **more: Any) -> Step:
    values: dict[str, Any] = {"arranged": "012x4", "epoch": 0, "again": 0}
    values |= {"moves": False, "loses": False, "is_redone": False, "follows_save": False, **more}
    return Step(number, seconds, end, **values)


def calm_steps(first: int, last: int, end: float) -> list[Step]:
    return [step(n, 1.0, end + n - first) for n in range(first, last + 1)]


def test_a_loss_a_save_and_a_change_take_what_their_iterations_are_longer() -> None:
    steps = [
        *calm_steps(2, 6, 101.0),
        step(7, 1.5, 106.5, epoch=1, loses=True),
        step(8, 1.25, 107.75, epoch=2, moves=True),
        step(9, 3.0, 110.75, epoch=2, follows_save=True),
    ]
    segment = Segment(100.0, 0.0, 111.0, 0, tuple(steps), 100.0, 8, 3, 5)
    row = account([segment], BATCH)
    assert row.iterations == 9 and row.parts == 1
    # What was begun anew is lost; what was under way at the end is not.
    assert row.samples_lost == 3
    assert row.seconds[Kind.TAKEOVER] == 0.5
    # Whatever else it was, it followed a change.
    assert row.seconds[Kind.RECONFIGURATION] == 2.25
    assert sum(row.seconds.values()) == pytest.approx(11.0)


def test_what_came_after_the_checkpoint_is_lost_with_the_job() -> None:
    first = Segment(100.0, 0.0, 108.0, 0, tuple(calm_steps(2, 7, 101.0)), 100.0, 4, 0, 6)
    second = Segment(108.0, 5.0, 136.0, 4, tuple(calm_steps(6, 8, 134.0)), 133.0, 4, 0, 2)
    row = account([first, second], BATCH)
    assert row.iterations == 8 and row.parts == 2
    assert row.samples_lost == 3 * BATCH + 6
    assert row.seconds[Kind.LOST] == 3.0 + 2.0
    assert row.seconds[Kind.WAIT] == 5.0
    assert row.seconds[Kind.RESTORE] == 133.0 - 108.0 - 5.0 - 1.0
    assert sum(row.seconds.values()) == pytest.approx(36.0)


def test_what_is_waited_for_is_as_much_faster_as_the_trace() -> None:
    settings = Settings(3, 3, 12, 1.0, 6.0, 100)
    assert settings.start_seconds == PRICES.start_seconds / 6
    assert settings.restart_seconds == PRICES.restore_seconds / 6
    assert settings.save_seconds == PRICES.save_seconds / 6
    assert settings.emulation.num_microbatches == 4


def test_without_the_trace_it_says_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["--trace", str(tmp_path / "none.csv")]) == 0
    assert capsys.readouterr().out == f"skipped: there is no trace {tmp_path}/none.csv\n"


ROWS = ("0,add,a", "0,add,b", "0,add,c", "0,add,d", "90000,remove,b", "120000,add,e")
SMALL = (
    *("--from", "0", "--hours", "0.1", "--faster", "10", "--stages", "2", "--pipelines", "2"),
    *("--microbatches", "4", "--seconds", "0.5", "--save-interval", "10"),
)


# What is made of its jobs is tested above, and such a job by itself.
@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(900)
def test_each_policy_goes_through_the_trace(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("\n".join([*ROWS, "300000,remove,c"]) + "\n")
    command = [sys.executable, str(SCRIPT), "--trace", str(trace), *SMALL]
    command += ["--results", str(tmp_path / "results")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    _, rows = result.stdout.split("\n\n")
    cells = [line.strip("| ").split(" | ") for line in rows.splitlines()[2:]]
    assert [row[0] for row in cells] == ["auto", "bamboo", "oobleck", "checkpoint"]
    assert [row[-1] for row in cells[:2]] == ["1", "1"] and int(cells[3][-1]) == 2
    assert all(int(row[1]) > 10 for row in cells)
    times = [sum(map(float, row[3:-1])) for row in cells]
    assert times == pytest.approx([30.0] * 4, abs=5.0)
