"""Who speaks on a connection of the control plane, and the key that proves it.

All keys come from the job's secret by HMAC-SHA256 and nothing leads back: a node has a key that is
good for its own name and incarnation alone, its agent and each of its workers one made of that, and
each connection two of its own, one a direction, from nonces of both sides. So nobody can take
another's name, and what was recorded on one connection is worth nothing on the next.
"""

import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Self

from megatron_bamboo.membership.workers import node_of

KEY_BYTES = 32
NONCE_BYTES = 32
LEAST_SECRET_CHARACTERS = 32
LONGEST_NAME = 200
_PURPOSE = b"megatron_bamboo control plane 1"


def derive(key: bytes, *parts: bytes) -> bytes:
    """A key for what the parts say; no two lists of parts are the same text."""
    text = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return hmac.digest(key, text, "sha256")


class Kind(StrEnum):
    """What a connection is for."""

    AGENT = "agent"
    WORKER = "worker"
    TOOL = "tool"
    """Whoever has the job's secret itself, and is no part of a node."""


@dataclass(frozen=True, slots=True)
class Role:
    """Whom a connection speaks for."""

    kind: Kind
    name: str = ""
    """The node's for an agent, the worker's for a worker."""
    incarnation: str = ""
    """The node's."""

    @property
    def node(self) -> str:
        """The node that this is a part of; empty for a tool."""
        return node_of(self.name)

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> Self:
        """What a stranger claims to be; ValueError where nobody could be that."""
        texts = [fields.get(name) for name in ("kind", "name", "incarnation")]
        if not all(isinstance(text, str) and len(text) <= LONGEST_NAME for text in texts):
            raise ValueError("a role is three short texts")
        kind, name, incarnation = map(str, texts)
        if bool(name and incarnation) == (kind == Kind.TOOL):
            raise ValueError("a node has a name and an incarnation, a tool has none")
        return cls(Kind(kind), name, incarnation)


@dataclass(frozen=True, slots=True)
class Credential:
    """A role and the key that proves it."""

    role: Role
    key: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class NodeIdentity:
    """All that a node has of the job's secret."""

    node: str
    incarnation: str
    key: bytes = field(repr=False)

    def agent(self) -> Credential:
        """For the node's agent."""
        return self._credential(Role(Kind.AGENT, self.node, self.incarnation))

    def worker(self, name: str) -> Credential:
        """For one of the node's workers."""
        assert node_of(name) == self.node, (name, self.node)
        return self._credential(Role(Kind.WORKER, name, self.incarnation))

    def _credential(self, role: Role) -> Credential:
        return Credential(role, _part_key(self.key, role))

    def to_text(self) -> str:
        """For the environment of the node's workers."""
        return f"{self.incarnation}:{self.key.hex()}"

    @classmethod
    def from_text(cls, node: str, text: str) -> Self:
        """What ``to_text`` wrote."""
        incarnation, _, key = text.rpartition(":")
        return cls(node, incarnation, bytes.fromhex(key))


@dataclass(frozen=True, slots=True)
class Secret:
    """What all who belong to a job know, and nobody else."""

    key: bytes = field(repr=False)

    @classmethod
    def of(cls, text: str) -> Self:
        """From the text that a file or the environment holds; ValueError for one that is short."""
        if len(text) < LEAST_SECRET_CHARACTERS:
            raise ValueError(f"a secret has {LEAST_SECRET_CHARACTERS} characters or more")
        return cls(derive(_PURPOSE, text.encode()))

    def node(self, name: str, incarnation: str) -> NodeIdentity:
        """The identity of a node from one start to its loss."""
        return NodeIdentity(name, incarnation, self._node_key(name, incarnation))

    def tool(self) -> Credential:
        """For whoever is no part of a node."""
        role = Role(Kind.TOOL)
        return Credential(role, self.key_of(role))

    def key_of(self, role: Role) -> bytes:
        """The key that whoever has this role must have."""
        if role.kind is Kind.TOOL:
            return derive(self.key, role.kind.encode())
        return _part_key(self._node_key(role.node, role.incarnation), role)

    def _node_key(self, node: str, incarnation: str) -> bytes:
        return derive(self.key, b"node", node.encode(), incarnation.encode())


def _part_key(node_key: bytes, role: Role) -> bytes:
    return derive(node_key, role.kind.encode(), role.name.encode())
