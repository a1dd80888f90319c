"""The loop between two actions: what a worker does when the plan changes."""

import time
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_bamboo.config import Layout
from megatron_bamboo.execution.epochs import StepProgress
from megatron_bamboo.execution.executor import Executor, Parts, Shapes
from megatron_bamboo.execution.ledger import CommitLedger
from megatron_bamboo.execution.pipeline import PipelineView
from megatron_bamboo.execution.transport import Expected, TensorShape
from megatron_bamboo.membership.decision import StepDecision
from megatron_bamboo.observe.events import EventLog, read_events
from megatron_bamboo.planner.plan import Plan, initial_plan, plan_after_loss
from megatron_bamboo.schedule.actions import Action, Op
from megatron_bamboo.schedule.costs import EQUAL_COSTS
from megatron_bamboo.schedule.redundancy import Redundancy
from megatron_bamboo.schedule.takeover import Progress

NODES = ("node0", "node1", "node2")
LAYOUT = Layout(3, 1, 1, 2, 2)
SHAPE = TensorShape((1,), torch.float32, torch.device("cpu"))


class FakeTransport:
    """Notes what is waited for; everything has arrived already."""

    def __init__(self) -> None:
        self.expected: list[tuple[int, str]] = []
        self.mailbox = SimpleNamespace(arrived=lambda step: frozenset(), take=lambda *_: None)

    def expect(self, expected: Iterable[Expected]) -> None:
        self.expected += [(one.message.step, str(one.message.receive)) for one in expected]

    def connect(self, peers: Iterable[str]) -> None: ...

    def send(self, *_: object) -> None: ...

    def finish_step(self, step: int) -> None: ...


class FakeWatch:
    """Has the plans that a test gives it."""

    def __init__(self) -> None:
        self.pending: list[Plan] = []
        self.ended_at = time.monotonic()

    def has_pending(self) -> bool:
        return bool(self.pending)

    def take_pending(self) -> Plan:
        return self.pending.pop(0)

    def progress_of(self, epoch: int, worker: str, seconds: float) -> StepProgress:
        return StepProgress(1, Progress())


class FakeCompute:
    """Leaves something to send."""

    def start_step(self) -> None: ...

    def forward(self, action: Action, schedule: object, state: Any, *_: object) -> None:
        state.outputs[action.with_op(Op.F)] = torch.zeros(1)

    def backward(self, action: Action, schedule: object, state: Any) -> None:
        state.input_gradients[action] = torch.zeros(1)


class Nothing:
    """Every action of it succeeds and does nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


class Bench:
    """An executor of node2 among parts that do nothing, but for the commit's ledger."""

    def __init__(self, folder: Path) -> None:
        self.plan = initial_plan(NODES, 3, 2, "lazy")
        self.ledger, self.transport, self.watch = (
            CommitLedger("node2"),
            FakeTransport(),
            FakeWatch(),
        )
        self.view = PipelineView("node2", self.plan, LAYOUT, Redundancy.LAZY, EQUAL_COSTS, True)
        self.events = EventLog(folder, "node2")
        self.executor = Executor(self._parts(), self.view, self.plan)
        self.executor.start(self.watch)  # type: ignore[arg-type]

    def _parts(self) -> Parts:
        nothing: Any = Nothing()
        fakes: Any = self.transport
        return Parts(
            worker="node2",
            layout=LAYOUT,
            compute=FakeCompute(),  # type: ignore[arg-type]
            tail=nothing,
            transport=fakes,
            registry=nothing,
            ledger=self.ledger,
            events=self.events,
            shapes=Shapes(SHAPE, SHAPE, {0: SHAPE, 2: SHAPE}),
            before_action=lambda action, step: None,
            turnstile=None,
            wait_seconds=1.0,
        )

    def lose_node0(self, decision: StepDecision | None) -> None:
        """As the control thread does it when node0 is declared lost."""
        self.ledger.leave(0)
        self.ledger.decide(decision)
        self.watch.pending.append(plan_after_loss(self.plan, {"node0"}, decision))


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_what_a_program_waits_for_is_expected_when_its_step_begins(bench: Bench) -> None:
    bench.executor.begin_step(1, iter(()), lambda *_: None)
    receives = [f"2.0RECV_F{m}" for m in range(2)] + ["2TIE", "0RECV_REFRESH"]
    assert sorted(bench.transport.expected) == sorted((1, name) for name in receives)


