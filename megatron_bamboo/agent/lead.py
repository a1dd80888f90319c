"""The coordinator's process: it leads the job for as long as nobody else does.

It is started by the launcher, which starts another one when it dies or shows no sign of life
(``supervisor.py``). It reads what the last one left, says where it listens, and goes on. When
another one has taken its place it ends at once, wherever it notices: nothing is written, and nobody
gets an answer.
"""

import asyncio
import os
import signal
import sqlite3
import sys
from collections.abc import Sequence
from enum import IntEnum
from typing import NoReturn

from megatron_bamboo.agent.coordinator import Coordinator, JobFailed, JobStopped, NoProgress
from megatron_bamboo.agent.invitation import INVITATION_KEY
from megatron_bamboo.agent.job import COORDINATOR, JobShape, JobSpec, WriteFault
from megatron_bamboo.agent.outcome import OUTCOME_KEY, Outcome, Status
from megatron_bamboo.agent.refusals import Refusals
from megatron_bamboo.agent.report import Reporter
from megatron_bamboo.agent.telling import Announcer
from megatron_bamboo.agent.write_faults import remaining_write_faults
from megatron_bamboo.membership.address import ADDRESS_FILE, ADDRESS_KEY, Address, Signpost
from megatron_bamboo.membership.keys import Secret
from megatron_bamboo.membership.leadership import Deposed, Hooks, LeaderLives
from megatron_bamboo.membership.stopping import STOP_KEY, TOLD_TO_END, StopWish
from megatron_bamboo.membership.store_server import StoreServer
from megatron_bamboo.membership.stores import JobJournal, open_journal
from megatron_bamboo.membership.table import Table
from megatron_bamboo.observe.events import EventLog
from megatron_bamboo.planner.taking_over import NoHolder

LOG_FILE = "coordinator.log"
BEATS_PER_LIMIT = 4.0
# Fewer seconds a busy machine may keep a coordinator from running.
SHORTEST_LIMIT_SECONDS = 2.0


class LeadStatus(IntEnum):
    """How a coordinator's process ends, if no signal ends it."""

    LED = 0
    """The job is over, and its outcome is written."""
    UNWRITABLE = 74
    REFUSED = 75
    """Another one leads."""
    DEPOSED = 76
    """Another one leads instead of this one."""
    LOCKED_OUT = 77
    """Whoever leads has kept the journal locked, as one does that was stopped just then."""


def limit_seconds(shape: JobShape) -> float:
    """How old a leader's last sign of life may be."""
    return max(shape.lease_seconds, SHORTEST_LIMIT_SECONDS)


def lead_job(spec: JobSpec, secret: Secret) -> int:
    """Be a job's coordinator; the status to end with."""
    # Ctrl-C is the launcher's to hear.
    os.setsid()
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # until it is heard; it is said again
    _redirect_output(spec)
    fault = next(iter(remaining_write_faults(spec)), None)
    hooks = Hooks(
        failed=_fail,
        before=lambda keys: _die_at(spec, fault, journal.generation, "before", keys),
        after=lambda keys: _die_at(spec, fault, journal.generation, "after", keys),
    )
    journal = open_journal(spec.job_dir, hooks)
    try:
        journal.claim(limit_seconds(spec.shape))
    except LeaderLives as error:
        sys.stderr.write(f"a coordinator is not needed: {error}\n")
        return LeadStatus.REFUSED
    except sqlite3.OperationalError as error:
        sys.stderr.write(f"the journal cannot be had: {error}\n")
        return LeadStatus.LOCKED_OUT
    except OSError as error:
        sys.stderr.write(f"the store cannot be had: {error}\n")
        return LeadStatus.UNWRITABLE
    try:
        asyncio.run(_Lead(spec, secret, journal).run())
    except OSError as error:
        _fail(error)
    journal.close()
    return LeadStatus.LED


