"""Run a job: its coordinator, and its nodes where they are of this machine; leave nothing behind.

A library call, so that a test may run many jobs with workers forked from one process that has
imported torch once. ``bamboo run`` is this with a command line (``agent/run.py``), and
``bamboo coordinator`` without nodes: they start elsewhere (``agent/join.py``).
"""

import contextlib
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count, repeat
from pathlib import Path

from megatron_bamboo.agent.agent import AgentSettings, StartNode
from megatron_bamboo.agent.job import (
    Injection,
    JobSpec,
    WriteFault,
    check_reachable,
    check_victims,
)
from megatron_bamboo.agent.nodes import LocalNodes, Nodes, NodesElsewhere
from megatron_bamboo.agent.outcome import Outcome, Status
from megatron_bamboo.agent.process import NodeHandle, adopted_orphans, blocked_interrupts
from megatron_bamboo.agent.supervisor import Supervisor
from megatron_bamboo.agent.telling import Teller
from megatron_bamboo.agent.write_faults import remaining_write_faults
from megatron_bamboo.agent.write_trouble import written_to
from megatron_bamboo.membership.keys import Secret
from megatron_bamboo.membership.secret_file import find_or_make_secret
from megatron_bamboo.membership.stores import post_end
from megatron_bamboo.membership.workers import node_of
from megatron_bamboo.observe.events import read_events
from megatron_bamboo.rehearsal.networks import HUB_ADDRESS, LINK, hub


def run_job(
    spec: JobSpec,
    start_node: StartNode | None,
    say: Callable[[str], None],
    advance: Callable[[int], None] = lambda _: None,
    must_end: Callable[[], bool] = lambda: False,
    differs: Callable[[], str | None] = lambda: None,
) -> Outcome:
    """Run a prepared job to its end; call it from a thread that lives until then.

    Whatever happens, KeyboardInterrupt included, no process that this has started is left when it
    is over, and the outcome is in the job folder.

    Args:
        start_node: starts a node on this machine; None where all are started elsewhere.
        say: takes the job's lines.
        advance: takes the number of each step that passed.
        must_end: whether the job is to save and end; asked several times a second.
        differs: says why a node that is started again now would run something else than the job
            does; None if it would not.
    """
    respawns = spec.respawn_seconds is not None
    check_victims(spec.injections, (*spec.nodes, *spec.standbys), respawns)
    for injection in spec.injections:
        check_reachable(injection, spec.shape)
    shape = spec.shape
    spec.job_dir.mkdir(parents=True, exist_ok=True)
    if shape.start_step >= shape.train_iters:
        say(f"nothing to train: {shape.loaded_from} holds step {shape.start_step} already")
        outcome = Outcome(Status.FINISHED)
        outcome.write(spec.job_dir)
        return outcome
    with written_to(spec.job_dir):
        secret = find_or_make_secret(spec.job_dir, spec.secret_file)
        (spec.job_dir / "logs").mkdir(exist_ok=True)
        teller = Teller(spec.job_dir, say, advance)
    if spec.has_networks:
        spec = replace(spec, host=HUB_ADDRESS, interface=LINK)
    nodes = _nodes(spec, secret, start_node, differs, say)
    supervisor = Supervisor(spec, secret, teller, nodes, must_end)
    outcome = Outcome(Status.FAILED, "its launcher failed")
    with adopted_orphans(), hub() if spec.has_networks else contextlib.nullcontext():
        try:
            for node in (*spec.nodes, *spec.standbys):
                nodes.start(node)
            outcome = supervisor.run()
        except KeyboardInterrupt:
            outcome = Outcome(Status.INTERRUPTED)
            raise
        finally:
            with blocked_interrupts():
                supervisor.close()
                nodes.end()
                teller.close()
                _leave(outcome, spec.job_dir)
    return _with_injections(outcome, spec)


def _leave(outcome: Outcome, job_dir: Path) -> None:
    """Leave the outcome of a job whose coordinator has left none; nobody else writes any more."""
    # What has ended the job may be that nothing can be written there: the launcher says it, too.
    with contextlib.suppress(OSError):
        if Outcome.read(job_dir) is None:
            outcome.write(job_dir)
            post_end(job_dir, outcome.to_json())


def _nodes(
    spec: JobSpec,
    secret: Secret,
    start_node: StartNode | None,
    differs: Callable[[], str | None],
    say: Callable[[str], None],
) -> Nodes:
    if start_node is None:
        return NodesElsewhere()
    starts = start_node
    networks: Iterator[int | None] = count(1) if spec.has_networks else repeat(None)

    def start(node: str) -> NodeHandle:
        identity = secret.node(node, secrets.token_hex(8))
        return starts(AgentSettings.of(spec, identity, next(networks)))

    return LocalNodes(start, spec.respawn_seconds, spec.max_failures, differs=differs, say=say)


def _with_injections(outcome: Outcome, spec: JobSpec) -> Outcome:
    if outcome.status is not Status.FINISHED:
        return outcome
    missed: list[Injection | WriteFault] = [
        *unreached_injections(spec.job_dir, spec.injections),
        *remaining_write_faults(spec),
    ]
    if not missed:
        return outcome
    names = ", ".join(map(str, missed))
    message = f"the job finished, but never came to --inject {names}: nothing was tested there"
    return Outcome(Status.INJECTION_NOT_REACHED, message, outcome.lost)


def unreached_injections(job_dir: Path, injections: Sequence[Injection]) -> list[Injection]:
    """The faults that never struck."""
    struck = {
        (node_of(event["source"]), event["fault"])
        for event in read_events(job_dir / "events")
        if event["event"] == "fault"
    }
    return [i for i in injections if (i.node, str(i.fault)) not in struck]
