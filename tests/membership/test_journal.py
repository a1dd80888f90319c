"""The journal: what comes back, and that one coordinator leads at a time."""

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from megatron_bamboo.membership import journal as journals
from megatron_bamboo.membership.journal import (
    JOURNAL_FILE,
    Deposed,
    Hooks,
    Journal,
    JournalReader,
    LeaderLives,
    News,
)
from megatron_bamboo.membership.table import Table

LEADER = """
import sys, time
from pathlib import Path
from megatron_bamboo.membership.journal import Journal
from megatron_bamboo.membership.table import Table
journal = Journal(Path(sys.argv[1]))
journal.claim(5.0)
table = Table(journal)
table.set("epoch", b"0")
while True:
    print(journal.generation, flush=True)
    time.sleep(0.05)
    table.set("beats", b"1")
    journal.beat()
"""
Start = Callable[[], "subprocess.Popen[str]"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / JOURNAL_FILE


@pytest.fixture
def leader(path: Path) -> Iterator[Start]:
    """A leader of another process, which writes all the time."""
    started = []

    def start() -> "subprocess.Popen[str]":
        command = [sys.executable, "-c", LEADER, str(path)]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline()
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def lead(path: Path, hooks: Hooks | None = None) -> tuple[Journal, Table]:
    """Lead as one does whose predecessor is known to be dead."""
    journal = Journal(path, hooks)
    journal.claim(0.0)
    return journal, Table(journal)


def test_a_table_comes_back_as_it_was(path: Path) -> None:
    journal, table = lead(path)
    assert journal.generation == 1
    for key in ("b", "a", "c", "d"):
        table.set(key, key.encode())
    table.set("b", bytes(range(256)))
    table.delete("c")
    assert table.add("n", 2, "first") == 2
    later, again = lead(path)
    assert later.generation == 2
    assert list(again.items("").items()) == [
        ("b", bytes(range(256))),
        ("a", b"a"),
        ("d", b"d"),
        ("n", b"2"),
    ]
    assert again.add("n", 2, "first") == 2
    assert again.add("n", 2, "second") == 4


def test_what_is_repeated_is_forgotten_with_its_key(path: Path) -> None:
    for _ in range(2):
        _, table = lead(path)
        assert table.add("group/1/count", 1, "first") == 1
        table.delete_prefix("group/1/")


def test_changes_made_together_are_kept_and_seen_together_or_not_at_all(path: Path) -> None:
    _, table = lead(path)
    seen: list[tuple[str, int]] = []
    table.subscribe("", lambda key, _: seen.append((key, table.count(""))))
    with table.together():
        table.set("plan/1", b"plan")
        table.say({"line": "a plan"})
        table.set("epoch", b"1")
        assert table.get("plan/1") == b"plan"
        assert lead_nothing(path) == []
    assert seen == [("plan/1", 2), ("epoch", 2)]
    assert lead_nothing(path) == ["epoch", "plan/1"]


def lead_nothing(path: Path) -> list[str]:
    """The keys on disk, as somebody sees them who does not lead."""
    with contextlib.closing(sqlite3.connect(path)) as db:
        return sorted(key for (key,) in db.execute("SELECT key FROM keys"))


def test_one_who_is_deposed_changes_nothing_and_says_nothing(path: Path) -> None:
    old, before = lead(path)
    before.set("epoch", b"0")
    new, table = lead(path)
    writes: list[Callable[[], object]] = [
        lambda: before.set("epoch", b"7"),
        lambda: before.add("n", 1, "late"),
        lambda: before.delete("epoch"),
        lambda: before.say({"line": "late"}),
        old.beat,
        before.check,
        lambda: old.leading().__enter__(),
    ]
    for write in writes:
        with pytest.raises(Deposed, match="coordinator 1 is deposed: coordinator 2 leads"):
            write()
    table.check()
    new.beat()
    assert Table(new).items("") == {"epoch": b"0"}
    assert JournalReader(path).look().facts == ()


def test_whoever_wants_to_is_told_instead(path: Path) -> None:
    class Ended(Exception):
        pass

    def end(error: Exception) -> None:
        raise Ended(type(error).__name__)

    _, table = lead(path, Hooks(failed=end))  # type: ignore[arg-type]
    lead(path)
    with pytest.raises(Ended, match="Deposed"):
        table.set("epoch", b"1")


def test_hooks_stand_before_and_after_each_write(path: Path) -> None:
    seen: list[tuple[str, Sequence[str], list[str]]] = []
    hooks = Hooks(
        before=lambda keys: seen.append(("before", keys, lead_nothing(path))),
        after=lambda keys: seen.append(("after", keys, lead_nothing(path))),
    )
    lead(path, hooks)[1].set_all({"plan/0": b"", "epoch": b"0"})
    assert seen == [
        ("before", ["plan/0", "epoch"], []),
        ("after", ["plan/0", "epoch"], ["epoch", "plan/0"]),
    ]


def test_facts_are_read_once_whoever_said_them(path: Path) -> None:
    reader = JournalReader(path)
    assert reader.look() == News(None, ())
    for number in (1, 2):
        journal, table = lead(path)
        table.say({"line": f"of coordinator {journal.generation}"})
        news = reader.look()
        assert news.facts == ({"line": f"of coordinator {number}"},)
        assert news.leader is not None
        assert (news.leader.generation, news.leader.pid) == (number, os.getpid())
    assert reader.look().facts == ()


@pytest.mark.multiprocess
def test_nobody_takes_the_place_of_one_who_shows_himself(path: Path, leader: Start) -> None:
    process = leader()
    with pytest.raises(LeaderLives, match=f"coordinator 1 .process {process.pid}. leads"):
        Journal(path).claim(5.0)
    process.kill()
    process.wait()
    assert Journal(path).claim(5.0) == 2


@pytest.mark.multiprocess
def test_one_who_is_dead_but_not_reaped_leads_no_more(path: Path, leader: Start) -> None:
    process = leader()
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert Journal(path).claim(60.0) == 2


@pytest.mark.multiprocess
def test_one_who_was_stopped_wakes_deposed(
    path: Path, leader: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = leader()
    monkeypatch.setattr(journals, "LOCK_SECONDS", 0.5)
    while True:
        os.kill(process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        try:
            with pytest.raises(LeaderLives):
                Journal(path).claim(60.0)
            time.sleep(0.2)
            assert Journal(path).claim(0.1) == 2
            break
        # It was stopped in the middle of a write.
        except sqlite3.OperationalError:
            os.kill(process.pid, signal.SIGCONT)
    os.kill(process.pid, signal.SIGCONT)
    _, said = process.communicate(timeout=30)
    assert "Deposed: coordinator 1 is deposed: coordinator 2 leads" in said
