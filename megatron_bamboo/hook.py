"""The recovery hook: a training loop of one's own wraps each step in it, and outlives losses.

    def train(hook):
        for step in hook.steps():
            after = hook.step(one_step)

``one_step`` gets a function with the signature of Megatron-core's ``forward_backward_func`` and
calls it once, with ``hook.model``, ``hook.microbatches()`` and ``hook.num_microbatches``. Then
gradients are reduced, the step is committed by all or by nobody, and applied. What is lost
meanwhile is recovered within the step, so that a loss shows only in what comes back: the plan in
force, the groups that belong to it (also in Megatron-core's ``parallel_state``), and the step to
go on with. Where some state has no live holder left all may go back to the last checkpoint: then
the step to go on with is an earlier one, and the model is another object.

``pretrain`` is such a loop itself and has nothing else.
"""

import gc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn

from megatron_bamboo.execution.errors import LetGo
from megatron_bamboo.execution.script_groups import ScriptGroups
from megatron_bamboo.membership.restores import GoBack
from megatron_bamboo.model.place import set_script_groups
from megatron_bamboo.planner.plan import Plan
from megatron_bamboo.worker import Worker

T = TypeVar("T")
ForwardBackward = Callable[..., list[Any]]
OneStep = Callable[[ForwardBackward], T]
Loop = Callable[["RecoveryHook"], None]


@dataclass(frozen=True, slots=True)
class After:
    """What a step has come to."""

    step: int
    next_step: int | None
    """Where to go on; None where nothing is left to do on this node. It is no later step where all
    went back to a checkpoint."""
    result: Any
    """What the wrapped step gave."""
    plan: Plan
    """Who runs and holds what from now on."""
    groups: ScriptGroups | None
    """None until all have passed a step under the plan, or where nobody asks for groups."""
    is_changed: bool
    """Whether the plan is another one than after the step before."""


class RecoveryHook:
    """What a loop over steps needs of this project.

    Args:
        makes_groups: whether the loop wants groups for collectives of its own.
    """

    def __init__(self, worker: Worker, makes_groups: bool) -> None:
        self._worker = worker
        self._makes_groups = makes_groups
        self._groups: ScriptGroups | None = None
        self._grouped: Plan | None = None
        """The plan that the groups belong to."""
        self._next_step = worker.begin() + 1
        self._is_let_go = False
        self._num_run = 0
        """So often a step was run, also one that was given up to go back."""

    @property
    def next_step(self) -> int | None:
        """The step to go on with; None after the last, or once this node is let go."""
        is_over = self._is_let_go or self._next_step > self._worker.last_step
        return None if is_over else self._next_step

    @property
    def plan(self) -> Plan:
        """Who runs and holds what."""
        return self._worker.plan

    @property
    def model(self) -> list[nn.Module]:
        """The chunks that this worker holds now."""
        return self._worker.chunks

    @property
    def num_microbatches(self) -> int:
        """Of this worker's pipeline, in the next step."""
        return self._worker.num_microbatches

    def microbatches(self) -> Iterable[Any]:
        """The next step's microbatches of this pipeline, as the script's data set gives them.

        For ``forward_backward_func`` as they are, not as an iterator of them: a step that is begun
        anew with other microbatches goes through them again.
        """
        return self._worker.data.microbatches(self._next_step)

    def steps(self) -> Iterator[int]:
        """The steps to be done; they end early where this node is let go."""
        while (step := self.next_step) is not None:
            num_run = self._num_run
            yield step
            if self._num_run == num_run:
                raise RuntimeError(f"step {step} was not run: call step() once for each of steps()")

    def step(self, one_step: OneStep[Any]) -> After:
        """One step, whatever is lost meanwhile.

        Args:
            one_step: calls the function that it is given once.

        Raises:
            RuntimeError: it did not, or no step is left.
        """
        step, before = self.next_step, self._worker.plan
        if step is None:
            raise RuntimeError("no step is left: end the loop where next_step is None")
        result, restored = None, None
        self._num_run += 1
        try:
            result = self._worker.run_step(step, one_step)
            if self._makes_groups:
                self._worker.face_first_stage()
                self._renew_groups(step)
        except LetGo:
            self._is_let_go = True
        except GoBack as back:
            restored = back.plan
        self._next_step = step + 1
        if restored is not None:
            self._go_back(restored)
        plan = self._worker.plan
        groups = self._groups if self._grouped is plan else None
        return After(step, self.next_step, result, plan, groups, plan is not before)

    def as_megatron_does(self, forward_backward_func: ForwardBackward) -> list[Any]:
        """The call in Megatron-LM's ``train_step``, by the options of the run."""
        return self._worker.megatrons_step(forward_backward_func)

    def together(self, collective: Callable[[ScriptGroups], T]) -> T | None:
        """A collective of the script's own, between two steps and the same on all workers.

        Returns None where there are no groups now, or a loss has ended them meanwhile, which
        others may not have noticed yet. It takes at most as long as the groups' timeout.
        """
        if self._groups is None or self._grouped is not self._worker.plan:
            return None
        groups = self._groups
        return self._worker.attempt(lambda: collective(groups))

    def finish(self) -> None:
        """End this worker's part; the loop has ended.

        Raises:
            RuntimeError: steps are left.
        """
        if self.next_step is not None:
            raise RuntimeError(
                f"the loop ended before step {self.next_step}: go through all of hook.steps()"
            )
        try:
            if not self._is_let_go:
                self._worker.finish()
        except LetGo:
            self._is_let_go = True
        if self._is_let_go:
            self._worker.leave()

    def _go_back(self, plan: Plan) -> None:
        """Begin again by a plan, in this very process."""
        make_worker = self._worker.retire(plan)
        self._groups = self._grouped = None
        del self._worker  # there may be no memory for two
        gc.collect()
        self._worker = make_worker()
        self._next_step = self._worker.begin() + 1

    def _renew_groups(self, step: int) -> None:
        """Have the groups of the plan in force, as soon as all make them."""
        plan = self._worker.plan
        if plan is self._grouped:
            return
        self._groups = self._worker.script_groups(step)
        if self._groups is not None:
            self._grouped = plan
            set_script_groups(self._groups.pipeline, self._groups.data[0])


def megatrons_loop(hook: RecoveryHook) -> None:
    """Each step as in Megatron-LM's own loop: the loop of ``pretrain``."""
    for _ in hook.steps():
        hook.step(hook.as_megatron_does)
