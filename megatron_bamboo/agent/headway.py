"""How far a job is, as its workers report it in the store: each report is said once.

A report is of a step that has passed, of a save or an evaluation that has ended, or of a node that
comes or is there again.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict

from megatron_bamboo.agent.job import JobShape
from megatron_bamboo.agent.members import Members
from megatron_bamboo.agent.report import Reporter
from megatron_bamboo.agent.telling import is_new
from megatron_bamboo.evaluation.outcome import Evaluated
from megatron_bamboo.membership.decision import StepReport
from megatron_bamboo.membership.lives import last_life
from megatron_bamboo.membership.restores import Restores
from megatron_bamboo.membership.table import Table
from megatron_bamboo.observe.events import Emitter
from megatron_bamboo.planner.plan import Checkpoint, Plan

EVALUATED = "evaluated/"
EVALUATION = "evaluation/"
"""Before what workers tell of an evaluation's outcome, and of what they have evaluated so far."""

KEPT_REPORTS = 256
"""Of so many steps reports are kept: far more than a worker may repeat."""


class Headway:
    """What has been reported so far."""

    def __init__(
        self, shape: JobShape, table: Table, members: Members, events: Emitter, reporter: Reporter
    ) -> None:
        self._shape = shape
        self._table = table
        self._members = members
        self._events = events
        self._reporter = reporter
        self._reports: list[bytes] = []
        self._saves: list[bytes] = []
        self._evaluations: list[bytes] = []
        self._num_known = 0
        """Of the nodes that have ever joined: those of which it is said, or need not be."""
        self._evaluated_step = 0
        """After this step the newest evaluation came to its end."""
        self._checkpoint: tuple[int, str] | None = None
        self._restores = Restores.of(table)
        self.step = self._restores.step if self._restores.number else shape.start_step
        """The newest step that has passed, and is not undone."""
        self.moved_at = time.monotonic()
        """When there was any headway last."""
        told = (("passed/", self._reports), ("saved/", self._saves), (EVALUATED, self._evaluations))
        for prefix, values in told:
            for key, value in table.items(prefix).items():
                self._take(values, key, value)
        table.subscribe("passed/", lambda key, value: self._take(self._reports, key, value))
        table.subscribe("saved/", lambda key, value: self._take(self._saves, key, value))
        table.subscribe(EVALUATED, lambda key, value: self._take(self._evaluations, key, value))
        table.subscribe(EVALUATION, lambda _, __: self.moved())

    def look(self) -> Iterator[StepReport]:
        """Say what is new; the steps that have passed, each when it was said."""
        reports, self._reports = self._reports, []
        for report in sorted(map(StepReport.from_json, reports), key=lambda report: report.step):
            self.moved()
            self.step = max(self.step, report.step)
            self._say_differences(report)
            self._reporter.passed(report)
            self._table.delete(f"passed/{report.step - KEPT_REPORTS}")
            yield report
        self._say_loaded()
        self._say_evaluations()
        self._say_saves()
        self._say_newcomers()

    @property
    def checkpoint(self) -> Checkpoint:
        """The newest whole one, of this run or the one that it went on from."""
        if self._checkpoint is not None:
            return Checkpoint(*self._checkpoint)
        return Checkpoint(self._shape.start_step, self._shape.loaded_from)

    @property
    def furthest(self) -> int:
        """The newest step that has ever passed, undone or not."""
        return max(self.step, self._restores.furthest)

    def tried_to_save(self, step: int) -> bool:
        """Whether it is known how the save of a step has ended."""
        return self._table.get(f"saved/{step}") is not None

    def go_back(self, restores: Restores) -> None:
        """The steps since a checkpoint are undone."""
        self._restores, self.step = restores, restores.step
        self._evaluated_step = min(self._evaluated_step, restores.step)
        self.moved()

    def _take(self, values: list[bytes], key: str, value: bytes) -> None:
        """A report, unless a worker says late what is undone already."""
        if self._restores.number:
            told = json.loads(value)
            if self._restores.undoes(told["step"], told["epoch"]):
                self._table.delete(key)
                return
        values.append(value)

    @property
    def is_evaluating(self) -> bool:
        """Whether an evaluation is under way after the newest step, as far as is known."""
        return self.must_evaluate(self.step)

    def must_evaluate(self, step: int) -> bool:
        """Whether the evaluation after a step of the training, if there is one, has not come to its
        end."""
        interval = self._shape.eval_interval
        if interval is None or step in (self._shape.start_step, self._restores.step):
            return False
        return step % interval == 0 and self._evaluated_step < step

    def moved(self) -> None:
        """There is headway, in whatever way."""
        self.moved_at = time.monotonic()

    def restart_hint(self) -> str:
        """Where a job that cannot go on may be started again from."""
        if self._checkpoint is None:
            return "it has no checkpoint"
        step, folder = self._checkpoint
        return f"start it again with --load {folder}, which holds step {step}"

    def _say_differences(self, report: StepReport) -> None:
        if not report.differences:
            return
        with self._table.together():
            if is_new(self._table, f"differences/{report.step}"):
                for difference in report.differences:
                    self._events.emit("difference", step=report.step, what=difference)

    def say_started(self, plan: Plan) -> None:
        """Say by which process groups those who train, and standbys, can be ended."""
        groups = self._members.groups()
        trains = [node for node in plan.nodes if node in groups]
        waits = [node for node in groups if node not in plan.nodes]
        line = f"started, with process groups: {_named(groups, trains)}"
        with self._table.together():
            for node in groups:
                is_new(self._table, f"newcomer/{node}")
            self._reporter.note(f"{line}; standbys: {_named(groups, waits)}" if waits else line)

    def _say_newcomers(self) -> None:
        """Of a node that comes, or is there again, its user may want to know its process group."""
        # Whoever comes before the start is named there.
        if not (new := self._members.newcomers(self._num_known)):
            return
        self._num_known += len(new)
        has_begun, groups = self._table.get("epoch") is not None, self._members.groups()
        for node in (node for node in new if node in groups):
            if (lost := last_life(node)) is not None:
                line = f"{lost} is back as {node}, with process group {groups[node]}"
                self._reporter.once(f"returned/{node}", line)
            elif has_begun:
                line = f"{node} has joined as a standby, with process group {groups[node]}"
                self._reporter.once(f"newcomer/{node}", line)

    def _say_loaded(self) -> None:
        """Where a worker is ready it has loaded the checkpoint, if there is one; said once."""
        folder, step = self._shape.loaded_from, self._shape.start_step
        if folder is None or self._checkpoint or not self._table.count("ready/"):
            return
        self._checkpoint = (step, folder)
        self._reporter.once("loaded", f"loaded step {step} from {folder}")

    def _say_evaluations(self) -> None:
        """The workers go on only when the outcome is there."""
        evaluations, self._evaluations = self._evaluations, []
        for outcome in map(Evaluated.from_json, evaluations):
            self.moved()
            self._evaluated_step = max(self._evaluated_step, outcome.step)
            with self._table.together():
                if is_new(self._table, f"evaluated/{outcome.step}/{outcome.kind}"):
                    self._events.emit("evaluation", **asdict(outcome))
            self._reporter.evaluated(outcome)

    def _say_saves(self) -> None:
        """The workers have agreed how a save ended, and go on only then."""
        saves, self._saves = self._saves, []
        for saved in map(json.loads, saves):
            self.moved()
            step, folder, failure = saved["step"], saved["folder"], saved["failure"]
            with self._table.together():
                if is_new(self._table, f"checkpoint/{step}"):
                    self._events.emit("checkpoint", **saved)
            self._reporter.saved(step, folder, saved["seconds"], failure)
            if failure is None:
                self._checkpoint = (step, folder)


def _named(groups: Mapping[str, int], nodes: Sequence[str]) -> str:
    return ", ".join(f"{node} {groups[node]}" for node in nodes)
