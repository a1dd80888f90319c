"""The loop between two actions: what a worker does when the plan changes."""

import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_bamboo.execution.epochs import StepProgress
from megatron_bamboo.execution.executor import Executor
from megatron_bamboo.execution.ledger import CommitLedger
from megatron_bamboo.execution.parts import Parts, Shapes
from megatron_bamboo.execution.pipeline import PipelineView
from megatron_bamboo.execution.transport import Expected, TensorShape
from megatron_bamboo.execution.whereabouts import Limits, Whereabouts
from megatron_bamboo.membership.decision import StepDecision
from megatron_bamboo.observe.events import EventLog, read_events
from megatron_bamboo.planner.arrangement import equal_pipelines
from megatron_bamboo.planner.healing import heal
from megatron_bamboo.planner.plan import Plan, initial_plan
from megatron_bamboo.planner.taking_over import plan_after_loss
from megatron_bamboo.schedule.actions import Action, Op
from megatron_bamboo.schedule.costs import EQUAL_COSTS
from megatron_bamboo.schedule.redundancy import Redundancy
from megatron_bamboo.schedule.takeover import Progress

NOT_APPLIED = StepDecision(1, False, None, "nobody entered its commit")
SHAPE = TensorShape((1,), torch.float32, torch.device("cpu"))


class Nothing:
    """Every action of it succeeds and does nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


class FakeTransport:
    """Notes what is waited for; everything has arrived already."""

    def __init__(self) -> None:
        self.expected: list[tuple[int, str]] = []
        self.mailbox = SimpleNamespace(arrived=lambda step: frozenset(), take=lambda *_: None)

    def expect(self, expected: Iterable[Expected]) -> None:
        self.expected += [(one.message.step, str(one.message.receive)) for one in expected]

    def connect(self, peers: Iterable[str]) -> None: ...

    def drop(self, lost: Iterable[str]) -> None: ...

    def send(self, *_: object) -> None: ...

    def finish_step(self, step: int) -> None: ...

    def sent(self) -> tuple[()]:
        return ()


class FakeRegistry(Nothing):
    """Every worker is alone in its groups."""

    def members(self, name: str) -> tuple[()]:
        return ()


class FakeWatch:
    """Has the plans that a test gives it."""

    def __init__(self) -> None:
        self.pending: list[Plan] = []
        self.published: dict[str, Progress] = {}
        self.ended_at = time.monotonic()

    def has_pending(self) -> bool:
        return bool(self.pending)

    def take_pending(self) -> Plan:
        return self.pending.pop(0)

    def progress_of(self, epoch: int, worker: str, seconds: float) -> StepProgress:
        return StepProgress(1, self.published.get(worker, Progress()))


class FakeCompute:
    """Leaves something to send."""

    def __init__(self) -> None:
        self.data: Iterator[Any] = iter(())

    def start_step(self, data: Iterator[Any], *_: object) -> None:
        self.data = data

    def forward(self, action: Action, schedule: object, state: Any) -> None:
        state.outputs[action.with_op(Op.F)] = torch.zeros(1)

    def go_on_from(self, mirror: Action) -> None: ...

    def backward(self, action: Action, schedule: object, state: Any) -> None:
        state.input_gradients[action] = torch.zeros(1)


class FakeMirrors:
    """Notes what is adopted."""

    def __init__(self) -> None:
        self.adopted: list[str] = []

    def shape(self, mirror: Action) -> TensorShape:
        return SHAPE

    def copy(self, mirror: Action, state: object) -> torch.Tensor:
        return torch.zeros(1)

    def adopt(self, mirror: Action, tensor: object, state: object) -> None:
        self.adopted.append(str(mirror))


class FakeVerification:
    """Nothing ever differs."""

    def stages_to_mend(self, plan: Plan) -> tuple[int, ...]:
        return ()


class Bench:
    """An executor of node2 among parts that do nothing, but for the commit's ledger."""

    def __init__(self, folder: Path, num_sharing: int = 1, num_mirrors: int = 0) -> None:
        self.mirrors = FakeMirrors()
        self.compute = FakeCompute()
        nodes = [f"node{number}" for number in range(3 * num_sharing)]
        self.plan = initial_plan(nodes, equal_pipelines(3, num_sharing, 2), "lazy")
        self.ledger, self.transport, self.watch = (
            CommitLedger("node2"),
            FakeTransport(),
            FakeWatch(),
        )
        self.view = PipelineView(
            "node2",
            self.plan,
            Redundancy.LAZY,
            EQUAL_COSTS,
            tied=True,
            sharded=num_sharing > 1,
            num_mirrors=num_mirrors,
        )
        self.events = EventLog(folder, "node2")
        self.executor = Executor(self._parts(), self.view, self.plan)
        self.executor.start(self.watch)  # type: ignore[arg-type]

    def _parts(self) -> Parts:
        nothing: Any = Nothing()
        fakes: Any = self.transport
        return Parts(
            where=Whereabouts(0, Limits(5.0, 30.0, 60.0)),
            worker="node2",
            tensor_size=1,
            compute=self.compute,  # type: ignore[arg-type]
            tail=nothing,
            mirrors=self.mirrors,  # type: ignore[arg-type]
            verification=FakeVerification(),  # type: ignore[arg-type]
            account=None,
            transport=fakes,
            registry=FakeRegistry(),  # type: ignore[arg-type]
            ledger=self.ledger,
            events=self.events,
            handover=nothing,
            hold=lambda now, coming: Shapes(
                SHAPE, SHAPE, dict.fromkeys(now.numbers, SHAPE), lambda stage: SHAPE
            ),
            promote=lambda: None,
            before_action=lambda action, step: None,
            turnstile=None,
            wait_seconds=1.0,
        )

    def lose_node0(self, decision: StepDecision | None) -> None:
        self.lose("node0", decision)

    def lose(self, node: str, decision: StepDecision | None) -> None:
        """As the control thread does it when a node is declared lost."""
        self.ledger.leave(self.plan.epoch)
        self.ledger.decide(decision)
        self.plan = plan_after_loss(self.plan, {node}, decision)
        self.watch.pending.append(self.plan)

    def heal(self, decision: StepDecision) -> None:
        """The same for new shadows."""
        self.ledger.leave(self.plan.epoch)
        self.ledger.decide(decision)
        self.plan = heal(self.plan, decision, last_step=9)
        self.watch.pending.append(self.plan)

    def do_step(self, step: int) -> None:
        """A whole step that nothing disturbs."""
        self.executor.begin_step(step, iter(()), lambda *_: None)
        self.ledger.commit(step, lambda: (1.0,), lambda: None)
        self.executor._execute(until_tail=False)


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
    assert next(bench.compute.data) == "a"


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
    assert list(map(str, bench.executor._course.queue)) == ["2STEP"]


