"""What ``--store`` may say, and what a job finds in its folder."""

from pathlib import Path

import pytest
from etcd_cluster import HOST, Cluster, free_ports

from megatron_bamboo.errors import UserError
from megatron_bamboo.membership.store_place import STORE_FILE, EtcdPlace, place_of
from megatron_bamboo.membership.stores import begin_store, open_journal
from megatron_bamboo.membership.table import Table


@pytest.mark.parametrize(
    ("text", "endpoints", "name"),
    [
        ("etcd://127.0.0.1:2379", [("127.0.0.1", 2379)], "bamboo/job"),
        ("etcd://localhost:1/", [("localhost", 1)], "bamboo/job"),
        ("etcd://[::1]:1,127.0.0.2:2/a/b/", [("::1", 1), ("127.0.0.2", 2)], "a/b"),
    ],
)
def test_a_place_is_read_and_written(
    text: str, endpoints: list[tuple[str, int]], name: str
) -> None:
    place = EtcdPlace.parse(text, "bamboo/job")
    assert (list(place.endpoints), place.name) == (endpoints, name)
    assert EtcdPlace.parse(str(place), "") == place


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("http://127.0.0.1:2379", r"write etcd://HOST:PORT"),
        ("etcd://127.0.0.1:2379?ca=x", r"write etcd://HOST:PORT"),
        ("etcd://127.0.0.1:2379#x", r"write etcd://HOST:PORT"),
        ("etcd://", "nothing is no HOST:PORT"),
        ("etcd://127.0.0.1", "127.0.0.1 is no HOST:PORT"),
        ("etcd://127.0.0.1:0", "127.0.0.1:0 is no HOST:PORT"),
        ("etcd://127.0.0.1:65536", "127.0.0.1:65536 is no HOST:PORT"),
        ("etcd://127.0.0.1:1,,", "nothing is no HOST:PORT"),
        ("etcd://root@127.0.0.1:1", "root@127.0.0.1:1 is no HOST:PORT"),
        ("etcd://127.0.0.1:1,etcd2:1", "without TLS whoever reaches etcd there"),
        ("etcd://127.0.0.1:1?cert=/x", "give cert and key together"),
        ("etcd://127.0.0.1:1?cert=/x&key=/x", "give cacert beside cert and key"),
        ("etcd://etcd2:1?cacert=/nowhere", "/nowhere one cannot be used: "),
    ],
)
def test_what_is_no_place_is_refused(text: str, why: str) -> None:
    with pytest.raises(UserError, match=f"^--store .*{why}"):
        EtcdPlace.parse(text, "bamboo/job")


def test_a_job_without_a_place_has_the_embedded_store(tmp_path: Path) -> None:
    (tmp_path / STORE_FILE).write_text("etcd://127.0.0.1:1/of/a/run/that/was/refused")
    begin_store(tmp_path, None)
    assert place_of(tmp_path) is None


def test_a_name_that_etcd_knows_already_is_refused(tmp_path: Path, etcd: Cluster) -> None:
    url = etcd.url("tests/taken")
    begin_store(tmp_path, url)
    journal = open_journal(tmp_path)
    journal.claim(2.0)
    Table(journal).set("epoch", b"0")
    journal.flush()
    journal.close()
    with pytest.raises(UserError, match="etcd holds a job of the name tests/taken already"):
        begin_store(tmp_path, url)
    begin_store(tmp_path, etcd.url("tests/take"))


def test_an_etcd_that_is_not_there_is_said_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_bamboo.membership.stores.FIRST_ANSWER_SECONDS", 0.5)
    url = f"etcd://{HOST}:{free_ports(1)[0]}/tests/nobody"
    with pytest.raises(UserError, match=r"does not answer: .*refused; is it started"):
        begin_store(tmp_path, url)
    assert place_of(tmp_path) is None
