import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_bamboo.cli import main
from megatron_bamboo.schedule.actions import Action

EAGER = """\
2 stages, 2 microbatches, redundancy eager: makespan 11 (a forward is 1, a backward 2)

stage 0: on rank 0, replica on rank 1
stage 1: on rank 1, replica on rank 0

rank 0: 0.0F0 0.0SEND_F0 1.0RF0 0.0F1 0.0SEND_F1 1.0RF1 0.0RECV_B0 0.0B0 0.0RECV_B1 0.0B1 0REDUCE
        0SEND_TIE 0TIE 0SEND_REFRESH 1RECV_REFRESH 0COMMIT 0STEP
rank 1: 1.0RECV_F0 1.0F0 0.0RF0 1.0B0 1.0SEND_B0 1.0RECV_F1 1.0F1 0.0RF1 1.0B1 1.0SEND_B1 1REDUCE
        1SEND_TIE 1TIE 1SEND_REFRESH 0RECV_REFRESH 1COMMIT 1STEP

time  rank 0  rank 1
0     0.0F0   .
1     1.0RF0  1.0F0
2     0.0F1   0.0RF0
3     1.0RF1  1.0B0
5     0.0B0   1.0F1
6     |       0.0RF1
7     .       1.0B1
9     0.0B1   .

rank 0: idle 3 of 11 (27.3%)
rank 1: idle 3 of 11 (27.3%)
"""

TAKEOVER = """\
rank 2 is lost at 6, before 2.0B1; rank 1 takes over stage 2
the iteration ends at 21 instead of 15 (+40.0%), without the pause

stage 0: on rank 0, no replica
stage 1: on rank 1, replica on rank 0
stage 2: on rank 1, no replica

rank 0: 0.0RECV_B0 0.0B0 0.0RECV_B1 0.0B1 0.0RECV_B2 0.0B2 0REDUCE 0SEND_TIE 0TIE 1RECV_REFRESH
        0COMMIT 0STEP
rank 1: 1.0SEND_B0 2.0F1 2.0B1 1.0F2 2.0F2 2.0B2 1.0B1 1.0SEND_B1 1.0B2 1.0SEND_B2 2.0F0 2.0B0
        1REDUCE 2REDUCE 2SEND_TIE 2TIE 1SEND_REFRESH 1COMMIT 1STEP

time  rank 0  rank 1
7     0.0B0   2.0F1
8     |       2.0B1
10    .       1.0F2
11    .       2.0F2
12    .       2.0B2
14    .       1.0B1
16    0.0B1   1.0B2
18    0.0B2   2.0F0
19    |       2.0B0
"""

FORWARD_ONLY = """\
2 stages, 2 microbatches, forward only: makespan 3 (a forward is 1, a backward 2)

stage 0: on rank 0, no replica
stage 1: on rank 1, no replica

rank 0: 0.0F0 0.0SEND_F0 0.0F1 0.0SEND_F1
rank 1: 1.0RECV_F0 1.0F0 1.0RECV_F1 1.0F1

time  rank 0  rank 1
0     0.0F0   .
1     0.0F1   1.0F0
2     .       1.0F1

rank 0: idle 1 of 3 (33.3%)
rank 1: idle 1 of 3 (33.3%)
"""


def schedule_command(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str, str]:
    status = main(["schedule", *options])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_text_of_a_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--stages", "2", "--microbatches", "2", "--redundancy", "eager")
    assert schedule_command(capsys, *options) == (0, EAGER, "")