def test_what_is_done_after_the_snapshot_is_not_done_again(bench: Bench) -> None:
    bench.executor.begin_step(1, iter(()), lambda *_: None)
    done = [Action.parse(text) for text in ("2.0F0", "2.0B0", "2.0SEND_B0")]
    bench.executor._course.state.done += done
    bench.lose_node0(StepDecision(0, False, None, "nobody entered its commit"))
    bench.executor.follow_plans()
    assert not set(done) & set(bench.executor._course.queue)
    assert Action.parse("2.0B1") in bench.executor._course.queue


def test_a_shadow_goes_on_from_the_mirror_that_it_published(tmp_path: Path) -> None:
    bench = Bench(tmp_path, num_mirrors=1)
    bench.executor.begin_step(1, iter(()), lambda *_: None)
    assert (1, "0.0RECV_MIRROR0") in bench.transport.expected
    arrived = frozenset({Action.parse("0.0RECV_MIRROR0")})
    done = {Action.parse(f"1.0{word}") for word in ("F0", "B0", "SEND_B0")}
    bench.watch.published = {
        "node1": Progress(done=frozenset(done)),
        "node2": Progress(received=arrived),
    }
    bench.lose_node0(StepDecision(0, False, None, "nobody entered its commit"))
    bench.executor.follow_plans()
    assert bench.mirrors.adopted == ["0.0RECV_MIRROR0"]
    left = set(map(str, bench.executor._course.queue))
    assert {"0.0F0", "0.0B0"} & left == set() and {"0.0F1", "0.0B1"} <= left
    assert {"0.0F0", "0.0B0"} <= set(map(str, bench.executor.progress().progress.done))
    (event,) = [event for event in read_events(tmp_path) if event["event"] == "mirror"]
    assert (event["stage"], event["chunk"], event["microbatch"], event["step"]) == (0, 0, 0, 1)


@pytest.fixture
def sharing(tmp_path: Path) -> Bench:
    return Bench(tmp_path, num_sharing=2)


def passed(step: int, gathered: int) -> StepDecision:
    return StepDecision(step, True, ((1.0).hex(),), "node1 passed its commit", gathered)


def logged(folder: Path, epoch: int) -> list[tuple[str, int]]:
    """The actions of an epoch and the steps that they belong to."""
    events = [event for event in read_events(folder) if event["event"] == "action"]
    return [(event["action"], event["step"]) for event in events if event["epoch"] == epoch]


def test_a_step_ends_when_all_parameters_are_there(sharing: Bench, tmp_path: Path) -> None:
    sharing.do_step(1)
    assert logged(tmp_path, 0)[-3:] == [("2STEP", 1), ("0RGATHER", 1), ("2GATHER", 1)]
    assert sharing.ledger.gathered == 1


