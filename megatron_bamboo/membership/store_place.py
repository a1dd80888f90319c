"""Where a job's store is: in the coordinator and the job folder, or in etcd.

The choice stands in the job folder, so that every coordinator and whoever watches finds the same
store there, and only the launcher is told on its command line.
"""

import argparse
import ipaddress
import re
import ssl
import urllib.parse
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from megatron_bamboo.errors import UserError

STORE_FILE = "store.url"
SCHEME = "etcd://"
_FORM = "etcd://HOST:PORT[,HOST:PORT...][/NAME][?cacert=FILE&cert=FILE&key=FILE]"


def add_store_option(parser: argparse.ArgumentParser) -> None:
    """``--store``, for all commands that begin a job."""
    parser.add_argument(
        "--store",
        metavar="URL",
        help=f"keep what the job knows in etcd: {_FORM} (default: in a file of the job folder); "
        "NAME is the job's in etcd (default: bamboo/ and the name of the job folder)",
    )


@dataclass(frozen=True, slots=True)
class EtcdPlace:
    """A job's place in an etcd cluster."""

    endpoints: tuple[tuple[str, int], ...]
    """Host and port of each member."""
    name: str
    """What all of the job's keys begin with, less the slash behind it."""
    cacert: str | None = None
    cert: str | None = None
    key: str | None = None

    @classmethod
    def parse(cls, text: str, default_name: str = "", flag: str = "--store") -> Self:
        """From what ``--store`` was given, or another flag.

        Raises:
            UserError: it is no such place, or one where anybody could change the job.
        """
        parts = urllib.parse.urlsplit(text)
        options = dict(urllib.parse.parse_qsl(parts.query, keep_blank_values=True))
        if not text.startswith(SCHEME) or parts.fragment or options.keys() - _FILES:
            raise UserError(f"{flag} {text}: write {_FORM}")
        endpoints = tuple(_endpoint(f"{flag} {text}", p) for p in parts.netloc.split(","))
        files = {name: str(Path(path).absolute()) for name, path in options.items()}
        place = cls(endpoints, parts.path.strip("/") or default_name, **files)
        place._check(flag, text)
        return place

    def _check(self, flag: str, text: str) -> None:
        given = f"{flag} {text}"
        if (self.cert is None) != (self.key is None):
            raise UserError(f"{given}: give cert and key together, or neither")
        if self.cert is not None and self.cacert is None:
            raise UserError(f"{given}: give cacert beside cert and key")
        if not self.is_secured and not all(_is_loopback(host) for host, _ in self.endpoints):
            raise UserError(
                f"{given}: without TLS whoever reaches etcd there could change the job: "
                "give cacert=FILE, and cert=FILE and key=FILE where etcd asks for them"
            )
        self.tls(flag)

    @property
    def is_secured(self) -> bool:
        """Whether TLS is spoken there."""
        return self.cacert is not None

    def tls(self, flag: str = "--store") -> ssl.SSLContext | None:
        """What connections are made with; None for plain ones.

        Args:
            flag: by which this place was given.

        Raises:
            UserError: the files cannot be used.
        """
        if self.cacert is None:
            return None
        try:
            context = ssl.create_default_context(cafile=self.cacert)
            if self.cert is not None:
                context.load_cert_chain(self.cert, self.key)
        except OSError as error:  # of ssl too
            files = ", ".join(file for file in (self.cacert, self.cert, self.key) if file)
            raise UserError(f"{flag} {self}: of {files} one cannot be used: {error}") from error
        return context

    def __str__(self) -> str:
        hosts = ",".join(f"{_bracketed(host)}:{port}" for host, port in self.endpoints)
        files = [(name, getattr(self, name)) for name in sorted(_FILES) if getattr(self, name)]
        query = urllib.parse.urlencode(files, safe="/")
        return f"{SCHEME}{hosts}/{self.name}{'?' if query else ''}{query}"


_FILES = {"cacert", "cert", "key"}


def place_of(job_dir: Path) -> EtcdPlace | None:
    """Where the store of a job is that has been begun; None for the embedded one.

    Raises:
        UserError: what stands there can be no store.
    """
    try:
        text = (job_dir / STORE_FILE).read_text().strip()
    except FileNotFoundError:
        return None
    return EtcdPlace.parse(text, "")


def _endpoint(given: str, part: str) -> tuple[str, int]:
    found = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^:\[\]@\s]+):([0-9]{1,5})", part)
    if found is None or not 0 < int(found[2]) < 1 << 16:
        raise UserError(f"{given}: {part or 'nothing'} is no HOST:PORT; write {_FORM}")
    return found[1].strip("[]"), int(found[2])


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
