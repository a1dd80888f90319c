"""The launcher's side of ``--metrics-port``: it opens the port and starts who answers there."""

import errno
import os
import socket
import subprocess
import sys
from pathlib import Path

from megatron_bamboo.agent.process import spawn
from megatron_bamboo.errors import UserError

LOOPBACK = "127.0.0.1"
LOG_FILE = "metrics.log"


class Endpoint:
    """A port, open from the start, so that a busy one is noticed before anything is begun.

    Args:
        text: ``PORT`` or ``HOST:PORT``; port 0 is any free one.
    """

    def __init__(self, text: str) -> None:
        self._listener = _listen(text)
        self._process: subprocess.Popen[bytes] | None = None
        host, port = self._listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{port}/metrics"
        """Where Prometheus finds it."""

    def serve(self, job_dir: Path) -> None:
        """Start the process that answers; what it has to say goes to the job's logs."""
        descriptor = self._listener.fileno()
        command = [sys.executable, "-m", "megatron_bamboo.watching.serving"]
        command += [str(descriptor), str(job_dir)]
        logs = job_dir / "logs"
        logs.mkdir(exist_ok=True)
        with (logs / LOG_FILE).open("a") as log:
            # A session of its own: Ctrl-C is the launcher's to hear.
            self._process = spawn(
                command, os.environ, new_session=True, output=log, descriptors=(descriptor,)
            )
        self._listener.close()

    def close(self) -> None:
        """End the process and close the port."""
        self._listener.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def _listen(text: str) -> socket.socket:
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") or LOOPBACK
    if not port.isdecimal() or int(port) > 65535:
        raise UserError(
            f"--metrics-port {text}: give a port, or an address and a port, like 9400 or "
            "0.0.0.0:9400"
        )
    try:
        found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
        family, _, _, _, address = found[0]
        return socket.create_server((str(address[0]), int(port)), family=family)
    except socket.gaierror as error:
        raise UserError(
            f"--metrics-port {text}: {host} is not known ({error.strerror}): give an address of "
            "this machine"
        ) from error
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UserError(
                f"--metrics-port {text}: the port is taken: give another, or 0 for any free one"
            ) from error
        raise UserError(
            f"--metrics-port {text}: nobody can listen there ({os.strerror(error.errno or 0)}): "
            "give an address of this machine and a free port"
        ) from error
