import json
from pathlib import Path
from typing import Any

import pytest
from saved_state import LOSSES, save_job, save_losses, save_state

from megatron_bamboo.errors import UserError
from megatron_bamboo.observe import quickstart_summary as summary


def action(source: str, text: str, step: int, start: float, pipeline: int = 1) -> dict[str, Any]:
    return {
        "event": "action",
        "source": source,
        "time": start + 0.5,
        "action": text,
        "step": step,
        "start": start,
        "pipeline": pipeline,
    }


KILL = {"event": "fault", "source": "node5", "time": 21.0}
EVENTS = [
    action("node5", "1.0F0", 0, 0.0),
    action("node5", "1.0F0", 1, 10.0),
    action("node5", "1.0F0", 2, 20.0),
    KILL,
    action("node1", "1.0B0", 2, 22.0, pipeline=0),  # the other pipeline goes on, this is no pause
    action("node4", "0.0F1", 2, 23.0),  # the shadow's own stage is not the victim's
    action("node4", "1.0SEND_F0", 2, 23.5),
    action("node4", "1.0F0", 2, 25.0),
    action("node4", "1.0F1", 3, 34.0),
]


def test_the_pause_ends_with_the_shadows_first_work_in_the_victims_place() -> None:
    assert summary.longest_pause_seconds(EVENTS) == 4.0
    assert summary.iteration_seconds(EVENTS) == 10.0


def test_of_two_pauses_the_longest_counts() -> None:
    second = [
        action("node7", "3.0F0", 3, 35.0),
        KILL | {"source": "node7", "time": 36.0},
        action("node6", "3.0B0", 3, 43.0),
    ]
    assert summary.longest_pause_seconds([*EVENTS, *second]) == 7.0


def test_a_log_without_a_takeover_is_refused() -> None:
    with pytest.raises(UserError, match="no injected fault"):
        summary.longest_pause_seconds([])
    with pytest.raises(UserError, match="nobody computed in the place of node5"):
        summary.longest_pause_seconds(EVENTS[:-2])
    with pytest.raises(UserError, match="fewer than two"):
        summary.iteration_seconds(EVENTS[:1])


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    for name in ("undisturbed", "disturbed"):
        save_state(tmp_path / name, "node4-stage0-primary")
        save_job(tmp_path / name)
        save_losses(tmp_path / name, LOSSES)
    events = [
        *EVENTS,
        {"event": "loss", "source": "coordinator", "time": 21.1, "node": "node5"},
        {"event": "takeover", "source": "coordinator", "time": 21.2},
    ]
    folder = tmp_path / "disturbed" / "events"
    folder.mkdir()
    lines = "".join(json.dumps(event) + "\n" for event in events)
    (folder / "all.jsonl").write_text(lines, encoding="utf-8")
    return tmp_path / "undisturbed", tmp_path / "disturbed"


def test_the_last_line(runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert summary.main([*map(str, runs), "--seconds", "99"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "iterations": 2,
        "nodes_lost": 1,
        "takeovers": 1,
        "checkpoint_restores": 0,
        "losses_equal": True,
        "parameters_equal": True,
        "pause_iterations": 0.4,
        "seconds": 99,
    }


def test_the_status_is_one_if_anything_differs(runs: tuple[Path, Path]) -> None:
    save_losses(runs[1], {**LOSSES, 2: (7.0, 0.2)})
    assert summary.main([*map(str, runs), "--seconds", "99"]) == 1
