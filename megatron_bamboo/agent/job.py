"""What a job is: its shape, its nodes, the deadlines of its control plane, faults to inject."""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Self

from megatron_bamboo.checkpoint.moments import SaveMoment
from megatron_bamboo.cloud.watch import NO_SOURCE
from megatron_bamboo.errors import UserError
from megatron_bamboo.membership.lives import first_life
from megatron_bamboo.planner.arrangement import Arrangement
from megatron_bamboo.planner.rebalancing import Balance, Policy
from megatron_bamboo.rehearsal.fault import Fault, Nth
from megatron_bamboo.schedule.actions import TAIL_OPS
from megatron_bamboo.schedule.costs import EQUAL_COSTS, Costs
from megatron_bamboo.schedule.redundancy import Redundancy

JOB_FILE = "job.json"
LEASE_SECONDS = 5.0
MOST_FAILURES = 20
COORDINATOR = "coordinator"


@dataclass(frozen=True, slots=True)
class JobShape:
    """What the launcher must know of a training script's options: the content of ``job.json``."""

    arrangement: Arrangement
    """That of the beginning."""
    redundancy: str
    train_iters: int
    global_batch_size: int
    tensor_size: int = 1
    """Workers of one node, which share its layers."""
    start_step: int = 0
    """Steps that a checkpoint holds already."""
    loaded_from: str | None = None
    """The folder of that checkpoint."""
    lease_seconds: float = LEASE_SECONDS
    """A node of which nothing was heard for so long is lost."""
    group_timeout_seconds: float = 600.0
    """The longest wait of one worker for another."""
    num_mirrors: int = 0
    """Gradients that each stage sends its replica in a step."""
    costs: tuple[str, ...] = ()
    """By pipeline what redundant forwards are placed in gaps by, as JSON; none: equal costs."""
    policy: str = Policy.BAMBOO
    """What may change in answer to a loss."""
    unit_works: tuple[int, ...] = ()
    """By unit what a microbatch takes, in ticks; none: all layers take the same."""

    def costs_of(self, pipeline: int) -> Costs:
        """The costs."""
        return Costs.from_json(self.costs[pipeline]) if self.costs else EQUAL_COSTS

    def balance(self) -> Balance | None:
        """By what microbatches are shared out anew; None where each pipeline keeps its own."""
        if self.policy == Policy.BAMBOO:
            return None
        works = self.unit_works or (0, *[1] * (self.arrangement.num_units - 2), 0)
        return Balance(works, Redundancy(self.redundancy))

    @property
    def most_microbatches(self) -> int:
        """That a pipeline may ever have."""
        numbers = self.arrangement.microbatches
        if self.policy == Policy.BAMBOO:
            return max(numbers)
        return sum(numbers) - (len(numbers) - 1)

    def write(self, job_dir: Path) -> None:
        """Leave the shape where the launcher looks for it."""
        (job_dir / JOB_FILE).write_text(json.dumps(asdict(self)) + "\n")

    @classmethod
    def read(cls, job_dir: Path) -> Self:
        """The shape that the script's prepare phase left behind."""
        path = job_dir / JOB_FILE
        try:
            values = json.loads(path.read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            values = None
        expected = {field.name for field in fields(cls)}
        is_whole = isinstance(values, dict) and values.keys() == expected
        try:
            arrangement = Arrangement.from_fields(values.pop("arrangement")) if is_whole else None
        except (KeyError, TypeError, ValueError):
            arrangement = None
        if arrangement is None:
            raise UserError(
                f"the script left no usable {path}: with BAMBOO_PHASE=prepare it must write "
                f"{', '.join(sorted(expected))} there (see pretrain_gpt_bamboo.py)"
            )
        costs, works = (tuple(values.pop(name)) for name in ("costs", "unit_works"))
        return cls(arrangement, costs=costs, unit_works=works, **values)


@dataclass(frozen=True, slots=True)
class Injection:
    """A fault that strikes a node, in its first worker."""

    node: str
    fault: Fault

    @classmethod
    def parse(cls, text: str) -> Self:
        """From ``node5@iter7:2.0B3``."""
        node, _, fault = text.partition("@")
        try:
            return cls(node, Fault.parse(fault))
        except ValueError as error:
            raise UserError(f"--inject {text}: {error}") from None

    def __str__(self) -> str:
        return f"{self.node}@{self.fault}"


@dataclass(frozen=True, slots=True)
class WriteFault:
    """A coordinator that dies just before or just after it writes a key, like ``plan/1``."""

    moment: str
    key: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """From ``coordinator@before:plan/1``."""
        found = re.fullmatch(rf"{COORDINATOR}@(before|after):(\S+)", text)
        if found is None:
            raise UserError(
                f"--inject {text}: write {COORDINATOR}@before:KEY or {COORDINATOR}@after:KEY, like "
                f"{COORDINATOR}@before:plan/1"
            )
        return cls(*found.groups())

    def __str__(self) -> str:
        return f"{COORDINATOR}@{self.moment}:{self.key}"


def parse_injections(
    texts: Sequence[str],
) -> tuple[tuple[Injection, ...], tuple[WriteFault, ...]]:
    """The faults of nodes and those of coordinators, of what ``--inject`` was given."""
    ours = [text for text in texts if text.startswith(f"{COORDINATOR}@")]
    nodes = [text for text in texts if text not in ours]
    return tuple(map(Injection.parse, nodes)), tuple(map(WriteFault.parse, ours))


@dataclass(frozen=True, slots=True)
class Deadlines:
    """How long the coordinator waits, in seconds."""

    record_seconds: float = 5.0
    """For the record of a worker that is ready, before the node is fenced."""
    startup_seconds: float = 120.0
    """For agents to say hello, and for the record of a worker that is still starting."""
    stall_seconds: float = 1800.0
    """Without an iteration or an epoch, before the job ends."""
    store_seconds: float = 600.0
    """What workers and agents are told: how long they try to reach the store."""


@dataclass(frozen=True, slots=True)
class JobSpec:
    """A job, ready to be run."""

    nodes: tuple[str, ...]
    shape: JobShape
    job_dir: Path
    injections: tuple[Injection, ...] = ()
    deadlines: Deadlines = Deadlines()
    host: str = "127.0.0.1"
    """Where the control plane listens."""
    interface: str = "lo"
    """The network interface by which workers speak to each other."""
    standbys: tuple[str, ...] = ()
    """Nodes that wait to take the place of lost ones."""
    write_faults: tuple[WriteFault, ...] = ()
    """By the number of the coordinator, the first one's first: how it dies."""
    respawn_seconds: float | None = None
    """So long after its loss a node is started again, as a standby; None for never."""
    secret_file: Path | None = None
    """Holds the job's secret; None for the environment, or the job folder."""
    max_failures: int = MOST_FAILURES
    """How often nodes may be lost while no step passes, before the job ends."""
    notices: str = NO_SOURCE
    """Who says to each node that its machine is to be taken (``cloud/watch.py``)."""


def check_victims(
    injections: Sequence[Injection], nodes: Sequence[str], respawns: bool = False
) -> None:
    """UserError for a fault in a node that is not there, or a second one in the same node.

    Args:
        respawns: lost nodes are started again, so that each may have another life.
    """
    victims = [injection.node for injection in injections]
    for injection in injections:
        if (first_life(injection.node) if respawns else injection.node) not in nodes:
            raise UserError(
                f"--inject {injection}: there is no {injection.node}; the nodes are "
                f"{nodes[0]} to {nodes[-1]}"
            )
        if victims.count(injection.node) > 1:
            raise UserError(f"--inject {injection}: {injection.node} can have only one fault")


def check_reachable(injection: Injection, shape: JobShape) -> None:
    """UserError for a fault at an action that no worker of this job ever runs."""
    fault, moment = injection.fault, injection.fault.moment
    limits = []
    if fault.step is not None:
        limits.append(("iteration", fault.step, shape.start_step + 1, shape.train_iters))
    if not isinstance(moment, SaveMoment | Nth):
        pipelines = shape.arrangement.pipelines
        most_stages = max(pipeline.num_stages for pipeline in pipelines)
        limits.append(("stage", moment.stage, 0, most_stages - 1))
        if moment.op not in TAIL_OPS:
            assert moment.microbatch is not None and moment.chunk is not None
            limits.append(("chunk", moment.chunk, 0, pipelines[0].num_chunks - 1))
            limits.append(("microbatch", moment.microbatch, 0, shape.most_microbatches - 1))
    for name, value, lowest, highest in limits:
        if not lowest <= value <= highest:
            raise UserError(
                f"--inject {injection}: there is no {name} {value}; "
                f"this job has {lowest} to {highest}"
            )