@pytest.mark.parametrize("num_iterators", [0, 1, 2])
def test_data_comes_alone_or_in_megatrons_list(bench: Bench, num_iterators: int) -> None:
    data: Any = [iter(("a", "b")) for _ in range(max(1, num_iterators))]
    bench.executor.forward_backward_func(
        forward_step_func=lambda *_: None,
        data_iterator=data if num_iterators else data[0],
        model=None,
        num_microbatches=2,
        seq_length=1,
        micro_batch_size=1,
    )
    assert bench.executor._data is not None
    assert next(bench.executor._data) == "a"


def test_other_calls_than_training_steps_are_refused(bench: Bench) -> None:
    sizes: dict[str, Any] = {"model": None, "seq_length": 1, "micro_batch_size": 1}
    call = bench.executor.forward_backward_func
    with pytest.raises(ValueError, match="2 microbatches, not 3"):
        call(forward_step_func=lambda *_: None, data_iterator=[], num_microbatches=3, **sizes)
    with pytest.raises(ValueError, match="forward_only"):
        call(
            forward_step_func=lambda *_: None,
            data_iterator=[],
            num_microbatches=2,
            forward_only=True,
            **sizes,
        )


def test_a_shadow_expects_what_its_victim_would_have(bench: Bench) -> None:
    bench.executor.begin_step(1, iter(()), lambda *_: None)
    bench.transport.expected.clear()
    bench.lose_node0(StepDecision(0, False, None, "nobody entered its commit"))
    bench.executor.follow_plans()
    assert {(1, "0.0RECV_B0"), (1, "0.0RECV_B1")} <= set(bench.transport.expected)


def test_the_first_work_in_the_victims_place_ends_a_pause(bench: Bench, tmp_path: Path) -> None:
    bench.executor.begin_step(1, iter(()), lambda *_: None)
    bench.lose_node0(StepDecision(0, False, None, "nobody entered its commit"))
    bench.executor._execute(until_tail=True)
    events = read_events(tmp_path)
    (pause,) = [event for event in events if event["event"] == "pause"]
    (first, *_) = [e for e in events if e.get("action", "").startswith(("0.0F", "0.0B"))]
    assert pause["stage"] == 0
    assert pause["seconds"] == pytest.approx(first["start"] - bench.watch.ended_at)


def test_nothing_is_expected_of_a_step_that_was_decided_as_applied(bench: Bench) -> None:
    bench.executor.begin_step(1, iter(()), lambda *_: None)
    bench.transport.expected.clear()

    def broken() -> tuple[float, ...]:
        raise RuntimeError("the victim was in it")

    with pytest.raises(RuntimeError):
        bench.ledger.commit(1, broken, lambda: None)
    bench.lose_node0(StepDecision(1, True, ((1.0).hex(),), "the store saw its commit passed"))
    bench.executor.follow_plans()
    assert bench.transport.expected == []
    assert list(map(str, bench.executor._queue)) == ["2STEP"]


def test_what_is_done_after_the_snapshot_is_not_done_again(bench: Bench) -> None:
    bench.executor.begin_step(1, iter(()), lambda *_: None)
    done = [Action.parse(text) for text in ("2.0F0", "2.0B0", "2.0SEND_B0")]
    bench.executor._state.done += done
    bench.lose_node0(StepDecision(0, False, None, "nobody entered its commit"))
    bench.executor.follow_plans()
    assert not set(done) & set(bench.executor._queue)
    assert Action.parse("2.0B1") in bench.executor._queue
