"""Processes that end when they should: with their parent, by one SIGKILL, and reaped.

A node is a session of its own, so that one signal to its group ends the whole node. Whatever way
the launcher ends, by a signal that it can handle or by one that it cannot, nothing it started
lives on: the kernel kills each child with its parent, and agents end when their connection does.
Processes may be forked instead of started anew, so that a parent that has imported torch and
megatron-core once can start many workers at once.
"""

import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import IO, Any, Protocol

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


class WorkerHandle(Protocol):
    """A worker as its agent sees it; ``subprocess.Popen`` is one."""

    @property
    def pid(self) -> int:
        """The process id."""

    def poll(self) -> int | None:
        """The exit status (negative: the signal that ended it), None while it runs."""

    def kill(self) -> None:
        """End it at once."""


class NodeHandle(Protocol):
    """A node as the launcher sees it."""

    @property
    def pid(self) -> int:
        """The process id of the agent, which is the node's process group."""

    def has_ended(self) -> bool:
        """Whether the agent is gone; its process id is not another's before ``wait``."""

    def kill(self) -> None:
        """End all processes of the node at once."""

    def wait(self) -> None:
        """Wait until all processes of a killed node are gone."""


class ForkedProcess:
    """A child forked by this process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._status: int | None = None

    def poll(self) -> int | None:
        """The exit status (negative: the signal that ended it), None while it runs."""
        if self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._status = os.waitstatus_to_exitcode(status)
        return self._status

    def kill(self) -> None:
        """End it at once."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


class ForkedNode:
    """A forked child that leads a process group of its own."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._reaped = False

    def has_ended(self) -> bool:
        """Whether the leader is gone; it is not reaped here."""
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return self._reaped or os.waitid(os.P_PID, self.pid, options) is not None

    def await_end(self) -> int:
        """Wait for the leader's end; its exit status (negative: the signal that ended it)."""
        end = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        assert end is not None
        return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status

    def kill(self) -> None:
        """End the group at once. Its leader is reaped only by ``wait``: till then its id cannot
        belong to anyone else."""
        if self._reaped:
            return
        # The leader by itself too: it may not have come to make its group.
        os.kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def wait(self) -> None:
        """Reap the leader, and all of its group that this process has adopted."""
        if self._reaped:
            return
        os.waitpid(self.pid, 0)
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-self.pid, 0)
        self._reaped = True


def spawn(
    command: Sequence[str],
    environment: Mapping[str, str],
    new_session: bool = False,
    output: IO[str] | None = None,
    descriptors: Sequence[int] = (),
    keeps_sigterm: bool = False,
) -> subprocess.Popen[bytes]:
    """Start a program that dies with this process.

    Args:
        output: takes what it prints; else that goes where this process's goes.
        descriptors: what it inherits, besides its standard streams.
        keeps_sigterm: for the program to hear once it has called ``hear_sigterm``.
    """
    parent = os.getpid()

    def prepare() -> None:
        _unblock_interrupts(keeps_sigterm)
        _die_with(parent)

    with blocked_interrupts():
        return subprocess.Popen(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=None if output is None else subprocess.STDOUT,
            start_new_session=new_session,
            pass_fds=descriptors,
            preexec_fn=prepare,
        )


def fork(main: Callable[[], int], keeps_sigterm: bool = False) -> int:
    """Run ``main`` in a forked child that dies with this process; the child's process id.

    Args:
        keeps_sigterm: for the child to hear once it has called ``hear_sigterm``.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    # Python swallows what a signal raises in the hooks that run around a fork.
    with blocked_interrupts():
        pid = os.fork()
        if pid == 0:
            _run_and_exit(main, parent, keeps_sigterm)
    return pid


def _run_and_exit(main: Callable[[], int], parent: int, keeps_sigterm: bool) -> None:
    status = 1
    try:
        _die_with(parent)
        _forget_parent(keeps_sigterm)
        status = main()
    # Whatever it is, it must not climb into the frames of the parent's copy.
    except BaseException as error:
        if isinstance(error, SystemExit) and isinstance(error.code, int | None):
            status = error.code or 0
        else:
            traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _forget_parent(keeps_sigterm: bool) -> None:
    """Drop what a fork inherits: signal handlers and descriptors.

    A copy of another node's connection would keep it open when that node is gone.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _unblock_interrupts(keeps_sigterm)
    os.closerange(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def hear_sigterm(handle: Callable[[], None]) -> None:
    """Handle the signal from now on, also one that was kept since this process began."""
    signal.signal(signal.SIGTERM, lambda *_: handle())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def notify_of_parents_death(number: signal.Signals) -> None:
    """Have the kernel send this process a signal when its parent dies."""
    _libc.prctl(PR_SET_PDEATHSIG, number)


def _die_with(parent: int) -> None:
    notify_of_parents_death(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


@contextlib.contextmanager
def adopted_orphans() -> Iterator[None]:
    """Within it, processes whose parent dies become this process's children, to be reaped.

    Without it they would stay behind as zombies where the first process of a container reaps
    nobody.
    """
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        _libc.prctl(PR_SET_CHILD_SUBREAPER, 0)


@contextlib.contextmanager
def handling(
    number: signal.Signals, handler: Callable[[int, FrameType | None], Any]
) -> Iterator[None]:
    """Within it a signal is handled so."""
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def _unblock_interrupts(keeps_sigterm: bool) -> None:
    """What ``blocked_interrupts`` had blocked in a child's copy of its parent."""
    numbers = {signal.SIGINT} if keeps_sigterm else {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)


@contextlib.contextmanager
def blocked_interrupts() -> Iterator[None]:
    """Within it, Ctrl-C and SIGTERM wait."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
