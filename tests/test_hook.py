"""What the recovery hook asks of a training loop; what it does for one is in the scenarios."""

from collections.abc import Callable
from typing import Any, cast

import pytest

from megatron_bamboo.execution.errors import LetGo
from megatron_bamboo.membership.restores import GoBack
from megatron_bamboo.planner.arrangement import equal_pipelines
from megatron_bamboo.planner.plan import Plan, initial_plan
from megatron_bamboo.training import RecoveryHook, megatrons_loop


class WorkerOfThreeSteps:
    """A worker's steps without their work; it may be let go in one of them."""

    def __init__(self, goes_in: int = 0) -> None:
        self.last_step = 3
        self.plan: Plan = initial_plan(["node0", "node1"], equal_pipelines(2, 1, 1), "lazy")
        self.done: list[str] = []
        self._goes_in = goes_in

    def begin(self) -> int:
        return 0

    def run_step(self, step: int, one_step: Callable[[Any], Any]) -> Any:
        result = one_step(lambda: f"losses of step {step}")
        if step == self._goes_in:
            raise LetGo
        self.done.append(f"step {step}")
        return result

    def megatrons_step(self, forward_backward_func: Callable[[], Any]) -> Any:
        return forward_backward_func()

    def finish(self) -> None:
        self.done.append("finish")

    def leave(self) -> None:
        self.done.append("leave")


class WorkerThatGoesBack(WorkerOfThreeSteps):
    """All go back to the second step when this worker is in its third."""

    def run_step(self, step: int, one_step: Callable[[Any], Any]) -> Any:
        if step == 3:
            raise GoBack(self.plan)
        return super().run_step(step, one_step)

    def retire(self, plan: Plan) -> Callable[[], WorkerOfThreeSteps]:
        assert plan is self.plan
        return lambda: WorkerBegunAgain(self.done)


class WorkerBegunAgain(WorkerOfThreeSteps):
    """It has the state after the first step."""

    def __init__(self, done: list[str]) -> None:
        super().__init__()
        self.done = done

    def begin(self) -> int:
        return 1


def hook_of(worker: WorkerOfThreeSteps) -> RecoveryHook:
    return RecoveryHook(cast(Any, worker), makes_groups=False)


def test_each_step_says_where_to_go_on() -> None:
    worker = WorkerOfThreeSteps()
    hook = hook_of(worker)
    told = [hook.step(lambda forward_backward: forward_backward()) for _ in hook.steps()]
    hook.finish()
    assert [(after.step, after.next_step) for after in told] == [(1, 2), (2, 3), (3, None)]
    assert [after.result for after in told] == [f"losses of step {n}" for n in (1, 2, 3)]
    assert not any(after.is_changed or after.groups for after in told)
    assert worker.done == ["step 1", "step 2", "step 3", "finish"]


def test_a_loop_ends_early_where_all_end_early_or_this_node_is_let_go() -> None:
    worker = WorkerOfThreeSteps(goes_in=2)
    hook = hook_of(worker)
    megatrons_loop(hook)
    hook.finish()
    assert worker.done == ["step 1", "leave"]
    worker = WorkerOfThreeSteps()
    hook = hook_of(worker)
    for step in hook.steps():
        hook.step(hook.as_megatron_does)
        worker.last_step = min(worker.last_step, step + 1)  # the job is to be stopped
    hook.finish()
    assert worker.done == ["step 1", "step 2", "finish"]


def test_a_loop_goes_through_steps_again_that_are_undone() -> None:
    worker = WorkerThatGoesBack()
    hook = hook_of(worker)
    told = [hook.step(hook.as_megatron_does) for _ in hook.steps()]
    hook.finish()
    assert [(a.step, a.next_step) for a in told] == [(1, 2), (2, 3), (3, 2), (2, 3), (3, None)]
    assert [after.is_changed for after in told] == [False, False, True, False, False]
    assert worker.done == ["step 1", "step 2", "step 2", "step 3", "finish"]


def test_a_loop_that_leaves_steps_out_is_refused() -> None:
    hook = hook_of(WorkerOfThreeSteps())
    steps = hook.steps()
    next(steps)
    with pytest.raises(RuntimeError, match="step 1 was not run: call step"):
        next(steps)
    with pytest.raises(RuntimeError, match="the loop ended before step 1: go through all"):
        hook.finish()
    megatrons_loop(hook)
    with pytest.raises(RuntimeError, match="no step is left"):
        hook.step(hook.as_megatron_does)


def test_without_groups_there_is_no_collective() -> None:
    hook = hook_of(WorkerOfThreeSteps())
    assert hook.together(lambda groups: groups) is None
