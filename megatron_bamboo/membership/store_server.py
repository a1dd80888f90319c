"""The store: a small key-value service in the coordinator's event loop.

Workers reach it for records, plans and the rendezvous of their process groups; agents keep one
connection each open with ``hello``, whose end tells the coordinator at once that a node is gone.
Who says what is known from the connection (``gate.py``), not from what it says. A frame that makes
no sense closes its own connection and harms nobody else.
"""

import asyncio
import binascii
import contextlib
import errno
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from megatron_bamboo.membership.frames import (
    MalformedFrame,
    decode_value,
    encode_body,
    encode_value,
)
from megatron_bamboo.membership.gate import Gate, SealedStream
from megatron_bamboo.membership.keys import Kind, Role, Secret
from megatron_bamboo.membership.sealing import BrokenSeal
from megatron_bamboo.membership.table import Table


@dataclass(frozen=True, slots=True, eq=False)
class AgentLink:
    """An agent's open connection."""

    node: str
    pid: int
    writer: SealedStream
    incarnation: str = ""
    """The same for all connections that one agent ever makes."""

    def send(self, message: Mapping[str, Any]) -> None:
        """Tell the agent something; nothing happens where it is gone already."""
        if not self.writer.is_closing():
            self.writer.write(encode_body(message))


class AgentWatcher(Protocol):
    """Who wants to know about agents: the coordinator."""

    def joined(self, link: AgentLink) -> None:
        """An agent said hello, perhaps again; ValueError refuses it and closes its connection."""

    def heard(self, link: AgentLink, message: Mapping[str, Any]) -> None:
        """An agent reported something."""

    def closed(self, link: AgentLink) -> None:
        """An agent's connection has ended."""


class StoreServer:
    """Serves a table on one port. The port is open from construction, so that it can be told."""

    def __init__(
        self,
        table: Table,
        secret: Secret,
        watcher: AgentWatcher | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        self.table = table
        self._watcher = watcher
        self._listener = _listen(host, port)
        self._gate = Gate(self._listener, secret, self._serve)
        self._agents: dict[str, SealedStream] = {}
        self._running: asyncio.Task[None] | None = None

    @property
    def address(self) -> str:
        """``host:port``."""
        host, port = self._listener.getsockname()[:2]
        return f"{host}:{port}"

    async def __aenter__(self) -> "StoreServer":
        self._running = asyncio.create_task(self._gate.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._running is not None
        self._running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._running
        self._listener.close()

    def close(self) -> None:
        """Close the port of a server that was never entered; otherwise of no effect."""
        self._listener.close()

    async def _serve(self, role: Role, stream: SealedStream) -> None:
        if role.kind is Kind.AGENT:
            await self._serve_agent(role, stream)
        else:
            await self._serve_calls(role, stream)

    async def _serve_calls(self, role: Role, stream: SealedStream) -> None:
        table = self.table
        while True:
            request = await stream.read()
            try:
                reply = await self._answer(role, request)
            except (KeyError, TypeError, ValueError, binascii.Error) as error:
                raise MalformedFrame(f"{request}: {error}") from error
            # Whoever was stopped while another took its place must not answer from what it knows.
            await table.kept()
            stream.write(encode_body(reply))
            await stream.drain()

    async def _serve_agent(self, role: Role, stream: SealedStream) -> None:
        if self._watcher is None:
            raise MalformedFrame("this store has no place for agents")
        hello = await stream.read()
        try:
            link = AgentLink(role.node, int(hello["pid"]), stream, role.incarnation)
            self.table.check()
            self._watcher.joined(link)
        except (KeyError, TypeError, ValueError) as error:
            raise MalformedFrame(str(error)) from error
        # One of before may never end by itself: its way, or its machine, may be gone.
        if (before := self._agents.get(role.node)) is not None:
            before.close()
        self._agents[role.node] = stream
        is_gone = True
        try:
            link.send({"op": "welcome"})
            while True:
                message = await stream.read()
                self.table.check()
                self._watcher.heard(link, message)
        except BrokenSeal:
            # Somebody on the way has spoken, the node has not ended: it has the rest of its lease
            # to come back.
            is_gone = False
            raise
        finally:
            if self._agents.get(role.node) is stream:
                del self._agents[role.node]
            if is_gone:
                self._watcher.closed(link)

    async def _answer(self, role: Role, request: Mapping[str, Any]) -> dict[str, Any]:
        table = self.table
        if role.node in table.fenced:
            return {"fenced": True}
        match request["op"]:
            case "get":
                return {"value": encode_value(table.get(_key(request)))}
            case "set":
                table.set(_key(request), _value(request, "value"))
                return {}
            case "compare_set":
                expected = decode_value(request["expected"])
                held = table.compare_set(_key(request), expected, _value(request, "desired"))
                return {"value": encode_value(held)}
            case "add":
                return self._add(_key(request), int(request["amount"]), str(request["request"]))
            case "wait":
                keys = [str(key) for key in request["keys"]]
                return {"missing": await table.wait(keys, float(request["timeout"]))}
            case "wait_change":
                seen, timeout = decode_value(request["value"]), float(request["timeout"])
                value = await table.wait_change(_key(request), seen, timeout)
                return {"value": encode_value(value)}
            case "delete":
                return {"deleted": table.delete(_key(request))}
            case "count":
                return {"number": table.count(_key(request))}
            case "delete_prefix":
                return {"number": table.delete_prefix(_key(request))}
            case op:
                raise ValueError(f"unknown operation {op!r}")

    def _add(self, key: str, amount: int, request: str) -> dict[str, Any]:
        try:
            return {"number": self.table.add(key, amount, request)}
        except ValueError:
            return {"error": f"{key} holds no number"}


def _listen(host: str, port: int) -> socket.socket:
    """A listener on that port, or on any free one: a coordinator that was stopped may hold it, and
    where this one is all read in the job folder."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return socket.create_server((host, 0), family=family, backlog=1024)


def _key(request: Mapping[str, Any]) -> str:
    key = request["key"]
    if not isinstance(key, str):
        raise TypeError("a key is text")
    return key


def _value(request: Mapping[str, Any], field: str) -> bytes:
    value = decode_value(request[field])
    if value is None:
        raise TypeError("a value is text in base64")
    return value
