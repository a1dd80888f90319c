"""The way into a job: what is waited for is said, and what can never come right is refused."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from server_thread import SECRET, ServerThread

from megatron_bamboo.agent import wait_lines
from megatron_bamboo.agent.asking import store_of
from megatron_bamboo.agent.door import Door
from megatron_bamboo.agent.wait_lines import WaitLines
from megatron_bamboo.errors import UserError
from megatron_bamboo.membership.address import ADDRESS_FILE
from megatron_bamboo.membership.secret_file import SECRET_FILE
from megatron_bamboo.membership.store_client import StoreClient

OTHER = "the secret of another job, which is as long"
LONG_SECONDS = 60.0


@pytest.fixture
def server() -> Iterator[ServerThread]:
    running = ServerThread()
    yield running
    running.stop()


def leave_secret(path: Path, text: str = OTHER) -> Path:
    path.write_text(text)
    path.chmod(0o600)
    return path


def leave_address(folder: Path, address: str) -> None:
    host, _, port = address.rpartition(":")
    (folder / ADDRESS_FILE).write_text(json.dumps({"host": host, "port": int(port)}))


def epoch(client: StoreClient) -> bytes | None:
    return client.get("epoch")


@pytest.mark.parametrize("by_file", [False, True])
def test_the_secret_of_another_job_is_refused_at_once(
    server: ServerThread, tmp_path: Path, by_file: bool
) -> None:
    leave_address(tmp_path, server.address)
    join = str(tmp_path / ADDRESS_FILE) if by_file else server.address
    door = Door(join, leave_secret(tmp_path / "mine"), LONG_SECONDS)
    with pytest.raises(UserError, match=r"the secret in .*mine is not that of the job") as refused:
        door.ask(door.find(), epoch)
    assert server.address in str(refused.value) and "--secret-file" in str(refused.value)


def test_where_others_have_the_port_of_a_job_it_is_waited_for(
    server: ServerThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BAMBOO_SECRET", raising=False)
    leave_secret(tmp_path / SECRET_FILE)
    leave_address(tmp_path, server.address)
    door = Door(str(tmp_path), None, 0.1)
    with pytest.raises(UserError, match="no coordinator of this job answers"):
        door.ask(door.find(), epoch)


def test_a_command_with_the_secret_of_another_job_says_so(
    server: ServerThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_bamboo.agent.asking.ANSWER_SECONDS", 0.3)
    leave_address(tmp_path, server.address)
    other = leave_secret(tmp_path / "other")
    with (
        pytest.raises(UserError, match=r"the secret in .*other is not that of the job"),
        store_of(tmp_path, other) as client,
    ):
        client.get("epoch")


def test_a_name_in_use_is_said_and_waited_for(
    server: ServerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wait_lines, "SILENT_SECONDS", 0.0)
    server.call(server.table.set, "agent/k1", b"{}")
    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line)
        server.call(server.table.set, "lost/k1", b"a test")

    door = Door(server.address, None, LONG_SECONDS, say=say)
    assert door.free_name(SECRET, "k1") == "k1.2"
    (line,) = lines
    assert line.startswith("waits for the name k1: there is a node k1 already, and it lives: give ")


def test_lines_come_after_a_while_and_at_other_reasons() -> None:
    lines: list[str] = []
    now = [0.0]
    waiting = WaitLines(lines.append, lambda: now[0])
    for at, why in ((0, "a"), (1, "b"), (2.9, "b"), (3, "b"), (4, "b"), (5, "c"), (6, "c")):
        now[0] = at
        waiting.waits("it", why)
    assert lines == ["waits for it: b", "waits for it: c"]
    waiting.waits("another", "d")
    assert len(lines) == 2


@pytest.mark.parametrize("join", ["127.0.0.1:99999", "127.0.0.1:0"])
def test_a_port_that_cannot_be_is_refused(join: str) -> None:
    with pytest.raises(UserError, match=f"--join {join}: a port is a number from 1 to 65535"):
        Door(join, None, LONG_SECONDS)


@pytest.mark.parametrize("join", ["127.0.0.1", "localhost:", "some-host", "http://127.0.0.1:9"])
def test_what_is_neither_a_file_nor_a_host_with_its_port_is_refused(
    join: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="a host needs its port: give HOST:PORT, or the path"):
        Door(join, None, LONG_SECONDS)


def test_a_job_folder_that_is_not_there_yet_is_waited_for(tmp_path: Path) -> None:
    door = Door(str(tmp_path / "runs" / "job.1"), None, 0.1)
    with pytest.raises(UserError, match=rf"there is no .*/runs/job\.1/{ADDRESS_FILE}: was its"):
        door.find()
