"""Attacks a coordinator's port with all that a stranger can send, and measures what nodes notice.

    python tests/agent/hostile.py                       # a million frames, 10,000 idle connections
    python tests/agent/hostile.py --frames 2000 --idle 300 --seconds 5

The coordinator is a process of its own with the real members, leases and store, without a job. An
agent's real connection says that it is there all the time, in another process. Strangers send
random bytes, malformed and forged greetings, wrong seals, lengths of 4 GB and a recorded session,
and open connections on which they say nothing. It prints a JSON line and ends with 1 where anything
has changed, or a limit was passed.
"""

import argparse
import asyncio
import contextlib
import json
import logging
import multiprocessing
import random
import resource
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import psutil

sys.path.append(str(Path(__file__).parent.parent / "membership"))

from server_thread import INCARNATION, SECRET, channel
from wiretap import Wiretap

from megatron_bamboo.agent.members import Members
from megatron_bamboo.membership.frames import encode_body, encode_frame, receive_frame
from megatron_bamboo.membership.greeting import PROOF
from megatron_bamboo.membership.keys import Credential, Secret
from megatron_bamboo.membership.sealing import HEAD_BYTES, Direction, Nonces, Session
from megatron_bamboo.membership.store_server import StoreServer
from megatron_bamboo.membership.table import Table
from megatron_bamboo.observe.events import EventLog

NODE, LEASE_SECONDS, BEAT_SECONDS = "node0", 60.0, 0.05
MOST_P99_SECONDS, MOST_GROWTH_BYTES = 1.0, 20 * 2**20
ANSWER_SECONDS = 60.0
FRAMES_A_CONNECTION = 10
OTHER = Secret.of("the secret of another job, which is as long")


@dataclass(frozen=True, slots=True)
class Findings:
    """What an attack has come to."""

    frames: int
    idle: int
    seconds: float
    beats: int
    beat_p50_ms: float
    beat_p99_ms: float
    beat_longest_ms: float
    grown_mib: float
    grown_idle_mib: float
    descriptors_more: int
    """Than before; a forked process has those of its parent, too."""
    log_lines: int
    is_unchanged: bool

    @property
    def is_good(self) -> bool:
        """Whether nothing has changed and nobody was kept waiting."""
        grown = max(self.grown_mib, self.grown_idle_mib) * 2**20
        is_quick = self.beat_p99_ms < 1000 * MOST_P99_SECONDS
        return self.is_unchanged and is_quick and grown <= MOST_GROWTH_BYTES


class Target:
    """A coordinator's port in a process of its own."""

    def __init__(self, folder: Path) -> None:
        ours, theirs = multiprocessing.Pipe()
        self._pipe: Connection = ours
        self._log = folder / "server.log"
        self._process = multiprocessing.get_context("fork").Process(
            target=_serve, args=(theirs, folder, self._log), daemon=True
        )
        self._process.start()
        self.address = str(ours.recv())
        self.process = psutil.Process(self._process.pid)

    def state(self) -> object:
        """All that the store holds and what is known of nodes."""
        self._pipe.send("state")
        assert self._pipe.poll(ANSWER_SECONDS), "the coordinator hangs"
        return self._pipe.recv()

    def memory(self) -> int:
        """Resident bytes."""
        return int(self.process.memory_info().rss)

    def log_lines(self) -> int:
        """How much was said of strangers."""
        return len(self._log.read_text().splitlines())

    def close(self) -> None:
        self._process.kill()
        self._process.join(ANSWER_SECONDS)


def _serve(pipe: Connection, folder: Path, log: Path) -> None:
    logging.basicConfig(filename=log, format="%(message)s", force=True)
    asyncio.run(_serve_until_killed(pipe, folder))


async def _serve_until_killed(pipe: Connection, folder: Path) -> None:
    table = Table()
    table.set("epoch", b"3")
    events = EventLog(folder / "events", "coordinator")
    members = Members([NODE, "node1"], table, events, lease_seconds=LEASE_SECONDS)
    asked = asyncio.Event()
    asyncio.get_running_loop().add_reader(pipe.fileno(), asked.set)
    async with StoreServer(table, SECRET, members) as server:
        pipe.send(server.address)
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asked.wait(), LEASE_SECONDS / 20)
            members.fence_silent()
            asked.clear()
            if pipe.poll():
                pipe.recv()
                pipe.send((table.items(""), dict(members.lost), sorted(members.groups())))


