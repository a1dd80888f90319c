"""The journal, of each kind: what comes back, and that one coordinator leads at a time."""

import contextlib
import os
import re
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from store_kinds import Store

from megatron_bamboo.membership import journal as journals
from megatron_bamboo.membership.leadership import Deposed, Hooks, LeaderLives, News
from megatron_bamboo.membership.stores import open_reader
from megatron_bamboo.membership.table import Table

LEADER = """
import sys, time
from pathlib import Path
from megatron_bamboo.membership.stores import open_journal
from megatron_bamboo.membership.table import Table
journal = open_journal(Path(sys.argv[1]))
journal.claim(4.0)
table = Table(journal)
table.set("epoch", b"0")
journal.flush()
while True:
    print(journal.generation, flush=True)
    time.sleep(0.05)
    table.set("beats", b"1")
    journal.beat()
"""
DEPOSED = r"coordinator 1 is deposed: (coordinator 2 .*leads|its lease is over)"
Start = Callable[[], "subprocess.Popen[str]"]


@pytest.fixture
def leader(store: Store) -> Iterator[Start]:
    """A leader of another process, which writes all the time."""
    started = []

    def start() -> "subprocess.Popen[str]":
        command = [sys.executable, "-c", LEADER, str(store.job_dir)]
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


def test_a_table_comes_back_as_it_was(store: Store) -> None:
    journal, table = store.lead()
    assert journal.generation == 1
    for key in ("b", "a", "c", "d"):
        table.set(key, key.encode())
    table.set("b", bytes(range(256)))
    table.delete("c")
    assert table.add("n", 2, "first") == 2
    journal.flush()
    later, again = store.lead()
    assert later.generation == 2
    assert list(again.items("").items()) == [
        ("b", bytes(range(256))),
        ("a", b"a"),
        ("d", b"d"),
        ("n", b"2"),
    ]
    assert again.add("n", 2, "first") == 2
    assert again.add("n", 2, "second") == 4


def test_what_is_repeated_is_forgotten_with_its_key(store: Store) -> None:
    for _ in range(2):
        journal, table = store.lead()
        assert table.add("group/1/count", 1, "first") == 1
        table.delete_prefix("group/1/")
        journal.flush()


def test_changes_made_together_are_kept_and_seen_together_or_not_at_all(store: Store) -> None:
    journal, table = store.lead()
    seen: list[tuple[str, int]] = []
    table.subscribe("", lambda key, _: seen.append((key, table.count(""))))
    with table.together():
        table.set("plan/1", b"plan")
        table.say({"line": "a plan"})
        table.set("epoch", b"1")
        assert table.get("plan/1") == b"plan"
        assert store.keys() == []
    assert seen == [("plan/1", 2), ("epoch", 2)]
    journal.flush()
    assert store.keys() == ["epoch", "plan/1"]


def test_one_who_is_deposed_changes_nothing_and_says_nothing(store: Store) -> None:
    old, before = store.lead()
    before.set("epoch", b"0")
    old.flush()
    new, table = store.lead()
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
        with pytest.raises(Deposed, match=DEPOSED):
            write()
            old.flush()
    table.check()
    new.beat()
    assert Table(new).items("") == {"epoch": b"0"}
    assert open_reader(store.job_dir).look().facts == ()


def test_whoever_wants_to_is_told_instead(store: Store) -> None:
    told: list[Exception] = []

    def end(error: Exception) -> None:
        told.append(error)
        if threading.current_thread() is threading.main_thread():
            raise SystemExit

    journal, table = store.lead(Hooks(failed=end))  # type: ignore[arg-type]
    store.lead()
    with pytest.raises(SystemExit):
        table.set("epoch", b"1")
        journal.flush()
    assert {type(error) for error in told} == {Deposed}


def test_hooks_stand_before_and_after_each_write(store: Store) -> None:
    seen: list[tuple[str, Sequence[str], list[str]]] = []
    hooks = Hooks(
        before=lambda keys: seen.append(("before", keys, store.keys())),
        after=lambda keys: seen.append(("after", keys, store.keys())),
    )
    journal, table = store.lead(hooks)
    table.set_all({"plan/0": b"", "epoch": b"0"})
    journal.flush()
    assert seen == [
        ("before", ["plan/0", "epoch"], []),
        ("after", ["plan/0", "epoch"], ["epoch", "plan/0"]),
    ]


def test_facts_are_read_once_whoever_said_them(store: Store) -> None:
    reader = open_reader(store.job_dir)
    assert reader.look() == News(None, ())
    for number in (1, 2):
        journal, table = store.lead()
        table.say({"line": f"of coordinator {journal.generation}"})
        journal.flush()
        news = reader.look()
        assert news.facts == ({"line": f"of coordinator {number}"},)
        assert news.leader is not None
        assert (news.leader.generation, news.leader.pid) == (number, os.getpid())
    assert reader.look().facts == ()


@pytest.mark.multiprocess
def test_nobody_takes_the_place_of_one_who_shows_himself(store: Store, leader: Start) -> None:
    process = leader()
    named = rf"coordinator 1 .process {process.pid}( of \S+)?. leads"
    with pytest.raises(LeaderLives, match=named):
        store.open().claim(5.0)
    process.kill()
    process.wait()
    assert store.open().claim(5.0) == 2


@pytest.mark.multiprocess
def test_one_who_is_dead_but_not_reaped_leads_no_more(store: Store, leader: Start) -> None:
    process = leader()
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert store.open().claim(60.0) == 2


@pytest.mark.multiprocess
def test_one_who_was_stopped_wakes_deposed(
    store: Store, leader: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = leader()
    monkeypatch.setattr(journals, "LOCK_SECONDS", 0.5)
    while True:
        os.kill(process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        try:
            with pytest.raises(LeaderLives):
                store.open().claim(60.0)
            time.sleep(0.2)
            assert store.claim_when_free(0.1) == 2
            break
        # It was stopped in the middle of a write.
        except sqlite3.OperationalError:
            os.kill(process.pid, signal.SIGCONT)
    os.kill(process.pid, signal.SIGCONT)
    _, said = process.communicate(timeout=30)
    assert re.search(f"Deposed: {DEPOSED}", said)


def test_who_looks_at_a_new_file_is_waited_for(tmp_path: Path) -> None:
    """SQLite itself does not wait for a lock while a file gets another kind of log."""
    path = tmp_path / journals.JOURNAL_FILE
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as looking:
        looking.execute("CREATE TABLE something (key TEXT)")
        looking.execute("BEGIN IMMEDIATE")
        opening = threading.Thread(target=lambda: opened.append(journals.JournalReader(path)))
        opened: list[journals.JournalReader] = []
        opening.start()
        time.sleep(0.1)
        assert opening.is_alive()
        looking.execute("COMMIT")
        opening.join(journals.LOCK_SECONDS)
    assert len(opened) == 1
