import os
import time
from pathlib import Path

import pytest

from megatron_bamboo.observe.events import EventLog, read_events


def test_events_of_all_sources_come_back_in_time_order(tmp_path: Path) -> None:
    first, second = EventLog(tmp_path / "events", "node1"), EventLog(tmp_path / "events", "node0")
    before = time.monotonic()
    first.emit("action", action="2.0F3", step=7, epoch=0)
    second.emit("kill", action="1.0B0")
    first.emit("action", action="2.0B3", step=7, epoch=0)
    events = read_events(tmp_path / "events")
    assert [event["event"] for event in events] == ["action", "kill", "action"]
    assert [event["source"] for event in events] == ["node1", "node0", "node1"]
    assert before <= events[0]["time"] <= events[1]["time"] <= time.monotonic()
    assert events[0] | {"action": "2.0F3", "step": 7, "epoch": 0} == events[0]


def test_what_was_emitted_survives_a_kill(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        log = EventLog(tmp_path, "node3")
        log.emit("kill", action="3.0F0")
        os.kill(os.getpid(), 9)
    os.waitpid(child, 0)
    assert [event["event"] for event in read_events(tmp_path)] == ["kill"]


def test_two_writers_of_one_source_never_mix_lines(tmp_path: Path) -> None:
    children = []
    for writer in range(2):
        child = os.fork()
        if child == 0:
            log = EventLog(tmp_path, "node0")
            for number in range(300):
                log.emit("moved", writer=writer, number=number, padding="x" * 500)
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    events = read_events(tmp_path)
    for writer in range(2):
        assert [e["number"] for e in events if e["writer"] == writer] == list(range(300))


def test_a_line_that_is_no_event_is_named(tmp_path: Path) -> None:
    (tmp_path / "node0.jsonl").write_text('{"time": 1}\n{"time"\n')
    with pytest.raises(ValueError, match=r"node0\.jsonl, line 2"):
        read_events(tmp_path)


def test_a_line_that_is_being_written_is_no_event_yet(tmp_path: Path) -> None:
    (tmp_path / "node0.jsonl").write_text('{"time": 1}\n{"time": 2, "ev')
    assert read_events(tmp_path) == [{"time": 1}]
