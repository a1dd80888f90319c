"""The port at which Prometheus asks: where it is opened, and what happens to it."""

import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import psutil
import pytest
from story import LAST_STEP

from megatron_bamboo.agent.job import JobShape
from megatron_bamboo.errors import UserError
from megatron_bamboo.planner.arrangement import equal_pipelines
from megatron_bamboo.watching.endpoint import Endpoint
from megatron_bamboo.watching.serving import MOST_CONNECTIONS

ANSWER_SECONDS = 30.0


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[Endpoint]:
    with closing(Endpoint("0")) as opened:
        JobShape(equal_pipelines(3, 2, 2), "lazy", LAST_STEP, 16).write(tmp_path)
        opened.serve(tmp_path)
        yield opened


def asked(url: str) -> str:
    with urllib.request.urlopen(url, timeout=ANSWER_SECONDS) as answer:
        return str(answer.read().decode())


def port_of(endpoint: Endpoint) -> int:
    return int(endpoint.url.removesuffix("/metrics").rpartition(":")[2])


def test_without_an_address_it_is_for_this_machine_alone(endpoint: Endpoint) -> None:
    assert endpoint.url.startswith("http://127.0.0.1:")
    assert f"bamboo_steps_wanted {LAST_STEP}.0\n" in asked(endpoint.url)


def test_where_there_is_nothing_to_read_the_answer_says_so(
    endpoint: Endpoint, tmp_path: Path
) -> None:
    (tmp_path / "job.json").rename(tmp_path / "elsewhere.json")
    with pytest.raises(urllib.error.HTTPError) as caught:
        asked(endpoint.url)
    assert caught.value.code == 503
    assert "there is no job in" in caught.value.read().decode()
    (tmp_path / "elsewhere.json").rename(tmp_path / "job.json")
    assert "bamboo_steps_total" in asked(endpoint.url)


def test_strangers_that_stay_on_the_line_or_send_rubbish_hold_up_nobody(
    endpoint: Endpoint, tmp_path: Path
) -> None:
    asked(endpoint.url)
    idle = [socket.create_connection(("127.0.0.1", port_of(endpoint))) for _ in range(20)]
    for number, stranger in enumerate(idle):
        if number % 2:
            stranger.sendall(b"\x00\xff" * 500 + b"\r\n\r\n")
    assert "bamboo_steps_total" in asked(endpoint.url)
    for stranger in idle:
        stranger.close()


def test_those_who_ask_for_ever_are_so_many_at_most(endpoint: Endpoint) -> None:
    """A byte now and then keeps a connection; the newest ones are answered all the same."""
    asked(endpoint.url)
    (process,) = (p for p in psutil.Process().children() if "serving" in " ".join(p.cmdline()))
    dripping = []
    for _ in range(MOST_CONNECTIONS + 40):
        dripping.append(socket.create_connection(("127.0.0.1", port_of(endpoint))))
        dripping[-1].sendall(b"GET /metr")
    assert "bamboo_steps_total" in asked(endpoint.url)
    until = time.monotonic() + ANSWER_SECONDS
    while process.num_threads() > MOST_CONNECTIONS + 4 or process.num_fds() > 100:
        assert time.monotonic() < until, (process.num_threads(), process.num_fds())
        for stranger in dripping:
            with suppress(OSError):
                stranger.sendall(b"i")
        time.sleep(0.5)
    assert "bamboo_steps_total" in asked(endpoint.url)
    for stranger in dripping:
        stranger.close()


def test_it_ends_with_the_launcher(endpoint: Endpoint) -> None:
    asked(endpoint.url)
    endpoint.close()
    with pytest.raises(urllib.error.URLError, match="refused"):
        asked(endpoint.url)


def test_it_ends_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    JobShape(equal_pipelines(3, 2, 2), "lazy", LAST_STEP, 16).write(tmp_path)
    code = (
        "import pathlib, signal, sys; from megatron_bamboo.watching.endpoint import Endpoint\n"
        "endpoint = Endpoint('0'); endpoint.serve(pathlib.Path(sys.argv[1]))\n"
        "print(endpoint.url, flush=True); signal.pause()"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        try:
            url = launcher.stdout.readline().strip()
            assert "bamboo_steps_total" in asked(url)
        finally:
            launcher.kill()
    until = time.monotonic() + ANSWER_SECONDS
    # It may be in the middle of an answer.
    with pytest.raises(OSError):
        while time.monotonic() < until:
            asked(url)


def test_addresses_are_taken_as_given() -> None:
    with closing(Endpoint("localhost:0")) as named:
        assert named.url.startswith("http://127.0.0.1:")
    with closing(Endpoint("0.0.0.0:0")) as anywhere:
        assert anywhere.url.startswith("http://0.0.0.0:")


def test_a_busy_port_is_one_clear_line() -> None:
    with closing(Endpoint("0")) as first:
        port = port_of(first)
        with pytest.raises(UserError, match=f"--metrics-port {port}: the port is taken: give"):
            Endpoint(str(port))


@pytest.mark.parametrize("text", ["many", "", "70000", "-1", "host:", "127.0.0.1"])
def test_what_is_no_port_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=f"^--metrics-port {text}: give a port"):
        Endpoint(text)


def test_an_address_that_is_not_known_or_not_of_this_machine_is_refused() -> None:
    with pytest.raises(UserError, match=r"no-such-host\.invalid is not known"):
        Endpoint("no-such-host.invalid:0")
    with pytest.raises(UserError, match=r"nobody can listen there .*: give an address of this"):
        Endpoint("192.0.2.1:0")