class _Lead:
    """One coordinator's time in office."""

    def __init__(self, spec: JobSpec, secret: Secret, journal: JobJournal) -> None:
        self._spec = spec
        self._secret = secret
        self._journal = journal
        self._table = Table(journal)
        self._reporter = Reporter(self._table, spec.shape)
        events = Announcer(self._table, COORDINATOR)
        self._coordinator = Coordinator(spec, self._table, events, self._reporter)
        self._refusals = Refusals(self._table, events, self._reporter)

    async def run(self) -> None:
        """Lead the job to its end; leave its outcome."""
        if self._journal.generation > 1:
            self._reporter.note(f"coordinator {self._journal.generation} goes on")
        members = self._coordinator.members
        spec = self._spec
        server = StoreServer(self._table, self._secret, members, spec.host, spec.port)
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR1, self._wish_to_stop)
        async with server:
            address = self._address_of(server)
            if spec.invitation:
                self._table.set(INVITATION_KEY, spec.invitation.encode())
            await self._say_where(address)
            beats = asyncio.create_task(self._beat(address))
            outcome = self._known_outcome() or await self._coordinate()
            self._table.set(OUTCOME_KEY, outcome.to_json().encode())
            await self._table.kept()
            with self._journal.leading():
                outcome.write(self._spec.job_dir)
            members.stop()
            beats.cancel()

    def _wish_to_stop(self) -> None:
        """The launcher was told that the job's time is over, or that it is to end."""
        if self._table.get(STOP_KEY) is None:
            self._table.set(STOP_KEY, StopWish(True, TOLD_TO_END).to_json().encode())

    def _address_of(self, server: StoreServer) -> Address:
        host, _, port = server.address.rpartition(":")
        return Address(host, int(port), self._journal.generation, os.getpid())

    async def _say_where(self, address: Address) -> None:
        self._table.set(ADDRESS_KEY, address.to_json().encode())
        await self._table.kept()
        with self._journal.leading():
            address.write(self._spec.job_dir / ADDRESS_FILE)

    def _known_outcome(self) -> Outcome | None:
        """The outcome that an earlier coordinator had come to."""
        known = self._table.get(OUTCOME_KEY)
        return None if known is None else Outcome.from_json(known)

    async def _beat(self, address: Address) -> None:
        signpost = Signpost(str((self._spec.job_dir / ADDRESS_FILE).absolute()))
        while True:
            self._journal.beat()
            # Elsewhere one that was stopped may have woken just to write where it was, and a file
            # system may have lost what it had not written.
            if not signpost.leads_to(address):
                await self._say_where(address)
            await asyncio.sleep(limit_seconds(self._spec.shape) / BEATS_PER_LIMIT)

    async def _coordinate(self) -> Outcome:
        coordinator = self._coordinator
        status, message = Status.FINISHED, ""
        try:
            await coordinator.run()
        except NoHolder as error:
            status = Status.NO_HOLDER
            errors = coordinator.errors_of(error.holders)
            message = "; ".join([str(error), *errors, coordinator.restart_hint()])
        except JobStopped as error:
            status, message = Status.STOPPED, str(error)
        except NoProgress as error:
            status, message = Status.NO_PROGRESS, str(error)
        except JobFailed as error:
            status, message = Status.FAILED, str(error)
        return Outcome(status, message, tuple(coordinator.members.lost.items()))


def _fail(error: Exception) -> NoReturn:
    """End at once: what this process holds in memory is not what the journal says any more."""
    sys.stderr.write(f"{type(error).__name__}: {error}\n")
    sys.stderr.flush()
    os._exit(LeadStatus.DEPOSED if isinstance(error, Deposed) else LeadStatus.UNWRITABLE)


def _die_at(
    spec: JobSpec, fault: WriteFault | None, generation: int, moment: str, keys: Sequence[str]
) -> None:
    """Die like a killed process, if this coordinator is to die at this write."""
    if fault is not None and fault.moment == moment and fault.key in keys:
        events = EventLog(spec.job_dir / "events", COORDINATOR)
        events.emit("coordinator_kill", fault=str(fault), generation=generation)
        os.kill(os.getpid(), signal.SIGKILL)


def _redirect_output(spec: JobSpec) -> None:
    log = spec.job_dir / "logs" / LOG_FILE
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