def _beat(address: str, pipe: Connection) -> None:
    """Be an agent until told to stop; send how long each sign of life took to be answered."""
    took: list[float] = []
    until = time.monotonic() + ANSWER_SECONDS
    with channel(address, SECRET.node(NODE, INCARNATION).agent(), ANSWER_SECONDS) as agent:
        agent.send(encode_body({"op": "hello", "pid": 1}), until)
        assert agent.receive(until) == {"op": "welcome"}
        pipe.send("joined")
        word = ""
        while not pipe.poll(BEAT_SECONDS):
            began = time.monotonic()
            beat = {"op": "alive", "word": word, "places": {}, "waits": []}
            agent.send(encode_body(beat), began + ANSWER_SECONDS)
            word = agent.receive(began + ANSWER_SECONDS)["word"]
            took.append(time.monotonic() - began)
        pipe.send(took)
        pipe.recv()
        pipe.poll(ANSWER_SECONDS)  # its connection stays until the end


Attack = Callable[[random.Random], bytes]


def _random_bytes(rng: random.Random) -> bytes:
    return rng.randbytes(rng.randrange(1, 200))


def _random_frames(rng: random.Random) -> bytes:
    bodies = (rng.randbytes(rng.randrange(1, 100)) for _ in range(FRAMES_A_CONNECTION))
    return b"".join(len(body).to_bytes(4, "big") + body for body in bodies)


def _greeting(rng: random.Random, role: object = None) -> bytes:
    claimed = asdict(SECRET.node(NODE, INCARNATION).agent().role) if role is None else role
    return encode_frame({"role": claimed, "nonce": rng.randbytes(32).hex()})


def _malformed_greetings(rng: random.Random) -> bytes:
    role = rng.choice([{}, [], 7, {"kind": "agent"}, {"kind": "leader", "name": "x"}])
    return _greeting(rng, role) * FRAMES_A_CONNECTION


def _unproven_calls(rng: random.Random) -> bytes:
    """A good greeting, then frames with seals of nobody."""
    nonces = Nonces(rng.randbytes(32), rng.randbytes(32))
    forged = Session(OTHER.tool(), nonces, Direction.TO_SERVER)
    write = encode_body({"op": "set", "key": "epoch", "value": "OQ=="})
    return _greeting(rng) + b"".join(forged.seal(write) for _ in range(FRAMES_A_CONNECTION))


def _long_lengths(rng: random.Random) -> bytes:
    return b"\xff\xff\xff\xff" + rng.randbytes(100)


def _plain_calls(rng: random.Random) -> bytes:
    write = {"op": rng.choice(["set", "add", "delete", "hello"]), "key": "epoch", "value": "OQ=="}
    return encode_frame(write) * FRAMES_A_CONNECTION


def _deep_json(rng: random.Random) -> bytes:
    body = b"[" * rng.randrange(1, 2048)
    return len(body).to_bytes(4, "big") + body


ATTACKS: tuple[Attack, ...] = (
    _random_bytes,
    _random_frames,
    _malformed_greetings,
    _unproven_calls,
    _long_lengths,
    _plain_calls,
    _deep_json,
)


def _connect(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), ANSWER_SECONDS)


def _say(address: str, said: bytes) -> None:
    """Say something, and stay until the server has had enough."""
    with contextlib.suppress(OSError), _connect(address) as stranger:
        stranger.sendall(said)
        stranger.shutdown(socket.SHUT_WR)
        while stranger.recv(1 << 16):
            pass


def flood(address: str, frames: int, rng: random.Random) -> None:
    """Send so many frames, each kind in turn; what follows a malformed one is sent all the same."""
    sent = number = 0
    while sent < frames:
        attack = ATTACKS[number % len(ATTACKS)]
        _say(address, attack(rng))
        one = attack in (_random_bytes, _long_lengths, _deep_json)
        sent += 1 if one else FRAMES_A_CONNECTION
        number += 1


