"""The store in etcd: members die or fall silent, and another host takes over."""

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from etcd_cluster import Cluster, SlowCluster, cluster, make_certificates
from needs import missing
from store_kinds import SECONDS, Store

from megatron_bamboo.membership import etcd_client, etcd_journal
from megatron_bamboo.membership.etcd_client import EtcdAway, EtcdClient, EtcdRefused
from megatron_bamboo.membership.etcd_journal import EtcdJournal, fact_key
from megatron_bamboo.membership.etcd_office import Holder
from megatron_bamboo.membership.etcd_reader import etcd_snapshot
from megatron_bamboo.membership.leadership import Deposed, LeaderLives
from megatron_bamboo.membership.store_place import EtcdPlace, place_of
from megatron_bamboo.membership.stores import open_reader, snapshot_of
from megatron_bamboo.membership.table import Table

pytestmark = pytest.mark.multiprocess

LEADER = """
import sys, time
from pathlib import Path
from megatron_bamboo.membership.stores import open_journal
from megatron_bamboo.membership.table import Table
journal = open_journal(Path(sys.argv[1]))
journal.claim(4.0)
table = Table(journal)
with table.together():
    table.set("plan/7", b"the plan")
    table.set("epoch", b"7")
journal.flush()
print("leads", flush=True)
sys.stdin.readline()
table.set("epoch", b"8")
journal.flush()
"""


@pytest.fixture(scope="module")
def members() -> Iterator[Cluster]:
    with cluster(3) as running:
        yield running


@pytest.fixture
def member() -> Iterator[Cluster]:
    """One that may be harmed."""
    with cluster(1) as running:
        yield running


@contextlib.contextmanager
def store_in(etcd: Cluster | SlowCluster, job_dir: Path) -> Iterator[Store]:
    with contextlib.closing(Store(job_dir, etcd)) as made:
        yield made


def place(store: Store) -> EtcdPlace:
    found = place_of(store.job_dir)
    assert found is not None
    return found


def test_the_leader_of_three_members_dies(members: Cluster, tmp_path: Path) -> None:
    with store_in(members, tmp_path) as store:
        journal, table = store.lead()
        reader = open_reader(tmp_path)
        table.set("epoch", b"0")
        for number in range(20):
            table.add("count", 1, f"request{number}")
            table.say({"line": number})
            if number == 10:
                leader = members.await_leader()
                members.kill(leader)
        journal.flush(SECONDS)
        assert journal.generation == 1
        told: list[int] = []
        until = time.monotonic() + SECONDS
        while len(told) < 20:
            told += [fact["line"] for fact in reader.look().facts]
            assert time.monotonic() < until
        assert told == list(range(20))
        members.restart(leader)
        later, again = store.lead()
        assert (later.generation, again.get("count")) == (2, b"20")


