"""A job's story as a coordinator would leave it in the store, told without one."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from megatron_bamboo.agent.job import JobShape
from megatron_bamboo.agent.outcome import Outcome
from megatron_bamboo.membership.address import Address
from megatron_bamboo.membership.decision import StepDecision, StepReport
from megatron_bamboo.membership.leadership import Leader
from megatron_bamboo.planner.arrangement import equal_pipelines
from megatron_bamboo.planner.healing import Vacancy, heal
from megatron_bamboo.planner.plan import Plan, initial_plan
from megatron_bamboo.planner.taking_over import plan_after_loss
from megatron_bamboo.watching.history import History
from megatron_bamboo.watching.store_view import StoreView

NODES = tuple(f"node{number}" for number in range(6))
LAST_STEP = 100
START = 1_000_000_000.0
"""2001-09-09, 01:46:40 UTC."""
LEADER = Leader(generation=1, pid=4711, started=1, beat=0.0)
ADDRESS = Address("127.0.0.1", 4242, generation=1, pid=4711)


@dataclass
class Story:
    """Two pipelines of three stages; each thing told takes a second."""

    standbys: Sequence[str] = ()
    plan: Plan = field(
        default_factory=lambda: initial_plan(NODES, equal_pipelines(3, 2, 2), "lazy")
    )
    facts: list[dict[str, Any]] = field(default_factory=list)
    keys: dict[str, bytes] = field(default_factory=dict)
    shape: JobShape = field(
        default_factory=lambda: JobShape(equal_pipelines(3, 2, 2), "lazy", LAST_STEP, 16)
    )
    step: int = 0

    def begin(self) -> "Story":
        for node in (*NODES, *self.standbys):
            self.join(node)
        self.publish(self.plan)
        return self

    def join(self, node: str) -> None:
        self.keys[f"agent/{node}"] = b"{}"
        self.event("agent_joined", node=node, pid=1)

    def event(self, kind: str, /, **fields: object) -> None:
        unix = START + len(self.facts)
        self.facts.append({"event": {"event": kind, "unix": unix, "time": unix, **fields}})

    def line(self, text: str) -> None:
        self.facts.append({"line": f" [2001-09-09 01:46:40] {text}"})

    def publish(self, plan: Plan) -> None:
        self.plan = plan
        self.keys |= {"epoch": str(plan.epoch).encode()}
        self.keys[f"plan/{plan.epoch}"] = plan.to_json().encode()
        pipelines = [asdict(pipeline) for pipeline in plan.pipelines]
        self.event("plan", epoch=plan.epoch, lost=list(plan.lost), pipelines=pipelines)

    def train(self, num_steps: int) -> "Story":
        for step in range(self.step + 1, self.step + num_steps + 1):
            report = StepReport(
                step, self.plan.epoch, (10 / step).hex(), 1e-3, (1.5).hex(), 16 * step, 0.25, ()
            )
            self.keys |= {"reported": str(step).encode()}
            self.keys[f"passed/{step}"] = report.to_json().encode()
            loss = {"step": step, "loss": report.loss, "grad_norm": report.grad_norm}
            self.facts.append({"line": f"iteration {step}", "loss": loss})
            self.step = step
        return self

    def lose(self, *nodes: str, cause: str = "its connection closed") -> "Story":
        for node in nodes:
            self.event("loss", node=node, cause=cause)
        self.publish(plan_after_loss(self.plan, set(nodes), self.decision()))
        self.line(f"lost {', '.join(nodes)} ({cause}); epoch {self.plan.epoch}")
        return self

    def wait_for_nodes(self, cause: str = "its connection closed") -> "Story":
        """All that train are lost, and others may come."""
        for node in self.plan.nodes:
            self.event("loss", node=node, cause=cause)
        self.keys[f"awaited/{self.plan.epoch}"] = b'{"wanted": 6, "seconds": 3600.0}'
        return self

    def call(self, standby: str, pipeline: int, rank: int, is_ready: bool) -> None:
        place = {"pipeline": pipeline, "rank": rank, "stages": [0]}
        self.keys[f"called/{standby}"] = json.dumps(place).encode()
        if is_ready:
            self.keys[f"ready/{standby}"] = b"1"

    def heal(self, standby: tuple[Vacancy, str] | None = None) -> "Story":
        self.publish(heal(self.plan, self.decision(), LAST_STEP, standby))
        return self

    def make_change(self) -> "Story":
        self.train(1)
        epoch, self.plan = self.plan.epoch, self.plan.made()
        pipelines = [asdict(pipeline) for pipeline in self.plan.pipelines]
        self.event("changed", epoch=epoch, step=self.step, pipelines=pipelines)
        return self

    def decision(self) -> StepDecision:
        return StepDecision(self.step, True, (), "as the story wants it")

    def history(self) -> History:
        return History().after(self.facts)

    def view(
        self,
        *,
        leader: Leader | None = LEADER,
        silent_seconds: float = 0.5,
        is_there: bool = True,
        address: Address | None = ADDRESS,
        outcome: Outcome | None = None,
    ) -> StoreView:
        leads = is_there and silent_seconds < self.shape.lease_seconds
        return StoreView(
            "runs/tale", self.shape, self.keys, self.history(), leader, silent_seconds, is_there,
            leads, address, outcome,
        )  # fmt: skip
