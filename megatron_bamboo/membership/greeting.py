"""How a connection of the control plane begins: both sides prove that they have the role's key.

    client  {"role": .., "nonce": ..}
    server  {"nonce": ..}, and its first sealed frame, which is empty
    client  its first sealed frame, empty too

Here is what is said; who sends and waits is elsewhere, since a worker blocks, an agent has other
things to do, and a server talks to many.
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from megatron_bamboo.membership.frames import MalformedFrame, encode_frame
from megatron_bamboo.membership.keys import NONCE_BYTES, Credential, Role, Secret
from megatron_bamboo.membership.sealing import Direction, Nonces, Session

GREETING_LIMIT_BYTES = 2048
PROOF = b"{}"
"""The body of the frame that proves a side: what counts is its seal."""


class Greeting:
    """A client's part."""

    def __init__(self, credential: Credential, nonce: bytes) -> None:
        self._credential = credential
        self._nonce = nonce

    @property
    def frame(self) -> bytes:
        """What to say first."""
        return encode_frame({"role": asdict(self._credential.role), "nonce": self._nonce.hex()})

    def session(self, answer: Mapping[str, Any]) -> Session:
        """The connection's session by the server's answer, which still has to prove itself."""
        nonces = Nonces(self._nonce, _nonce_of(answer))
        return Session(self._credential, nonces, Direction.TO_SERVER)


def answer_greeting(
    secret: Secret, greeting: Mapping[str, Any], nonce: bytes
) -> tuple[Role, Session, bytes]:
    """A server's part: whom the client claims to be, their session, and what to say.

    Raises:
        MalformedFrame: this is no greeting.
    """
    fields = greeting.get("role")
    if not isinstance(fields, dict):
        raise MalformedFrame("a greeting without a role")
    try:
        role = Role.parse(fields)
    except ValueError as error:
        raise MalformedFrame(str(error)) from None
    nonces = Nonces(_nonce_of(greeting), nonce)
    session = Session(Credential(role, secret.key_of(role)), nonces, Direction.TO_CLIENT)
    return role, session, encode_frame({"nonce": nonce.hex()}) + session.seal(PROOF)


def _nonce_of(message: Mapping[str, Any]) -> bytes:
    text = message.get("nonce")
    try:
        nonce = bytes.fromhex(text) if isinstance(text, str) else b""
    except ValueError:
        nonce = b""
    if len(nonce) != NONCE_BYTES:
        raise MalformedFrame(f"a nonce has {NONCE_BYTES} bytes")
    return nonce