@contextlib.contextmanager
def another_host(job_dir: Path) -> "Iterator[subprocess.Popen[str]]":
    """One that leads on what is another machine to all others: it has its own process numbers."""
    unshare = shutil.which("unshare")
    command = ["--pid", "--fork", "--mount-proc", "--kill-child=SIGKILL"]
    if unshare is None or subprocess.run([unshare, *command, "true"], check=False).returncode:
        missing("netns", "process namespaces are not permitted here")
    process = subprocess.Popen(
        [unshare, *command, sys.executable, "-c", LEADER, str(job_dir)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "leads\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def child_of(process: "subprocess.Popen[str]") -> int:
    path = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return int(path.read_text().split()[0])


def test_another_host_takes_over_and_goes_on_with_the_same_plan(
    members: Cluster, tmp_path: Path
) -> None:
    with store_in(members, tmp_path) as store, another_host(tmp_path) as process:
        process.kill()
        began = time.monotonic()
        # Nobody here can know that it is dead before its lease is over.
        with pytest.raises(LeaderLives, match=r"coordinator 1 .process 1 of .* leads"):
            store.open().claim(2.0)
        assert store.claim_when_free(2.0) == 2
        # The lease, and an election at most.
        assert time.monotonic() - began < SECONDS
        table = Table(store.open())
        assert (table.get("epoch"), table.get("plan/7")) == (b"7", b"the plan")


def test_whoever_was_stopped_meanwhile_is_refused_by_etcd(members: Cluster, tmp_path: Path) -> None:
    with store_in(members, tmp_path) as store, another_host(tmp_path) as process:
        inner = child_of(process)
        os.kill(inner, signal.SIGSTOP)
        assert store.claim_when_free(2.0) == 2
        os.kill(inner, signal.SIGCONT)
        _, said = process.communicate("go on\n", timeout=SECONDS)
        assert "coordinator 1 is deposed: coordinator 2 (process" in said or "lease is over" in said
        assert Table(store.open()).get("epoch") == b"7"


def test_a_write_is_refused_in_the_transaction_itself(etcd: Cluster, tmp_path: Path) -> None:
    """Not by a look beforehand: whoever is deposed between the two must not come through."""
    with store_in(etcd, tmp_path) as store:
        old, before = store.lead()
        before.set("epoch", b"0")
        old.flush()
        new, _ = store.lead()
        assert isinstance(old, EtcdJournal)
        with pytest.raises(Deposed, match=r"coordinator 2 .* leads|its lease is over"):
            before.set("epoch", b"1")
            old.flush()
        assert Table(store.open()).get("epoch") == b"0"
        new.flush()


def test_an_answer_that_is_lost_changes_nothing(
    etcd: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each write of which the answer is lost is sent again, and is done once; late ones too."""
    sent: list[tuple[str, Any]] = []
    ask = EtcdClient.try_once

    def lose(self: EtcdClient, path: str, body: Any) -> dict[str, Any]:
        answer = ask(self, path, body)
        is_write = path == "kv/txn" and body["compare"]
        if is_write and body not in [known for _, known in sent]:
            sent.append((path, body))
            raise EtcdAway("the answer is lost")
        return answer

    with store_in(etcd, tmp_path) as store:
        monkeypatch.setattr(EtcdClient, "try_once", lose)
        journal, table = store.lead()
        assert journal.generation == 1
        for number in range(3):
            table.set("epoch", str(number).encode())
            journal.flush(SECONDS)
        assert len(sent) >= 4
        monkeypatch.undo()
        with contextlib.closing(EtcdClient(place(store))) as client:
            late = [client.try_once(*known).get("succeeded") for known in sent]
        assert not any(late)
        assert Table(store.open()).get("epoch") == b"2"
        table.set("epoch", b"3")
        journal.flush()
        assert Table(store.open()).get("epoch") == b"3"


def test_what_comes_before_a_write_is_sent_again_is_kept_too(
    etcd: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The try whose answer was lost has come through without it."""
    lost: list[Any] = []
    ask = EtcdClient.try_once

    def lose(self: EtcdClient, path: str, body: Any) -> dict[str, Any]:
        answer = ask(self, path, body)
        if path == "kv/txn" and body["compare"] and not lost:
            lost.append(body)
            table.set("second", b"2")
            table.say({"line": 2})
            raise EtcdAway("the answer is lost")
        return answer

    with store_in(etcd, tmp_path) as store:
        journal, table = store.lead()
        journal.flush(SECONDS)
        monkeypatch.setattr(EtcdClient, "try_once", lose)
        table.set("first", b"1")
        journal.flush(SECONDS)
        assert lost
        # The first one may have begun to wait before the second key came.
        journal.flush(SECONDS)
        assert dict(Table(store.open()).items("")) == {"first": b"1", "second": b"2"}
        assert open_reader(tmp_path).look().facts == ({"line": 2},)


def test_an_etcd_that_is_slower_than_a_try_is_heard_all_the_same(
    etcd: Cluster, tmp_path: Path
) -> None:
    slow = SlowCluster(etcd.hosts)
    with contextlib.closing(slow), store_in(slow, tmp_path) as store:
        journal, table = store.lead()
        journal.flush(SECONDS)
        slow.seconds = 1.5 * etcd_client.TRY_SECONDS
        for number in range(2):
            table.set("epoch", str(number).encode())
            journal.flush(SECONDS)
        slow.seconds = 0.0
        assert Table(store.open()).get("epoch") == b"1"


def test_while_etcd_is_away_nobody_is_answered_and_nothing_is_lost(
    member: Cluster, tmp_path: Path
) -> None:
    with store_in(member, tmp_path) as store:
        journal = store.open()
        journal.claim(20.0)
        table, reader = Table(journal), open_reader(tmp_path)
        assert reader.look().leader is not None
        member.suspend()

        async def write() -> None:
            table.set("epoch", b"0")
            table.set("epoch", b"1")
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(table.kept(), 2.0)
            news = reader.look()
            assert (news.is_away, news.facts) == (True, ())
            assert news.leader is not None
            member.resume()
            await asyncio.wait_for(table.kept(), SECONDS)

        asyncio.run(write())
        assert Table(store.open()).get("epoch") == b"1"


def test_a_lease_that_ends_while_etcd_is_away_ends_the_leader(
    member: Cluster, tmp_path: Path
) -> None:
    with store_in(member, tmp_path) as store:
        journal = store.open()
        journal.claim(2.0)
        table = Table(journal)
        member.suspend()
        time.sleep(3.0)
        table.set("epoch", b"0")
        with pytest.raises(EtcdAway, match=r"has kept nothing for 0\.5 s"):
            journal.flush(0.5)
        member.resume()
        with contextlib.suppress(Deposed):
            journal.flush(SECONDS)
            # etcd may hear of it before it looks at its leases: then it leads on.
            journal.check()
            assert Table(store.open()).get("epoch") == b"0"
            return
        assert store.lead()[1].get("epoch") is None


def test_etcd_comes_back_with_what_it_had(member: Cluster, tmp_path: Path) -> None:
    with store_in(member, tmp_path) as store:
        journal = store.open()
        journal.claim(10.0)
        table = Table(journal)
        table.set("epoch", b"0")
        journal.flush()
        member.kill(0)
        table.set("epoch", b"1")
        member.restart(0)
        journal.flush(SECONDS)
        assert Table(store.open()).get("epoch") == b"1"


def test_more_keys_than_one_transaction_takes_are_removed(etcd: Cluster, tmp_path: Path) -> None:
    with store_in(etcd, tmp_path) as store:
        journal, table = store.lead()
        for number in range(300):
            table.set(f"group/0/{number}", b"1")
        table.set("epoch", b"1")
        journal.flush()
        assert len(store.keys()) == 301
        with table.together():
            assert table.delete_prefix("group/0/") == 300
            table.set("epoch", b"2")
        journal.flush()
        assert store.keys() == ["epoch"]


def test_more_values_than_one_transaction_takes_are_refused_with_etcd_s_word(
    etcd: Cluster, tmp_path: Path
) -> None:
    with store_in(etcd, tmp_path) as store:
        journal, table = store.lead()
        table.set_all({f"joined/node{number}": b"1" for number in range(200)})
        with pytest.raises(EtcdRefused, match="too many operations"):
            journal.flush()
        assert store.keys() == []


def test_of_what_was_said_the_newest_is_kept(
    etcd: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd_journal, "MOST_FACTS", 10)
    with store_in(etcd, tmp_path) as store:
        for first in (0, 20):
            journal, table = store.lead()
            for number in range(first, first + 20):
                table.say({"line": number})
            journal.flush()
        told = [fact["line"] for fact in open_reader(tmp_path).look().facts]
        assert told == list(range(30, 40))
        with snapshot_of(tmp_path) as seen:
            assert seen is not None
            number, facts = seen.facts(0)
            assert (number, [fact["line"] for fact in facts]) == (40, told)
            assert seen.facts(38)[1] == ({"line": 38}, {"line": 39})


def test_whoever_watches_sees_one_moment(etcd: Cluster, tmp_path: Path) -> None:
    with store_in(etcd, tmp_path) as store:
        with snapshot_of(tmp_path) as seen:
            assert seen is None
        journal, table = store.lead()
        for key in ("agent/node1", "agent/node0", "epoch"):
            table.set(key, key.encode())
        journal.flush()
        with snapshot_of(tmp_path) as seen:
            assert seen is not None
            table.set("agent/node2", b"later")
            table.set("epoch", b"later")
            journal.flush()
            assert list(seen.items("agent/")) == ["agent/node1", "agent/node0"]
            assert (seen.get("epoch"), seen.get("nothing")) == (b"epoch", None)
            leader = seen.leader()
            assert leader is not None
            assert (leader.generation, leader.pid, leader.is_here) == (1, os.getpid(), True)


def test_over_tls_both_sides_prove_themselves(tmp_path: Path) -> None:
    tls = make_certificates(tmp_path)
    job_dir = tmp_path / "job"
    job_dir.mkdir()
    with cluster(1, tls) as member:
        files = f"cacert={tls.cacert}&cert={tls.cert}&key={tls.key}"
        text = f"{member.url('tests/tls')}?{files}"
        secured = EtcdPlace.parse(text, "")
        assert EtcdPlace.parse(str(secured), "") == secured
        with contextlib.closing(EtcdJournal(secured)) as journal:
            assert journal.claim(2.0) == 1
            Table(journal).set("epoch", b"0")
            journal.flush()
        for left_out in (f"?cacert={tls.cacert}", ""):
            stranger = EtcdPlace.parse(f"{member.url('tests/tls')}{left_out}", "")
            with contextlib.closing(EtcdClient(stranger)) as client, pytest.raises(EtcdAway):
                client.try_once("kv/range", {"key": "AA=="})


def test_who_watches_reads_each_fact_once(
    members: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each look all that a long job has said would take minutes, for a line that is new."""
    job, asked, ask = EtcdPlace.parse(members.url("tests/facts")), list[str](), EtcdClient.try_once
    root, led = f"{job.name}/", Holder.this_process(1, 2).to_json()
    facts = [etcd_client.put(fact_key(root, n), b"%d" % n) for n in range(1, 91)]

    def counted(client: EtcdClient, path: str, *args: Any) -> dict[str, Any]:
        reply = ask(client, path, *args)
        asked.append(path)
        return reply

    with contextlib.closing(EtcdClient(job)) as client:
        puts = etcd_client.transaction([], [etcd_client.put(f"{root}led", led), *facts])
        client.insist("kv/txn", puts, time.monotonic() + SECONDS)
    monkeypatch.setattr(etcd_client, "PAGE_KEYS", 10)
    monkeypatch.setattr(EtcdClient, "try_once", counted)
    with etcd_snapshot(job) as known:
        assert known is not None
        assert known.facts(0) == (90, tuple(range(1, 91)))
        assert asked.count("kv/range") == 9
        assert known.facts(88) == (90, (89, 90))
        assert known.facts(90) == (90, ())
        assert asked.count("kv/range") == 11
