"""What a job is: its shape, its nodes, the deadlines of its control plane, faults to inject."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

from megatron_bamboo.checkpoint.moments import SaveMoment
from megatron_bamboo.cloud.watch import NO_SOURCE
from megatron_bamboo.errors import UserError
from megatron_bamboo.membership.lives import first_life
from megatron_bamboo.planner.arrangement import Arrangement
from megatron_bamboo.planner.new_cut import FEWEST_STAGES
from megatron_bamboo.planner.rearranging import Rearranging
from megatron_bamboo.planner.rebalancing import Balance
from megatron_bamboo.recovery.names import PolicyName
from megatron_bamboo.rehearsal.fault import EvaluationMoment, Fault, How, Nth
from megatron_bamboo.schedule.actions import TAIL_OPS, UNIT_OPS
from megatron_bamboo.schedule.costs import EQUAL_COSTS, Costs
from megatron_bamboo.schedule.redundancy import Redundancy
from megatron_bamboo.schedule.schedule import MAX_STAGES

JOB_FILE = "job.json"
LEASE_SECONDS = 5.0
MOST_FAILURES = 20
COORDINATOR = "coordinator"
KEPT_NAMES = (COORDINATOR, "metrics")
"""No node's, since logs and events of a job have them."""


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
    policy: str = PolicyName.BAMBOO
    """What may change in answer to a loss."""
    num_shards: int = 1
    """Over how many pipelines the optimizer's state is shared out; 1: each has all of it."""
    unit_works: tuple[int, ...] = ()
    """By unit what a microbatch takes, in ticks; none: all layers take the same."""
    inputs: tuple[tuple[str, str], ...] = ()
    """Files that must be alike on all nodes, each with what names it (``agent/marks.py``)."""
    indices: str | None = None
    """The folder of the data's index caches, which each node must see before it joins."""
    restores: bool = False
    """Whether all begin again from the last checkpoint where some state has no holder."""
    saves: bool = False
    """Whether the state after the last step is saved."""
    waits: bool = False
    """Whether all wait for nodes where one alone runs a pipeline."""
    interface: str | None = None
    """The network interface by which workers speak to each other; None: as the launcher says."""
    unit_bytes: tuple[int, ...] = ()
    """By unit the bytes of its state; none: all are alike."""
    least_nodes: int | None = None
    """Without which a pipeline's stages do not fit; None: with half of its nodes they do."""
    verifies: bool = False
    """Whether copies of the state are compared now and then."""
    eval_interval: int | None = None
    """Steps from one evaluation to the next; None: there are none."""

    def costs_of(self, pipeline: int) -> Costs:
        """The costs."""
        return Costs.from_json(self.costs[pipeline]) if self.costs else EQUAL_COSTS

    def balance(self) -> Balance | None:
        """By what microbatches are shared out anew; None where each pipeline keeps its own."""
        return self.sharing() if PolicyName(self.policy).shares_anew else None

    def sharing(self) -> Balance:
        """By what they are shared out where that cannot be."""
        works = self.unit_works or (0, *[1] * (self.arrangement.num_units - 2), 0)
        return Balance(works, Redundancy(self.redundancy))

    def rearranging(self) -> Rearranging | None:
        """By what pipelines are cut anew; None where each keeps its cut (``why_cuts_stay``)."""
        balance = self.balance()
        if balance is None or self.why_cuts_stay() is not None:
            return None
        unit_bytes = self.unit_bytes or (1,) * self.arrangement.num_units
        least, is_needed = self.least_nodes, self.least_nodes is not None
        if least is None:
            # With as many nodes each has what a takeover leaves it: two stages.
            fewest = min(pipeline.num_stages for pipeline in self.arrangement.pipelines)
            least = max(FEWEST_STAGES, -(-fewest // 2))
        return Rearranging(balance, unit_bytes, self.num_shards > 1, least, is_needed)

    def why_cuts_stay(self) -> str | None:
        """Why pipelines are never cut anew, whatever the policy; None if they may be."""
        costs = {self.costs_of(number) for number in range(len(self.arrangement.pipelines))}
        fills_gaps = self.redundancy == Redundancy.BUBBLE and costs != {EQUAL_COSTS}
        pipelines = self.arrangement.pipelines
        # All reduce units in one order only where each stage has a single range of them.
        has_chunks = len(pipelines) > 1 and pipelines[0].num_chunks > 1
        reasons = {
            "the stages of several pipelines have several chunks": has_chunks,
            "copies of the state are compared": self.verifies,
            "redundant forwards are placed by the costs of the first cut": fills_gaps,
            f"the model has more than {MAX_STAGES} units": self.arrangement.num_units > MAX_STAGES,
        }
        return next((reason for reason, holds in reasons.items() if holds), None)

    def evaluates_after(self, step: int) -> bool:
        """Whether there is an evaluation after a step."""
        if self.eval_interval is None:
            return False
        return step % self.eval_interval == 0 or step == self.train_iters

    @property
    def most_microbatches(self) -> int:
        """That a pipeline may ever have."""
        numbers = self.arrangement.microbatches
        if not (PolicyName(self.policy).shares_anew or self.restores):
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
            return cls.from_fields(json.loads(path.read_text()))
        except (FileNotFoundError, KeyError, TypeError, ValueError):
            expected = ", ".join(sorted(field.name for field in fields(cls)))
            raise UserError(
                f"the script left no usable {path}: with BAMBOO_PHASE=prepare it must write "
                f"{expected} there (see pretrain_gpt_bamboo.py)"
            ) from None

    @classmethod
    def from_fields(cls, values: Mapping[str, Any]) -> Self:
        """The shape with the fields that ``asdict`` gives; KeyError, TypeError or ValueError."""
        names = {field.name for field in fields(cls)}
        if not isinstance(values, Mapping) or values.keys() != names:
            raise ValueError("a shape has all its fields, and no others")
        special = {
            "arrangement": Arrangement.from_fields(values["arrangement"]),
            "costs": tuple(values["costs"]),
            "unit_works": tuple(values["unit_works"]),
            "inputs": tuple((str(name), str(path)) for name, path in values["inputs"]),
            "unit_bytes": tuple(values["unit_bytes"]),
        }
        return cls(**{**values, **special})


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


def first_cut(injections: Sequence[Injection]) -> Injection | None:
    """The first fault that cuts a node off from the others, if there is one."""
    return next((one for one in injections if one.fault.how is How.CUT), None)


@dataclass(frozen=True, slots=True)
class Deadlines:
    """How long the coordinator waits, in seconds."""

    record_seconds: float = 20.0
    """For the record of a worker that is ready and lives, before the node is fenced: who is silent
    is lost by its lease, so this may be as long as a busy machine needs."""
    startup_seconds: float = 120.0
    """For the record of a worker that is still starting."""
    joining_seconds: float = 120.0
    """For so many agents as are wanted to say hello."""
    gathering_seconds: float = 5.0
    """Where nobody was left: without a newcomer, before those who have come begin again. Machines
    that an allocation brings come within seconds of each other; another return to the checkpoint
    costs more than this."""
    stall_seconds: float = 1800.0
    """Without an iteration or an epoch, before the job ends."""
    store_seconds: float = 600.0
    """What workers and agents are told: how long they try to reach the store."""


@dataclass(frozen=True, slots=True)
class JobSpec:
    """A job, ready to be run."""

    nodes: tuple[str, ...]
    """Their names; none for an open job, whose nodes join under names of their own."""
    shape: JobShape
    job_dir: Path
    injections: tuple[Injection, ...] = ()
    deadlines: Deadlines = Deadlines()
    host: str = "127.0.0.1"
    """Where the control plane listens."""
    port: int = 0
    """0 for any free one."""
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
    invitation: str = ""
    """What the nodes of an open job are told (``agent/invitation.py``)."""
    speaker: str = "node0"
    """The node whose first worker speaks for the script."""

    @property
    def num_nodes(self) -> int:
        """So many run stages."""
        return self.shape.arrangement.num_nodes

    @property
    def has_networks(self) -> bool:
        """Whether each node has a network of its own, so that it can be cut off."""
        return first_cut(self.injections) is not None


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
    if isinstance(moment, EvaluationMoment):
        if not shape.evaluates_after(fault.step or 0):
            raise UserError(
                f"--inject {injection}: there is no evaluation after that iteration: give a "
                "multiple of --eval-interval, or the last one"
            )
        moment = moment.action
    if not isinstance(moment, SaveMoment | Nth):
        pipelines = shape.arrangement.pipelines
        most_stages = max(pipeline.num_stages for pipeline in pipelines)
        if moment.op in UNIT_OPS:
            limits.append(("unit", moment.stage, 0, shape.arrangement.num_units - 1))
        else:
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
