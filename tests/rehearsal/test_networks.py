"""A node with a network of its own is cut off in silence, and nothing else is touched."""

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from needs import missing

from megatron_bamboo.agent.process import ForkedProcess, fork
from megatron_bamboo.rehearsal.networks import HUB_ADDRESS, cut_off, hub, join_hub, mend, why_not

SECONDS = 30.0
NOBODY = 65534


@pytest.fixture
def networks() -> None:
    if (reason := why_not()) is not None:
        missing("netns", reason)


def started(main: Callable[[], None]) -> ForkedProcess:
    def run() -> int:
        main()
        return 0

    return ForkedProcess(fork(run))


def status_of(process: ForkedProcess) -> int:
    until = time.monotonic() + SECONDS
    while (status := process.poll()) is None:
        if time.monotonic() > until:
            process.kill()
        time.sleep(0.01)
    return status


def of_the_machine() -> tuple[list[str], list[str]]:
    """Its interfaces and its named network namespaces."""
    lines = Path("/proc/1/net/dev").read_text().splitlines()[2:]
    named = Path("/run/netns")
    names = [path.name for path in named.iterdir()] if named.is_dir() else []
    return sorted(line.partition(":")[0].strip() for line in lines), sorted(names)


def connected(server: socket.socket) -> socket.socket:
    server.settimeout(SECONDS)
    connection, _ = server.accept()
    return connection


def test_what_a_cut_off_node_and_others_say_comes_when_it_is_mended(
    networks: None, tmp_path: Path
) -> None:
    before = of_the_machine()
    with hub(), socket.create_server((HUB_ADDRESS, 0)) as server:
        port = server.getsockname()[1]

        def be_a_node() -> None:
            join_hub(1, os.getppid())
            with socket.create_connection((HUB_ADDRESS, port), SECONDS) as connection:
                cut_off()
                connection.sendall(b"lost")
                (tmp_path / "cut").touch()
                assert connection.recv(4) == b"late"

        node = started(be_a_node)
        with connected(server) as connection:
            while not (tmp_path / "cut").exists():
                assert node.poll() is None
                time.sleep(0.01)
            connection.sendall(b"late")
            connection.settimeout(0.5)
            with pytest.raises(TimeoutError):  # neither data nor an end
                connection.recv(4)
            assert of_the_machine() == before
            mend(node.pid)
            connection.settimeout(SECONDS)
            assert connection.recv(4) == b"lost"
            assert status_of(node) == 0
    assert of_the_machine() == before


def test_nodes_reach_each_other(networks: None, tmp_path: Path) -> None:
    with hub():

        def listen() -> None:
            join_hub(1, os.getppid())
            with socket.create_server(("", 0)) as server:
                (tmp_path / "port").write_text(str(server.getsockname()[1]))
                with connected(server) as connection:
                    assert connection.getpeername()[0] == "10.97.1.44"

        listener = started(listen)
        while not (tmp_path / "port").exists() or not (tmp_path / "port").read_text():
            assert listener.poll() is None
            time.sleep(0.01)
        port = int((tmp_path / "port").read_text())

        def connect() -> None:
            join_hub(299, os.getppid())
            socket.create_connection(("10.97.0.2", port), SECONDS).close()

        assert [status_of(started(connect)), status_of(listener)] == [0, 0]


def test_the_machines_own_network_cannot_be_cut() -> None:
    with pytest.raises(OSError, match="No such device"):
        cut_off()


def test_who_is_not_root_is_told_so(tmp_path: Path) -> None:
    def ask() -> int:
        if os.getuid() == 0:
            os.setuid(NOBODY)
        reason = why_not()
        return 0 if reason is not None and reason.startswith("only root can give") else 1

    assert status_of(ForkedProcess(fork(ask))) == 0
