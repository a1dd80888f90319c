"""A client's authenticated connection, on a blocking socket.

The port may be anybody's: nothing is said but a greeting before the server has proven that it knows
the job's secret, and nothing is heard that it did not seal.
"""

import secrets
import socket
from typing import Any

from megatron_bamboo.membership.frames import (
    MalformedFrame,
    decode_body,
    receive_exactly,
    receive_frame,
    set_deadline,
)
from megatron_bamboo.membership.greeting import GREETING_LIMIT_BYTES, PROOF, Greeting
from megatron_bamboo.membership.keys import NONCE_BYTES, Credential
from megatron_bamboo.membership.sealing import HEAD_BYTES, BrokenSeal, Session


class Impostor(ConnectionError):
    """Who listens there does not have the secret that this client has."""


class OtherSecret(Impostor):
    """It is a job's coordinator, by its words, and has another secret."""


class Channel:
    """One connection; it owns the socket, and has greeted when it is made.

    Args:
        until: when the greeting must have left, by the monotonic clock.
    """

    def __init__(self, connection: socket.socket, credential: Credential, until: float) -> None:
        self.socket = connection
        self._greeting = Greeting(credential, secrets.token_bytes(NONCE_BYTES))
        self._session: Session | None = None
        try:
            self._write(self._greeting.frame, until)
        except OSError:
            connection.close()
            raise

    @property
    def is_open(self) -> bool:
        """Whether the server has proven itself."""
        return self._session is not None

    def open(self, until: float) -> None:
        """Take the server's answer to the greeting, and prove who this is.

        Raises:
            OtherSecret: the answer is a coordinator's, of another secret, or was changed.
            Impostor: the answer is nobody's who knows of these greetings.
        """
        no_proof = "it does not prove that it has this job's secret"
        try:
            answer = receive_frame(self.socket, until, GREETING_LIMIT_BYTES)
            session = self._greeting.session(answer)
            self._receive(session, until)
        except BrokenSeal as error:
            raise OtherSecret(f"{no_proof}: {error}") from None
        except MalformedFrame as error:
            raise Impostor(f"{no_proof}: {error}") from None
        self._write(session.seal(PROOF), until)
        self._session = session

    def send(self, body: bytes, until: float) -> None:
        """Say what ``encode_body`` made of a message."""
        assert self._session is not None
        self._write(self._session.seal(body), until)

    def receive(self, until: float) -> dict[str, Any]:
        """The next message.

        Raises:
            BrokenSeal: something else has come.
        """
        assert self._session is not None
        return decode_body(self._receive(self._session, until))

    def close(self) -> None:
        """End it."""
        self.socket.close()

    def _receive(self, session: Session, until: float) -> bytes:
        head = receive_exactly(self.socket, HEAD_BYTES, until)
        rest = receive_exactly(self.socket, session.num_to_come(head), until)
        return session.open(head, rest)

    def _write(self, data: bytes, until: float) -> None:
        set_deadline(self.socket, until)
        self.socket.sendall(data)