def claim_names(address: str) -> None:
    """Speak the protocol to its end with keys that are another's."""
    agent = SECRET.node(NODE, INCARNATION).agent()
    for key in (OTHER.key, SECRET.node("node1", INCARNATION).key, bytes(32)):
        until = time.monotonic() + ANSWER_SECONDS
        with contextlib.suppress(OSError), _connect(address) as stranger:
            stranger.sendall(encode_frame({"role": asdict(agent.role), "nonce": "07" * 32}))
            nonce = bytes.fromhex(receive_frame(stranger, until)["nonce"])
            posing = Credential(agent.role, key)
            session = Session(posing, Nonces(b"\7" * 32, nonce), Direction.TO_SERVER)
            hung = encode_body({"op": "hung", "cause": "a stranger says so"})
            stranger.sendall(session.seal(PROOF) + session.seal(hung))
            while stranger.recv(1 << 16):
                pass


def replay(address: str, rng: random.Random) -> None:
    """Record a session, then say the same again, whole, cut short and with a bit flipped."""
    wiretap = Wiretap(address)
    until = time.monotonic() + ANSWER_SECONDS
    with channel(wiretap.address, SECRET.tool(), ANSWER_SECONDS) as tool:
        tool.send(encode_body({"op": "get", "key": "epoch"}), until)
        assert tool.receive(until) == {"value": "Mw=="}
    wiretap.close()
    said = bytes(wiretap.heard[0])
    for number in range(100):
        changed = bytearray(said[: rng.randrange(HEAD_BYTES, len(said))] if number % 2 else said)
        if number % 4 > 1:
            bit = rng.randrange(8 * len(changed))
            changed[bit // 8] ^= 1 << bit % 8
        _say(address, bytes(changed))


@contextlib.contextmanager
def idle_connections(address: str, number: int) -> Iterator[None]:
    """Open so many, and say nothing or half of something on each."""
    with contextlib.ExitStack() as opened:
        for one in range(number):
            with contextlib.suppress(OSError):
                stranger = opened.enter_context(_connect(address))
                stranger.sendall(b"\0\0\x01"[: one % 4])
        yield


def attack(folder: Path, frames: int, idle: int, seconds: float, seed: int) -> Findings:
    """Attack a coordinator with frames and idle connections, for no less than some seconds."""
    began = time.monotonic()
    target = Target(folder)
    pipe, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("fork")
    agent = context.Process(target=_beat, args=(target.address, theirs), daemon=True)
    agent.start()
    try:
        assert pipe.poll(ANSWER_SECONDS) and pipe.recv() == "joined"
        flood(target.address, 200, random.Random(seed))  # whatever is taken once is taken now
        before, memory = target.state(), target.memory()
        num_open = target.process.num_fds()
        most = [num_open]
        counting = threading.Event()
        counter = threading.Thread(target=_count_descriptors, args=(target, most, counting))
        counter.start()
        with idle_connections(target.address, idle):
            grown_idle = target.memory() - memory
            flood(target.address, frames, random.Random(seed + 1))
            claim_names(target.address)
            replay(target.address, random.Random(seed + 2))
            while time.monotonic() < began + seconds:
                _say(target.address, _random_bytes(random.Random(seed)))
        counting.set()
        counter.join()
        pipe.send("stop")
        assert pipe.poll(2 * ANSWER_SECONDS), "the agent was not answered"
        took = sorted(pipe.recv())
        return Findings(
            frames=frames,
            idle=idle,
            seconds=round(time.monotonic() - began, 1),
            beats=len(took),
            beat_p50_ms=round(1000 * took[len(took) // 2], 2),
            beat_p99_ms=round(1000 * took[int(0.99 * len(took))], 2),
            beat_longest_ms=round(1000 * took[-1], 2),
            grown_mib=round((target.memory() - memory) / 2**20, 2),
            grown_idle_mib=round(grown_idle / 2**20, 2),
            descriptors_more=most[0] - num_open,
            log_lines=target.log_lines(),
            is_unchanged=target.state() == before,
        )
    finally:
        agent.kill()
        agent.join()
        target.close()


def _count_descriptors(target: Target, most: list[int], done: threading.Event) -> None:
    while not done.wait(0.05):
        most[0] = max(most[0], target.process.num_fds())


def main() -> int:
    """Attack as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--frames", type=int, default=1_000_000, metavar="N")
    parser.add_argument("--idle", type=int, default=10_000, metavar="N")
    parser.add_argument("--seconds", type=float, default=0.0, help="attack no shorter than this")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with tempfile.TemporaryDirectory() as folder:
        findings = attack(Path(folder), args.frames, args.idle, args.seconds, args.seed)
    sys.stdout.write(json.dumps(asdict(findings)) + "\n")
    return 0 if findings.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
