"""The way into a job for a node that starts elsewhere: it finds the coordinator, and asks it.

Who leads the job may not be there yet, or be away, or be another one by now; so all is asked again
until the deadline, and where to ask is looked up anew each time.
"""

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from megatron_bamboo.agent.interfaces import interface_to
from megatron_bamboo.agent.outcome import Outcome
from megatron_bamboo.agent.wait_lines import Say, WaitLines
from megatron_bamboo.errors import UserError
from megatron_bamboo.membership.address import ADDRESS_FILE, Signpost
from megatron_bamboo.membership.keys import Secret
from megatron_bamboo.membership.leaving import DRAINED
from megatron_bamboo.membership.lives import next_life
from megatron_bamboo.membership.secret_file import SECRET_VARIABLE, find_secret, wrong_secret
from megatron_bamboo.membership.store_client import StoreClient, StoreOfOthers, StoreTimeout

DEADLINE_SECONDS = 600.0
LOOK_SECONDS = 0.2
ANSWER_SECONDS = 2.0
COORDINATOR = "the job's coordinator"
ENDS = ("lost/", DRAINED, "finished/")
"""Where the store says that a node is none any more."""

Answer = TypeVar("Answer")


class NotNeeded(Exception):
    """Why this node need not join."""


class Door:
    """The way in.

    Args:
        join: the path of the file that says where the coordinator is, or ``host:port``.
        secret_file: holds the job's secret; None for the environment, or the job folder.
        missed: what is said not to be there while nobody knows of a coordinator.
        say: takes a line where something is waited for.
    """

    def __init__(
        self,
        join: str,
        secret_file: Path | None,
        deadline_seconds: float,
        missed: str = "",
        say: Say = lambda _: None,
    ) -> None:
        text = _place_of(join)
        self._text = text
        self._missed = missed or text
        self._signpost = Signpost(text)
        self._folder = Path(text).parent if os.path.isabs(text) else None
        # Whoever is a node works elsewhere, and may come here again.
        self._secret_file = None if secret_file is None else secret_file.absolute()
        self._seconds = deadline_seconds
        self._until = time.monotonic() + deadline_seconds
        self._lines = WaitLines(say)
        self.is_leaving = False
        """Whether this machine is to be taken."""

    def open_again(self) -> None:
        """Give another life of this machine the time to come in."""
        self._until = time.monotonic() + self._seconds

    def leave(self) -> None:
        """This machine is to be taken; called where signals are handled."""
        self.is_leaving = True

    def find(self) -> Secret:
        """Wait for a coordinator; the job's secret, which is there when one is.

        Raises:
            NotNeeded: the job is over, or this machine is to be taken.
            UserError: there is no coordinator, or no secret.
        """
        self.check_is_needed()
        if self._folder is None and not self._secret_was_given():
            raise UserError(
                f"--join {self._text} needs the job's secret: give --secret-file, or set "
                f"{SECRET_VARIABLE}"
            )
        while self._signpost.find() is None:
            self._signpost.check()
            why = f"there is no {self._missed}: was its bamboo coordinator started?"
            self._wait(COORDINATOR, why)
        return find_secret(self._folder or Path.cwd(), self._secret_file)

    def ask(self, secret: Secret, question: Callable[[StoreClient], Answer]) -> Answer:
        """The answer to a question that may be asked twice; as for ``find``.

        A job that lies beside its secret is waited for where others answer: its coordinator is
        gone then, and they have its port. Who was given a secret was given the wrong one.
        """
        while True:
            client = StoreClient(self._text, ANSWER_SECONDS, secret.tool())
            try:
                return question(client)
            except StoreTimeout as error:
                if isinstance(error, StoreOfOthers) and self._secret_was_given():
                    where = str(self._signpost)
                    raise UserError(wrong_secret(where, self._secret_file)) from error
                self._wait(COORDINATOR, f"no coordinator of this job answers ({error})")
            finally:
                client.close()

    def free_name(self, secret: Secret, machine: str) -> str:
        """The name of a machine in its next life; what it was before is a node no more."""
        name = machine
        while any(self.ask(secret, _values_of(f"agent/{name}"))):
            ends = _values_of(*(f"{end}{name}" for end in ENDS))
            while not any(self.ask(secret, ends)):
                self._wait(
                    f"the name {name}",
                    f"there is a node {name} already, and it lives: give --node another name if "
                    "this is another machine",
                )
            name = next_life(name)
        return name

    def interface(self) -> str:
        """The network interface of this machine that leads to the coordinator."""
        while (address := self._signpost.find()) is None:
            self._wait(COORDINATOR, f"there is no {self._text} any more")
        return interface_to(address.host, address.port)

    def _wait(self, what: str, why: str) -> None:
        """Wait a little; as for ``find``, UserError with the reason when the time is over."""
        self.check_is_needed()
        if time.monotonic() > self._until:
            raise UserError(f"{why} (waited {self._seconds:g} s, see --deadline)")
        self._lines.waits(what, why)
        time.sleep(LOOK_SECONDS)

    def _secret_was_given(self) -> bool:
        return self._secret_file is not None or SECRET_VARIABLE in os.environ

    def check_is_needed(self) -> None:
        """NotNeeded if that is known by now."""
        if self.is_leaving:
            raise NotNeeded("this machine is to be taken before it has joined")
        if self._folder is not None and (outcome := Outcome.read(self._folder)) is not None:
            raise NotNeeded(f"the job in {self._folder} is over, with status {outcome.status:d}")


def _values_of(*keys: str) -> Callable[[StoreClient], list[bytes | None]]:
    return lambda client: [client.get(key) for key in keys]


def _place_of(join: str) -> str:
    """The absolute path of a file, or ``host:port`` with a name that resolves."""
    host, _, port = join.rpartition(":")
    if "/" in join or not (host and port.isdecimal()):
        return str(_file_of(join))
    if not 0 < int(port) < 1 << 16:
        raise UserError(f"--join {join}: a port is a number from 1 to 65535")
    try:
        socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:
        raise UserError(f"--join {join}: {host} does not resolve ({error})") from error
    return join


def _file_of(join: str) -> Path:
    """Where a coordinator writes where it is; its folder need not be there yet."""
    path = Path(join).absolute()
    if path.name == ADDRESS_FILE or (path.exists() and not path.is_dir()):
        return path
    if "://" in join or ("/" not in join and not path.exists()):
        raise UserError(
            f"--join {join}: there is no such file or folder, and a host needs its port: give "
            f"HOST:PORT, or the path of the job folder's {ADDRESS_FILE}"
        )
    return path / ADDRESS_FILE
