"""What a run tells its user: one line an iteration, one line a loss, and a file of exact losses.

The lines are in Megatron's style, and in one place for the whole job: a node that dies takes no
line along, and none is printed twice.
"""

import json
import math
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path

from megatron_bamboo.agent.job import JobShape
from megatron_bamboo.membership.decision import StepReport
from megatron_bamboo.planner.healing import unprotected
from megatron_bamboo.planner.plan import Plan

LOSSES_FILE = "losses.jsonl"


class Reporter:
    """Says what happens in a job, in the order of its steps."""

    def __init__(
        self,
        job_dir: Path,
        shape: JobShape,
        say: Callable[[str], None],
        advance: Callable[[int], None],
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self._losses = job_dir / LOSSES_FILE
        self._shape = shape
        self._say = say
        self._advance = advance
        self._now = now
        self._next_step = shape.start_step + 1
        self._waiting: dict[int, StepReport] = {}
        self._saves: dict[int, str] = {}

    def passed(self, report: StepReport) -> None:
        """Take a step's report; say it once all steps before it were said."""
        self._waiting[report.step] = report
        while next_report := self._waiting.pop(self._next_step, None):
            self._write_loss(next_report)
            self._say(f" [{self._time()}] {iteration_line(next_report, self._shape)}")
            for difference in next_report.differences:
                self.note(f"before step {self._next_step} {difference}")
            self._advance(self._next_step)
            self._next_step += 1
            self._say_saves()

    def saved(self, step: int, folder: str, seconds: float, failure: str | None) -> None:
        """Say how the save of a step ended, once the step itself was said."""
        line = f"saved step {step} to {folder} in {seconds:.2f} s"
        if failure is not None:
            line = f"step {step} was not saved to {folder}: {failure}"
        self._saves[step] = line
        self._say_saves()

    def _say_saves(self) -> None:
        for step in [step for step in self._saves if step < self._next_step]:
            self.note(self._saves.pop(step))

    def lost(self, causes: Mapping[str, str], plan: Plan) -> None:
        """Say which nodes were lost and how the plan goes on without them."""
        self._say(f" [{self._time()}] {loss_line(causes, plan)}")

    def planned(self, plan: Plan) -> None:
        """Say what is to change, and in which step."""
        if plan.change is not None:
            self.note(f"epoch {plan.epoch}: in step {plan.change.step} {plan.reason}")

    def changed(self, plan: Plan, step: int) -> None:
        """Say since when a planned change is made."""
        self.note(f"made in step {step}: {protection_line(plan)}")

    def note(self, text: str) -> None:
        """Say something else."""
        self._say(f" [{self._time()}] {text}")

    def _time(self) -> str:
        return self._now().strftime("%Y-%m-%d %H:%M:%S")

    def _write_loss(self, report: StepReport) -> None:
        line = {"step": report.step, "loss": report.loss, "grad_norm": report.grad_norm}
        with self._losses.open("a") as file:
            file.write(json.dumps(line) + "\n")


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
