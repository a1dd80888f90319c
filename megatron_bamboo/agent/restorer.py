"""Lets all begin again from the last checkpoint where live nodes do not hold all of the state.

No process is started anew: who lives throws away what it has and begins again by the plan, and
standbys with them. What is lost is the steps since the checkpoint, which are done again.
"""

from collections.abc import Set

from megatron_bamboo.agent.calls import Calls
from megatron_bamboo.agent.headway import Headway
from megatron_bamboo.agent.job import JobSpec
from megatron_bamboo.agent.members import Members
from megatron_bamboo.agent.report import Reporter
from megatron_bamboo.membership.raised import all_raised_alike
from megatron_bamboo.membership.restores import Restores
from megatron_bamboo.membership.table import Table
from megatron_bamboo.observe.events import Emitter
from megatron_bamboo.planner.afresh import Beginning, begin_again
from megatron_bamboo.planner.healing import Vacancy
from megatron_bamboo.planner.plan import Plan
from megatron_bamboo.planner.taking_over import NoHolder


class Restorer:
    """Whether all may begin again, and by which plan."""

    def __init__(
        self,
        spec: JobSpec,
        members: Members,
        calls: Calls,
        table: Table,
        events: Emitter,
        reporter: Reporter,
        headway: Headway,
    ) -> None:
        self._spec = spec
        self._shape = spec.shape
        self._members = members
        self._calls = calls
        self._table = table
        self._events = events
        self._reporter = reporter
        self._headway = headway
        self._begun = Beginning(spec.shape.arrangement, spec.shape.sharing())

    @property
    def first_step(self) -> int:
        """That of the training, or the one after the checkpoint that all went back to last."""
        restores = Restores.of(self._table)
        return (restores.step if restores.number else self._shape.start_step) + 1

    @property
    def awaits_nodes(self) -> bool:
        """Whether others may come where nobody is left."""
        return self._spec.respawn_seconds is not None or not self._spec.nodes

    def check(self, plan: Plan, error: NoHolder, passed_step: int) -> None:
        """Raise the error where all that live may not begin again: nobody wants it, the script
        would raise again, or the training is done.

        Args:
            passed_step: the newest step that has passed, or is decided to.
        """
        is_over = passed_step >= self._shape.train_iters and (
            not self._shape.saves or self._headway.tried_to_save(passed_step)
        )
        is_over = is_over or any(map(self._members.is_done, plan.nodes))
        is_own = all_raised_alike(error.holders, self._members.raised)
        if is_over or is_own or not self._shape.restores:
            raise error

    def nodes(self, plan: Plan, freed: Set[str]) -> tuple[str, ...]:
        """Who can begin again: the plan's nodes, then standbys, those first that have been called;
        none that is to leave, if there are others."""
        lost = self._members.lost
        live = [node for node in plan.nodes if node not in lost and node not in freed]
        standbys = [*self._calls.called(plan), *self._calls.idle(plan)]
        nodes = tuple(dict.fromkeys([*live, *standbys]))
        return tuple(n for n in nodes if not self._members.is_leaving(n)) or nodes

    def plan(self, before: Plan, nodes: tuple[str, ...], lost: Set[str]) -> Plan:
        """The plan by which all begin again."""
        return begin_again(before, nodes, lost, self._headway.checkpoint, self._begun)

    def note(self, before: Plan, plan: Plan, why: str, passed_step: int) -> None:
        """Take note, before the plan is published, of all that follows from it; say what is lost.

        Args:
            passed_step: the newest step that has passed and is undone now.
        """
        assert plan.restored is not None, f"epoch {plan.epoch} restores nothing"
        step, known = plan.restored.step, Restores.of(self._table)
        furthest = max(known.furthest, passed_step)
        restores = Restores(known.number + 1, plan.epoch, step, furthest)
        with self._table.together():
            restores.write(self._table)
            self._headway.go_back(restores)
            self._reporter.go_back(restores)
            self._let_start(before, plan)
            self._say(plan, why, passed_step)

    def _let_start(self, before: Plan, plan: Plan) -> None:
        """Nobody is ready any more; standbys learn that they have a place."""
        for worker in self._members.workers_of(*plan.nodes):
            self._table.delete(f"ready/{worker}")
        called = self._calls.called(before)
        for number, pipeline in enumerate(plan.pipelines):
            for rank, node in enumerate(pipeline.ranks):
                is_placed = node in pipeline.stages and node not in before.nodes
                if is_placed and node not in called:
                    self._calls.call(node, Vacancy(number, rank), pipeline)
        for node in called.keys() - set(plan.nodes):  # it has built what there is no more
            self._members.dismiss(node)

    def _say(self, plan: Plan, why: str, passed_step: int) -> None:
        assert plan.restored is not None
        undone = passed_step - plan.restored.step
        samples = undone * self._shape.global_batch_size
        self._events.emit(
            "restored",
            epoch=plan.epoch,
            step=plan.restored.step,
            folder=plan.restored.folder,
            undone_steps=undone,
            undone_samples=samples,
            why=why,
        )
        steps = f"{undone} iteration{'s' * (undone != 1)}"
        self._reporter.note(f"{why}: {steps} with {samples} samples are undone, to be done again")
