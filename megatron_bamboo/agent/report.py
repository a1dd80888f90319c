"""What a run tells its user: one line an iteration, one line a loss, and a file of exact losses.

The lines are in Megatron's style, and in one place for the whole job: a node that dies takes no
line along, and none is printed twice. So it stays when the coordinator dies: what it said is in the
job's journal, and the launcher, which does not die before the job, tells it from there.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime

from megatron_bamboo.agent.job import JobShape
from megatron_bamboo.agent.telling import is_new
from megatron_bamboo.evaluation.outcome import Evaluated, evaluation_line
from megatron_bamboo.membership.decision import StepReport
from megatron_bamboo.membership.restores import Restores
from megatron_bamboo.membership.table import Table
from megatron_bamboo.planner.healing import unprotected
from megatron_bamboo.planner.plan import Plan

REPORTED_KEY = "reported"
"""Holds the last step that was said."""


@dataclass(frozen=True, slots=True)
class _Later:
    """A line that waits for the line of its step."""

    step: int
    what: str
    """Under which it is known whether it was said."""
    line: str
    losses: Mapping[str, object] | None = None
    """Of an evaluation."""


class Reporter:
    """Says what happens in a job, in the order of its steps.

    What is said is in the store together with the fact that it was said, so that of several
    coordinators exactly one says it. Who tells it to the user is ``Teller``.
    """

    def __init__(
        self,
        table: Table,
        shape: JobShape,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self._table = table
        self._shape = shape
        self._now = now
        reported = table.get(REPORTED_KEY)
        self._next_step = (shape.start_step if reported is None else int(reported)) + 1
        self._restores = Restores.of(table)
        self._waiting: dict[int, StepReport] = {}
        self._later: list[_Later] = []
        """What is said as soon as the step that it belongs to was said."""

    def passed(self, report: StepReport) -> None:
        """Take a step's report; say it once all steps before it were said."""
        if report.step < self._next_step:
            return
        self._waiting[report.step] = report
        while next_report := self._waiting.pop(self._next_step, None):
            step = self._next_step
            loss = {"step": step, "loss": next_report.loss, "grad_norm": next_report.grad_norm}
            line = iteration_line(next_report, self._shape)
            if step <= self._restores.furthest:
                loss, line = {**loss, "again": self._restores.number}, f"{line} done again |"
            with self._table.together():
                self._table.set(REPORTED_KEY, str(step).encode())
                self._say(line, loss=loss)
                for difference in next_report.differences:
                    self.note(f"before step {step} {difference}")
            self._next_step += 1
            self._say_later()

    def go_back(self, restores: Restores) -> None:
        """The steps since a checkpoint are undone, and will be said again."""
        self._restores, self._next_step = restores, restores.step + 1
        self._waiting.clear()
        self._later.clear()
        self._table.set(REPORTED_KEY, str(restores.step).encode())

    def saved(self, step: int, folder: str, seconds: float, failure: str | None) -> None:
        """Say how the save of a step ended, once the step itself was said."""
        line = f"saved step {step} to {folder} in {seconds:.2f} s"
        if failure is not None:
            line = f"step {step} was not saved to {folder}: {failure}"
        self._later.append(_Later(step, f"saved/{step}", line))
        self._say_later()

    def evaluated(self, outcome: Evaluated) -> None:
        """Say what came of an evaluation, once its step was said, and write its losses down."""
        what = f"evaluation/{outcome.step}/{outcome.kind}"
        losses: dict[str, object] = {"evaluated": outcome.kind, "step": outcome.step}
        losses["losses"], line = dict(outcome.losses), evaluation_line(outcome)
        if outcome.step <= self._restores.furthest:
            losses["again"], line = self._restores.number, f"{line} done again |"
        self._later.append(_Later(outcome.step, what, line, losses))
        self._say_later()

    def _say_later(self) -> None:
        """In the order in which it came, which is that of the steps."""
        due = [later for later in self._later if later.step < self._next_step]
        self._later = [later for later in self._later if later not in due]
        for later in due:
            more = {} if later.losses is None else {"evaluation": later.losses}
            self.once(later.what, later.line, **more)

    def lost(self, causes: Mapping[str, str], plan: Plan) -> None:
        """Say which nodes were lost and how the plan goes on without them."""
        self._say(loss_line(causes, plan))

    def planned(self, plan: Plan) -> None:
        """Say what is to change, and in which step."""
        if plan.change is not None:
            self.note(f"epoch {plan.epoch}: in step {plan.change.step} {plan.reason}")

    def changed(self, plan: Plan, step: int) -> None:
        """Say since when a planned change is made."""
        self.note(f"made in step {step}: {protection_line(plan)}")

    def note(self, text: str) -> None:
        """Say something else."""
        self._say(text)

    def once(self, what: str, text: str, **more: object) -> None:
        """Say something else, with more that belongs to it, unless that was said already."""
        with self._table.together():
            if is_new(self._table, what):
                self._say(text, **more)

    def _say(self, text: str, **more: object) -> None:
        time = self._now().strftime("%Y-%m-%d %H:%M:%S")
        self._table.say({"line": f" [{time}] {text}"} | more)


def iteration_line(report: StepReport, shape: JobShape) -> str:
    """An iteration as Megatron logs it."""
    parts = [
        f"iteration {report.step:8d}/{shape.train_iters:8d}",
        f"consumed samples: {report.samples:12d}",
        f"elapsed time per iteration (ms): {report.seconds * 1000:.1f}",
        f"learning rate: {report.lr:.6E}",
        f"global batch size: {shape.global_batch_size:5d}",
        f"lm loss: {float.fromhex(report.loss):.6E}",
    ]
    if report.loss_scale != 1.0:
        parts.append(f"loss scale: {report.loss_scale:g}")
    if report.grad_norm is not None:
        norm = float.fromhex(report.grad_norm)
        parts.append(f"grad norm: {norm:.3f}")
        if not math.isfinite(norm):
            parts.append("skipped: the gradient overflowed")
    return " | ".join(parts) + " |"


def loss_line(causes: Mapping[str, str], plan: Plan) -> str:
    """Who was lost, who takes over, and what becomes of the step under way."""
    lost = ", ".join(f"{node} ({causes[node]})" for node in sorted(causes))
    line = f"lost {lost}; epoch {plan.epoch}: {plan.reason}"
    if plan.decision is not None:
        verdict = "applied" if plan.decision.applied else "not applied yet"
        line += f"; step {plan.decision.step} is {verdict}: {plan.decision.reason}"
    return f"{line}; {protection_line(plan)}"


def protection_line(plan: Plan) -> str:
    """Which stages a further loss would cost the job."""
    alone: dict[int, list[str]] = {}
    for pipeline, stage in unprotected(plan):
        alone.setdefault(pipeline, []).append(str(stage))
    if not alone:
        return "every stage has two holders"
    where = (f"{', '.join(stages)} of pipeline {pipe}" for pipe, stages in alone.items())
    return f"one node alone holds stages {' and '.join(where)}"
