"""Workers of two pipelines in threads of one process, evaluating with a model of one number.

Store, groups, transport and evaluators are the product's own; only the forward pass is a formula,
and plans come from the test.
"""

from collections.abc import Collection, Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from local_peers import Beside
from server_thread import store_client
from torch import Tensor

from megatron_bamboo.data.gpt_dataset import Datasets
from megatron_bamboo.data.replay import ReplayedIterator
from megatron_bamboo.evaluation.due import EvaluationPlan
from megatron_bamboo.evaluation.outcome import Evaluated
from megatron_bamboo.execution.errors import EpochEnded
from megatron_bamboo.execution.evaluation_attempt import EvaluatorParts
from megatron_bamboo.execution.evaluation_data import EvaluationData
from megatron_bamboo.execution.evaluation_store import EvaluationStore, Share, batch_key
from megatron_bamboo.execution.evaluator import Evaluator
from megatron_bamboo.execution.mailbox import Mailbox
from megatron_bamboo.execution.parts import Parts
from megatron_bamboo.execution.pipeline import PipelineView
from megatron_bamboo.execution.registry import GroupRegistry
from megatron_bamboo.execution.transport import TensorShape
from megatron_bamboo.execution.whereabouts import Limits, Whereabouts
from megatron_bamboo.membership.decision import StepDecision
from megatron_bamboo.membership.torch_store import BambooStore
from megatron_bamboo.observe.events import EventLog
from megatron_bamboo.planner.arrangement import Arrangement
from megatron_bamboo.planner.plan import Plan, initial_plan
from megatron_bamboo.planner.taking_over import plan_after_loss
from megatron_bamboo.schedule.actions import Action, Op
from megatron_bamboo.schedule.costs import EQUAL_COSTS
from megatron_bamboo.schedule.redundancy import Redundancy
from megatron_bamboo.schedule.schedule import Schedule

STEP = 10
NUM_BATCHES = 3
WAIT_SECONDS = 300.0
SAMPLES = [0.1 * number for number in range(100)]
SHAPE = TensorShape((1,), torch.float64, torch.device("cpu"))


class Killed(Exception):
    """This worker is no more."""


def layer(value: Tensor, virtual_stage: int) -> Tensor:
    """What one virtual stage computes; no two orders of them give the same."""
    return value * 1.25 + virtual_stage


def expected_losses(arrangement: Arrangement) -> dict[str, str]:
    """Of all microbatches, by one loop."""
    shape, total = arrangement.pipelines[0], 0.0
    number = NUM_BATCHES * arrangement.total_microbatches
    for sample in SAMPLES[:number]:
        value = torch.tensor([sample], dtype=torch.float64)
        for virtual_stage in range(shape.num_stages * shape.num_chunks):
            value = layer(value, virtual_stage)
        total += float(value)
    return {"lm loss": (total / number).hex()}


class _Formula:
    """Stands in for the passes of a model."""

    @contextmanager
    def evaluating(self, numbers: Collection[int]) -> Iterator[None]:
        yield

    def run(
        self, action: Action, schedule: Schedule, inputs: Tensor | None, data: ReplayedIterator
    ) -> tuple[Tensor, Any]:
        assert action.chunk is not None and action.microbatch is not None
        data.select(action.microbatch)
        value = next(data) if inputs is None else inputs
        output = layer(value, action.chunk * schedule.num_stages + action.stage)
        is_last = schedule.downstream(action, Op.F) is None
        return output, {"lm loss": output} if is_last else None