def test_text_of_an_evaluation(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--stages", "2", "--microbatches", "2", "--forward-only")
    assert schedule_command(capsys, *options) == (0, FORWARD_ONLY, "")


@pytest.mark.parametrize(
    ("num_microbatches", "makespan", "idle", "share"),
    [(1, 18, 12, "66.7%"), (2, 21, 9, "42.9%"), (4, 30, 6, "20.0%"), (7, 48, 6, "12.5%")],
)
def test_idle_share_of_what_megatron_refuses_to_interleave(
    capsys: pytest.CaptureFixture[str],
    num_microbatches: int,
    makespan: int,
    idle: int,
    share: str,
) -> None:
    """3 * max(2 * M + 2, 6 + M - 1), of which 3 * 2 * M are work."""
    options = ("--stages", "3", "--chunks", "2", "--microbatches", str(num_microbatches))
    _, out, _ = schedule_command(capsys, *options)
    assert out.startswith(f"3 stages of 2 chunks, {num_microbatches} microbatches, ")
    for rank in range(3):
        assert f"\nrank {rank}: idle {idle} of {makespan} ({share})\n" in out


def test_text_of_a_takeover(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--stages", "3", "--microbatches", "3", "--redundancy", "lazy", "--lose", "2.0B1")
    status, out, _ = schedule_command(capsys, *options)
    assert status == 0
    assert out == TAKEOVER


MIRRORED = """\
rank 1 is lost at 14, before 1.0B3; rank 0 takes over stage 1
backward passes 1.0B: a mirror holds 0 to 2, 1 run
the iteration ends at 20 instead of 18 (+11.1%), without the pause

stage 0: on rank 0, replica on rank 2
stage 1: on rank 0, no replica
stage 2: on rank 2, no replica

rank 0: 0.0SEND_MIRROR2 1.0F3 1.0RECV_B3 1.0B3 0.0B3 0REDUCE 1REDUCE 0SEND_TIE 0TIE 0SEND_REFRESH
        0COMMIT 0STEP
rank 2: 0.0RECV_MIRROR2 2.0SEND_B3 2REDUCE 2SEND_TIE 2TIE 0RECV_REFRESH 2COMMIT 2STEP
"""


def test_a_takeover_shows_what_mirrors_spare(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--stages", "3", "--microbatches", "4", "--mirror-gradients", "2")
    lost = ("--lose", "1.0B3")
    assert schedule_command(capsys, *options, *lost)[1].startswith(MIRRORED)
    shown = json.loads(schedule_command(capsys, *options, *lost, "--format", "json")[1])
    assert shown["num_mirrors"] == 2
    assert shown["takeover"]["mirrors"] == ["1.0RECV_MIRROR2"]
    whole = schedule_command(capsys, *options)[1]
    assert whole.startswith("3 stages, 4 microbatches, redundancy lazy, 2 mirrors: makespan 18 ")
    early = schedule_command(capsys, *options, "--lose", "1.0B0")[1]
    assert "backward passes 1.0B: no mirror can be used, 4 run\n" in early


def test_json_holds_programs_times_and_the_takeover(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--stages", "4", "--microbatches", "8", "--lose", "1.0SEND_F2", "--format", "json")
    status, out, _ = schedule_command(capsys, *options)
    shown = json.loads(out)
    assert status == 0
    assert shown["makespan"] == 33
    assert shown["placement"] == [0, 1, 2, 3]
    takeover = shown["takeover"]
    assert takeover["victim_rank"] == 1
    assert takeover["placement"] == [0, 0, 2, 3]
    assert takeover["programs"][1] == []
    assert sorted(takeover["progress"]) == ["0", "2", "3"]
    assert takeover["makespan"] > 33
    for row, program in zip(takeover["timeline"], takeover["programs"], strict=True):
        assert [timed["action"] for timed in row] == program
        assert [str(Action.parse(text)) for text in program] == program


BUBBLE = """\
3 stages of 2 chunks, 3 microbatches, redundancy bubble: makespan 24 (a forward is 1, a backward 2)

stage 0: 6 of 6 redundant forwards fit on rank 2
stage 1: 6 of 6 redundant forwards fit on rank 0
stage 2: 5 of 6 redundant forwards fit on rank 1, not 2.1RF2
"""


def test_what_fits_into_the_gaps_is_said_by_stage(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    options = ("--stages", "3", "--chunks", "2", "--microbatches", "3", "--redundancy", "bubble")
    path = tmp_path / "schedule.json"
    written = ("--format", "json", "--output", str(path))
    assert schedule_command(capsys, *options, *written) == (0, BUBBLE, "")
    assert schedule_command(capsys, *options)[1].startswith(BUBBLE + "\nstage 0: on rank 0")
    redundant = json.loads(path.read_text())["redundant"]
    assert redundant["2"]["left_out"] == ["2.1RF2"]
    assert len(redundant["2"]["placed"]) == 5


def test_costs_of_a_file_are_what_the_times_are_made_of(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "costs.json"
    path.write_text('{"forward": [1, 5], "backward": [2, 7], "latency": 0.5}')
    options = ("--stages", "2", "--microbatches", "1", "--redundancy", "none")
    _, out, _ = schedule_command(capsys, *options, "--costs", str(path))
    assert "makespan 16 (costs of costs.json)" in out


def test_a_trace_is_json_for_a_viewer(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--stages", "2", "--chunks", "2", "--microbatches", "2", "--format", "trace")
    status, out, _ = schedule_command(capsys, *options)
    assert status == 0
    names = {event["name"] for event in json.loads(out)["traceEvents"]}
    assert {"thread_name", "1.1B0", "message"} <= names


@pytest.mark.parametrize("lines", [("4", "8"), ("8", "16")])
def test_text_fits_a_hundred_columns(
    capsys: pytest.CaptureFixture[str], lines: tuple[str, str]
) -> None:
    stages, microbatches = lines
    options = ("--stages", stages, "--microbatches", microbatches, "--redundancy", "eager")
    for more in ((), ("--lose", "3.0B4")):
        _, out, _ = schedule_command(capsys, *options, *more)
        assert max(map(len, out.splitlines())) <= 100


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--stages 2 --microbatches 2 --chunks 0", "at least one stage, one chunk"),
        ("--stages 0 --microbatches 2 --redundancy none", "at least one stage"),
        ("--stages 2 --microbatches 0", "one chunk and one microbatch"),
        ("--stages 1 --microbatches 2", "use more stages or no redundancy"),
        ("--stages 2 --microbatches 2 --format png", "--format png needs --output FILE"),
        ("--stages 2 --microbatches 2 --costs missing.json", "--costs missing.json: [Errno 2]"),
        ("--stages 2 --microbatches 2 --output missing/file", "--output missing/file: [Errno 2]"),
        ("--stages 2 --microbatches 2 --lose 2.0b3", "'2.0b3' is no action"),
        ("--stages 2 --microbatches 2 --lose 2.0B1", "2.0B1 is in no program"),
        ("--stages 2 --microbatches 2 --lose 1REDUCE", "the commit decides"),
        ("--stages 2 --microbatches 2 --lose 1.0B1 --redundancy none", "--lose needs replicas"),
        (
            "--stages 2 --microbatches 2 --mirror-gradients 1 --redundancy none",
            "mirrored gradients go to replicas",
        ),
        ("--stages 2 --microbatches 2 --mirror-gradients -1", "it must be 0 or above"),
        ("--stages 2 --microbatches 2 --forward-only --redundancy eager", "nothing is redundant"),
        ("--stages 2 --microbatches 2 --forward-only --lose 1.0F1", "leave --lose out"),
        ("--stages 2 --microbatches 0 --forward-only", "one chunk and one microbatch"),
    ],
)
def test_bad_input_gets_one_line_and_status_2(
    capsys: pytest.CaptureFixture[str], options: str, message: str
) -> None:
    status, out, err = schedule_command(capsys, *options.split())
    assert (status, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_every_process_finds_the_same_takeover() -> None:
    """Survivors compute it apart, and the order of a set differs between processes."""
    command = [sys.executable, "-m", "megatron_bamboo", "schedule", "--format", "json"]
    options = ["--stages", "5", "--microbatches", "9", "--redundancy", "eager", "--lose", "2.0B4"]
    shown = {
        subprocess.run(
            command + options,
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(shown) == 1