def test_who_has_begun_the_next_step_gathers_once_more_for_who_has_not(
    sharing: Bench, tmp_path: Path
) -> None:
    sharing.do_step(1)
    sharing.executor.begin_step(2, iter(()), lambda *_: None)
    sharing.lose("node4", passed(1, gathered=0))
    sharing.executor._execute(until_tail=True)
    assert logged(tmp_path, 1)[:3] == [("0RGATHER", 1), ("2GATHER", 1), ("2.0RECV_F0", 2)]
    assert str(sharing.executor._course.queue[0]) == "2REDUCE"
    assert sharing.ledger.gathered == 1


def test_it_does_not_where_all_have_their_parameters(sharing: Bench, tmp_path: Path) -> None:
    sharing.do_step(1)
    sharing.executor.begin_step(2, iter(()), lambda *_: None)
    sharing.lose("node4", passed(1, gathered=1))
    sharing.executor._execute(until_tail=True)
    assert logged(tmp_path, 1)[0] == ("2.0RECV_F0", 2)


def test_a_second_loss_does_not_make_it_forget_the_gather(sharing: Bench, tmp_path: Path) -> None:
    sharing.do_step(1)
    sharing.executor.begin_step(2, iter(()), lambda *_: None)
    sharing.lose("node4", passed(1, gathered=0))
    sharing.lose("node0", passed(1, gathered=1))
    sharing.executor._execute(until_tail=True)
    gathers = [(action, step) for action, step in logged(tmp_path, 2) if "GATHER" in action]
    assert gathers == [("0GATHER", 1), ("2GATHER", 1)]


def test_after_its_step_a_worker_only_gathers(sharing: Bench, tmp_path: Path) -> None:
    sharing.executor.begin_step(1, iter(()), lambda *_: None)
    sharing.ledger.commit(1, lambda: (1.0,), lambda: None)
    while sharing.executor._course.queue[0].op is not Op.STEP:
        sharing.executor._course.queue.popleft()
    sharing.executor._course.queue = deque(list(sharing.executor._course.queue)[:1])
    sharing.executor._execute(until_tail=False)
    sharing.executor._course.queue = deque(sharing.view.gathers())
    sharing.lose("node0", passed(1, gathered=0))
    sharing.executor._execute(until_tail=False)
    assert logged(tmp_path, 1) == [("0GATHER", 1), ("2GATHER", 1)]


def test_between_two_steps_it_gathers_at_once(sharing: Bench, tmp_path: Path) -> None:
    sharing.do_step(1)
    sharing.lose("node4", passed(1, gathered=0))
    assert sharing.executor.follow_plans() is sharing.plan
    assert logged(tmp_path, 1) == [("0RGATHER", 1), ("2GATHER", 1)]
    assert sharing.ledger.gathered == 1


def test_before_the_first_step_there_is_nothing_but_the_gather(
    sharing: Bench, tmp_path: Path
) -> None:
    sharing.executor.start(sharing.watch, step=3)  # type: ignore[arg-type]
    sharing.lose("node4", replace(NOT_APPLIED, gathered=0))
    sharing.executor.follow_plans()
    assert logged(tmp_path, 1) == [("0RGATHER", 3), ("2GATHER", 3)]


@pytest.fixture
def merged(sharing: Bench) -> Bench:
    """It runs stages 2 and 0 and shadows none."""
    sharing.do_step(1)
    sharing.lose("node0", passed(1, gathered=1))
    sharing.do_step(2)
    return sharing


def test_after_a_changes_step_all_who_then_hold_a_stage_gather_it(
    merged: Bench, tmp_path: Path
) -> None:
    """Also a new holder, which has stepped its own share alone."""
    merged.heal(passed(2, gathered=2))
    assert merged.plan.change is not None
    assert [(t.stage, t.target) for t in merged.plan.change.transfers] == [
        (0, "node1"),
        (1, "node2"),
    ]
    merged.do_step(3)
    gathers = [word for word, step in logged(tmp_path, 2) if step == 3 and "GATHER" in word]
    assert gathers == ["0GATHER", "1RGATHER", "2GATHER"]
    assert (merged.executor.plan.change, merged.ledger.gathered) == (None, 3)


def test_a_loss_in_the_gather_of_a_changes_step_repeats_it_among_the_new_holders(
    merged: Bench, tmp_path: Path
) -> None:
    merged.heal(passed(2, gathered=2))
    merged.do_step(3)
    merged.lose("node4", passed(3, gathered=2))
    merged.executor.follow_plans()
    assert logged(tmp_path, 3) == [("0GATHER", 3), ("1RGATHER", 3), ("2GATHER", 3)]


def test_the_gather_before_a_change_is_repeated_among_the_old_holders(
    merged: Bench, tmp_path: Path
) -> None:
    merged.heal(passed(2, gathered=1))
    merged.executor.follow_plans()
    assert logged(tmp_path, 2) == [("0GATHER", 2), ("2GATHER", 2)]