class Peer:
    """One worker."""

    def __init__(self, node: str, address: str, plan: Plan, folder: Path, fatal: str) -> None:
        self.node, self.plan, self._fatal = node, plan, fatal
        self._is_dead = False
        self._pending: list[Plan] = []
        client = store_client(address, WAIT_SECONDS)
        self.registry = GroupRegistry(
            node,
            lambda prefix: BambooStore(client, prefix, WAIT_SECONDS),
            timedelta(seconds=WAIT_SECONDS),
        )
        self._view = PipelineView(node, plan, Redundancy.LAZY, EQUAL_COSTS, False, False)
        events = EventLog(folder, node)
        datasets = Datasets([], [torch.tensor(x, dtype=torch.float64) for x in SAMPLES], None)  # type: ignore[arg-type]
        total = plan.arrangement.total_microbatches
        own = EvaluatorParts(
            self._parts(events),
            self._view,
            0,
            Mailbox(),
            EvaluationStore(client),
            _Formula(),  # type: ignore[arg-type]
            EvaluationData(datasets, 1, total, events),
            activation=lambda: SHAPE,
            shaped=lambda group: group,
            before=self._before,
        )
        self._evaluator = Evaluator(own, EvaluationPlan(STEP, NUM_BATCHES, 2 * STEP), self)
        self._store, self._work = own.store, Beside(lambda: None)

    def begin(self) -> None:
        """Evaluate, in a thread of its own."""
        self._work = Beside(self._evaluator.after_step, STEP)

    def finish(self) -> Evaluated:
        """The outcome, as it finds it in the end."""
        self._work.join(WAIT_SECONDS)
        (evaluation,) = EvaluationPlan(STEP, NUM_BATCHES, 2 * STEP).after_step(STEP)
        outcome = self._store.outcome(evaluation)
        assert outcome is not None
        return outcome

    def learn(self, plan: Plan) -> None:
        """As the control thread learns of a loss."""
        self.registry.leave(plan.epoch - 1, plan.lost)
        self._pending.append(plan)
        self._evaluator.wake()

    def has_pending_plan(self) -> bool:
        return bool(self._pending)

    def follow_plans(self) -> Plan:
        """As the executor does it between two steps."""
        if self._is_dead:
            raise Killed
        while self._pending:
            self.plan = self._pending.pop(0)
            self.registry.update(self.plan.epoch, {})
            self._view.set_plan(self.plan)
        return self.plan

    def _before(self, action: Action, batch: int, step: int) -> None:
        if f"{self.node}@EVAL{batch}/{action}" == self._fatal:
            self._is_dead = True
            # So that no thread of it is left in the tests' process.
            self.registry.leave(self.plan.epoch, ())
            raise EpochEnded

    def _parts(self, events: EventLog) -> Parts:
        none: Any = None
        return Parts(
            worker=self.node,
            tensor_size=1,
            compute=none,
            tail=none,
            mirrors=none,
            verification=none,
            account=None,
            transport=none,
            registry=self.registry,
            ledger=none,
            events=events,
            handover=none,
            hold=none,
            promote=none,
            before_action=none,
            turnstile=None,
            wait_seconds=WAIT_SECONDS,
            where=Whereabouts(STEP, Limits(5.0, 60.0, 60.0)),
        )


def evaluate(
    address: str, folder: Path, arrangement: Arrangement, fatal: str = "", unaware: str = ""
) -> dict[str, Evaluated]:
    """By worker that lives in the end the outcome of one evaluation.

    Args:
        fatal: where a worker dies, like ``node1@EVAL2/1.0F0``; the others learn of it then.
        unaware: who does not learn of it before the end.
    """
    nodes = [f"node{number}" for number in range(arrangement.num_nodes)]
    plan = initial_plan(nodes, arrangement, "lazy")
    peers = {node: Peer(node, address, plan, folder, fatal) for node in nodes}
    for peer in peers.values():
        peer.begin()
    if fatal:
        victim = peers.pop(fatal.partition("@")[0])
        try:
            victim.finish()
            raise AssertionError(f"nobody came to {fatal}")
        except Killed:
            after = plan_after_loss(plan, {victim.node}, StepDecision(STEP, False, None, "it is"))
        if unaware:
            # Else it would wait for others of its pipeline that have left.
            _await_reports(address, plan, unaware)
        for node, peer in peers.items():
            if node != unaware:
                peer.learn(after)
    outcomes = {node: peer.finish() for node, peer in peers.items()}
    for peer in peers.values():
        peer.registry.close()
    return outcomes


def _await_reports(address: str, plan: Plan, node: str) -> None:
    """Wait until the pipeline of a worker has reported all."""
    (evaluation,) = EvaluationPlan(STEP, NUM_BATCHES, 2 * STEP).after_step(STEP)
    share = Share(plan.arrangement.microbatches, plan.pipeline_of(node))
    with closing(store_client(address, WAIT_SECONDS)) as client:
        client.wait([batch_key(evaluation, share, NUM_BATCHES - 1)])
