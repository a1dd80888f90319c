"""Clusters of real etcd members on this machine, whose members can die and fall silent."""

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from needs import missing, require_program

START_SECONDS = 60.0
HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """What members and their clients prove themselves with."""

    cacert: Path
    cert: Path
    key: Path


def make_certificates(folder: Path) -> TlsFiles:
    """An authority, and one certificate of it for members and clients."""
    openssl = shutil.which("openssl")
    if openssl is None:
        missing("etcd", "there is no openssl")
    made = TlsFiles(folder / "ca.pem", folder / "cert.pem", folder / "key.pem")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1\n")
    key = ["-newkey", "rsa:2048", "-nodes", "-subj", "/CN=tests"]
    commands = (
        ["req", "-x509", *key, "-keyout", f"{folder}/ca.key", "-out", str(made.cacert)],
        ["req", *key, "-keyout", str(made.key), "-out", f"{folder}/request"],
        ["x509", "-req", "-in", f"{folder}/request", "-CA", str(made.cacert), "-CAkey",
         f"{folder}/ca.key", "-CAcreateserial", "-extfile", f"{folder}/names", "-out",
         str(made.cert)],
    )  # fmt: skip
    for command in commands:
        subprocess.run([openssl, *command], check=True, capture_output=True)
    return made


class Cluster:
    """Some members, as processes of this one."""

    def __init__(self, folder: Path, num_members: int, tls: TlsFiles | None = None) -> None:
        self._program = require_program("etcd", "etcd", "etcd-server")
        self._folder = folder
        self._tls = tls
        self._num_members = num_members
        self._ports: list[tuple[int, int]] = []
        self._members: list[subprocess.Popen[bytes]] = []

    @property
    def hosts(self) -> str:
        """As a URL names them."""
        return ",".join(f"{HOST}:{port}" for port, _ in self._ports)

    def url(self, name: str) -> str:
        """What ``--store`` is given for the job of a name."""
        return f"etcd://{self.hosts}/{name}"

    def start(self) -> None:
        """Start all members; they serve when this is over."""
        until = time.monotonic() + START_SECONDS
        while not self._start_all(until):
            # Somebody else has taken a port meanwhile.
            self.stop()
            assert time.monotonic() < until, "etcd does not start"

    def _start_all(self, until: float) -> bool:
        """Whether all serve; False where one has ended."""
        numbers = range(self._num_members)
        ports = free_ports(2 * self._num_members)
        self._ports = [(ports[2 * n], ports[2 * n + 1]) for n in numbers]
        for number in numbers:
            shutil.rmtree(self._folder / f"m{number}", ignore_errors=True)
        self._members = [self._start(number) for number in numbers]
        while not self._serves():
            if any(member.poll() is not None for member in self._members):
                return False
            assert time.monotonic() < until, "etcd does not start"
            time.sleep(0.05)
        return True

    def _serves(self) -> bool:
        if self._tls is None:
            return self.leader() is not None
        with contextlib.suppress(OSError), socket.create_connection((HOST, self._ports[0][0]), 1):
            return True
        return False

    def leader(self) -> int | None:
        """The number of the member that leads the others, if one says so."""
        for number in range(len(self._members)):
            with contextlib.suppress(OSError, http.client.HTTPException, ValueError, KeyError):
                status = self._ask(number)
                if status["leader"] == status["header"]["member_id"]:
                    return number
        return None

    def await_leader(self) -> int:
        """The same, as soon as one says so."""
        until = time.monotonic() + START_SECONDS
        while (number := self.leader()) is None:
            assert time.monotonic() < until, "no member leads"
            time.sleep(0.05)
        return number

    def kill(self, number: int) -> None:
        """A member is gone, at once."""
        self._members[number].kill()
        self._members[number].wait()

    def restart(self, number: int) -> None:
        """It is there again, with what it had on disk."""
        self._members[number] = self._start(number)

    def suspend(self) -> None:
        """No member answers any more, and no connection closes."""
        for member in self._members:
            member.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """All members go on."""
        for member in self._members:
            member.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """End all members."""
        for member in self._members:
            member.kill()
        for member in self._members:
            member.wait()

    def _ask(self, number: int) -> dict[str, dict[str, str]]:
        connection = http.client.HTTPConnection(HOST, self._ports[number][0], timeout=1.0)
        with contextlib.closing(connection):
            connection.request("POST", "/v3/maintenance/status", "{}")
            answer: dict[str, dict[str, str]] = json.loads(connection.getresponse().read())
        return answer

    def _start(self, number: int) -> "subprocess.Popen[bytes]":
        client = f"http{'s' if self._tls else ''}://{HOST}:{self._ports[number][0]}"
        peers = [f"http://{HOST}:{port}" for _, port in self._ports]
        command = [
            self._program, "--name", f"m{number}", "--data-dir", str(self._folder / f"m{number}"),
            "--listen-client-urls", client, "--advertise-client-urls", client,
            "--listen-peer-urls", peers[number], "--initial-advertise-peer-urls", peers[number],
            "--initial-cluster", ",".join(f"m{n}={url}" for n, url in enumerate(peers)),
            *self._tls_options(),
        ]  # fmt: skip
        with (self._folder / f"m{number}.log").open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log)

    def _tls_options(self) -> Sequence[str]:
        if self._tls is None:
            return ()
        return (
            "--cert-file", str(self._tls.cert), "--key-file", str(self._tls.key),
            "--trusted-ca-file", str(self._tls.cacert), "--client-cert-auth",
        )  # fmt: skip


class SlowCluster:
    """A member whose answers come late."""

    def __init__(self, host: str) -> None:
        self.seconds = 0.0
        """So late, from now on."""
        slow = self

        class Late(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                connection = http.client.HTTPConnection(host, timeout=START_SECONDS)
                with contextlib.closing(connection):
                    connection.request("POST", self.path, body)
                    reply = connection.getresponse()
                    answer = reply.read()
                time.sleep(slow.seconds)
                with contextlib.suppress(ConnectionError):  # nobody waits for it any more
                    self.send_response(reply.status)
                    self.send_header("Content-Length", str(len(answer)))
                    self.end_headers()
                    self.wfile.write(answer)

            def log_message(self, *args: object) -> None:
                """Nobody reads it."""

        self._server = ThreadingHTTPServer((HOST, 0), Late)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def url(self, name: str) -> str:
        """What ``--store`` is given for the job of a name."""
        return f"etcd://{HOST}:{self._server.server_port}/{name}"

    def close(self) -> None:
        """Serve nobody any more."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextlib.contextmanager
def cluster(num_members: int, tls: TlsFiles | None = None) -> Iterator[Cluster]:
    """A cluster that serves within the context; in memory, since etcd waits for its disk."""
    memory = Path("/dev/shm")
    place = str(memory) if os.access(memory, os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="bamboo-etcd-", dir=place))
    made = None
    try:
        made = Cluster(folder, num_members, tls)
        made.start()
        yield made
    finally:
        if made is not None:
            made.resume()
            made.stop()
        shutil.rmtree(folder)


def free_ports(number: int) -> list[int]:
    """Ports that nobody listens on."""
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server((HOST, 0))) for _ in range(number)]
        return [int(server.getsockname()[1]) for server in servers]
