"""The coordinator: ends an epoch at a loss, and publishes the plan of the next.

It keeps nothing that another coordinator could not read from the store or see on its connections:
one that starts in the middle of a job goes on with whatever the last one was at.
One decision is under way at a time and there is no collecting window: what is lost meanwhile goes
into the next epoch. The decisions themselves are pure functions elsewhere
(``membership/decision.py``, ``planner/taking_over.py``); here is only who is asked and who is told.
"""

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Sequence, Set
from dataclasses import asdict

from megatron_bamboo.agent.calls import Calls
from megatron_bamboo.agent.drainer import Drainer
from megatron_bamboo.agent.ending import Ending
from megatron_bamboo.agent.gatherer import AWAITED, Gatherer
from megatron_bamboo.agent.grower import Grower
from megatron_bamboo.agent.headway import EVALUATED, EVALUATION, Headway
from megatron_bamboo.agent.healer import Healer
from megatron_bamboo.agent.holder import Holder
from megatron_bamboo.agent.job import JobSpec
from megatron_bamboo.agent.members import Members
from megatron_bamboo.agent.progress import Failures
from megatron_bamboo.agent.rearranger import Rearranger
from megatron_bamboo.agent.records import Records
from megatron_bamboo.agent.renewer import Renewer
from megatron_bamboo.agent.repairer import Repairer
from megatron_bamboo.agent.replacer import Replacer
from megatron_bamboo.agent.report import Reporter
from megatron_bamboo.agent.restorer import Restorer
from megatron_bamboo.agent.shares import log_shares
from megatron_bamboo.agent.telling import is_new
from megatron_bamboo.membership.assignment import joined_key
from megatron_bamboo.membership.decision import (
    Fenced,
    Record,
    StepDecision,
    StepReport,
    decide_step,
)
from megatron_bamboo.membership.leaving import NOTICED, REMARK
from megatron_bamboo.membership.raised import all_raised_alike, script_error
from megatron_bamboo.membership.stopping import STOP_KEY, StopWish
from megatron_bamboo.membership.table import Table
from megatron_bamboo.membership.workers import node_of
from megatron_bamboo.observe.events import Emitter
from megatron_bamboo.planner.dissolving import first_open, go_on_after
from megatron_bamboo.planner.draining import counting_records, drain
from megatron_bamboo.planner.growing import grow
from megatron_bamboo.planner.healing import heal
from megatron_bamboo.planner.links import broken_links, whom_to_fence
from megatron_bamboo.planner.missing import broken_pipelines, unsaved
from megatron_bamboo.planner.plan import Plan, initial_plan, plan_digest
from megatron_bamboo.planner.rearranging import rearrange
from megatron_bamboo.planner.repairing import Crews
from megatron_bamboo.planner.taking_over import NoHolder
from megatron_bamboo.recovery.names import PolicyName
from megatron_bamboo.schedule.redundancy import Redundancy

# A pair that no loss has touched outlives its epoch, and may be formed only when it is first used.
# The second step that passes in an epoch ran in it from beginning to end, so it used every group:
# from then on nobody needs the rendezvous keys of older epochs, what was said at their ends, nor
# their plans: all who live have followed the newest one.
STEPS_TO_FORM_GROUPS = 2

EPOCH_KEYS = ("group/", "progress/", "record/", "ending/", "plan/", AWAITED)
"""Before the number of an epoch: what belongs to it alone."""
FIRST_PLAN = "plan/0"
"""By it each node that comes, however late, sees whether it is a standby."""

LOOK_SECONDS = 0.25
"""How often the nodes' leases are looked at."""

THERE_KEY = "there"
"""Holds what was said last of who has come to a job that has not begun."""

FAILED_KEY = "failed"
"""Written by a worker whose training cannot go on anywhere: the reason in one line."""


class JobFailed(Exception):
    """The job cannot go on, for a reason other than a stage without a holder."""


class JobStopped(JobFailed):
    """The job was to end, and has."""


class NoProgress(JobFailed):
    """Nodes are lost again and again, and no step passes."""


class Coordinator:
    """Leads one job from its agents' hello, or from wherever it is, to its last worker's end."""

    def __init__(self, spec: JobSpec, table: Table, events: Emitter, reporter: Reporter) -> None:
        shape = spec.shape
        self.members = Members(
            spec.nodes,
            table,
            events,
            shape.tensor_size,
            shape.lease_seconds,
            spec.standbys,
            num_open=0 if spec.nodes else spec.num_nodes,
        )
        self._balance = shape.balance()
        self._calls = calls = Calls(self.members, table)
        self._healer = Healer(self.members, calls, self._balance)
        # Where each pipeline has a share of the optimizer's state no other one can give it.
        self._grower = Grower(self.members, calls, self._balance if shape.num_shards == 1 else None)
        self._rearranger = Rearranger(shape, self.members, calls, events, reporter)
        replacer = Replacer(self.members, calls)
        self._drainer = Drainer(self.members, replacer, table, reporter)
        # Who waits for a plan has the groups' time.
        patience = shape.group_timeout_seconds / 2
        self._repairer = Repairer(self.members, calls, patience, self._hear)
        self._records = Records(table, self.members, spec.deadlines, self._hear)
        self._failures = Failures(table)
        self._max_failures = spec.max_failures
        self._deadlines = spec.deadlines
        self._table = table
        self._events = events
        self._reporter = reporter
        self._logs = spec.job_dir / "logs"
        self._shape = shape
        # Until it is known who comes to an open job, nobody's names stand in it.
        self._plan = self._first_plan(spec.nodes or tuple(map(str, range(spec.num_nodes))))
        self._headway = Headway(shape, table, self.members, events, reporter)
        told = (table, events, reporter)
        self._restorer = Restorer(spec, self.members, calls, *told, self._headway)
        self._gatherer = Gatherer(spec, self.members, self._restorer, *told, self._hear)
        self._holder = Holder(spec, calls, self._headway, reporter)
        self._renewer = Renewer(shape, self.members, self._restorer, self._headway, events)
        self._steps_in_epoch = 0
        news = ("passed/", "record/", "saved/", "ready/", NOTICED, REMARK, FAILED_KEY, STOP_KEY)
        for prefix in (*news, EVALUATED, EVALUATION):
            table.subscribe(prefix, lambda _, __: self.members.news.set())

    async def run(self) -> None:
        """Lead the job until its training is done; NoHolder or JobFailed where that cannot be, and
        JobStopped where it is to end before."""
        try:
            await self._lead()
        except NoHolder as error:
            if all_raised_alike(error.holders, self.members.raised):
                raise self._script_error(error.holders) from error
            raise

    async def _lead(self) -> None:
        await self._begin()
        members = self.members
        while True:
            self._drainer.release(self._plan.epoch, self._headway.step)
            nodes = set(self._plan.nodes)
            lost = (nodes | self._drainer.going()) & members.lost.keys()
            done = {node for node in nodes if members.is_done(node)}
            if done and nodes <= members.finished | lost:
                break
            # Who is done has passed the last commit. With nobody else left, nothing is to decide.
            if lost and not (done and nodes <= done | lost):
                await self._change_epoch(Ending(lost))
            elif not await self._change():
                await self._await_step()
        self._look()
        for node in sorted(lost):
            line = f"lost {node} ({members.lost[node]}) after the last step"
            self._reporter.once(f"late/{node}", line)
        self._check_everything_is_saved()
        if (wish := self._wish()) is not None and self._headway.step < self._shape.train_iters:
            raise self._stopped(wish)
        with self._table.together():
            if is_new(self._table, "finished"):
                pipelines = [asdict(pipeline) for pipeline in self._plan.pipelines]
                self._events.emit("finished_job", epoch=self._plan.epoch, pipelines=pipelines)

    async def _begin(self) -> None:
        """Publish the first plan, or go on from the newest one and a decision that was begun."""
        epoch = self._table.get("epoch")
        if epoch is None:
            await self._await_agents()
            self._plan = self._first_plan(self.members.first_nodes())
            with self._table.together():
                self._publish(self._plan)
                self._headway.say_started(self._plan)
                self._holder.say()
            return
        published = self._table.get(f"plan/{int(epoch)}")
        assert published is not None, f"epoch {int(epoch)} has no plan"
        self._plan = Plan.from_json(published)
        self._renewer.found(self._plan)
        self._look()
        if (announced := self._table.get(_ending_key(self._plan.epoch))) is not None:
            await self._decide(Ending.from_json(announced))

    def errors_of(self, nodes: Sequence[str]) -> tuple[str, ...]:
        """What those of some nodes have raised that did, each with its log."""
        return tuple(self._error_of(node) for node in nodes if node in self.members.raised)

    def restart_hint(self) -> str:
        """Where a job that cannot go on may be started again from."""
        return self._headway.restart_hint()

    def _check_everything_is_saved(self) -> None:
        """A node that is lost after the last commit may have been a stage's only holder."""
        done = {node for node in self._plan.nodes if self.members.is_done(node)}
        if (lack := unsaved(self._plan, done, self._shape.num_shards > 1)) is not None:
            raise lack

    def _first_plan(self, nodes: Sequence[str]) -> Plan:
        return initial_plan(nodes, self._shape.arrangement, self._shape.redundancy)

    async def _await_agents(self) -> None:
        seconds = self._deadlines.joining_seconds
        until = time.monotonic() + seconds
        self._drainer.look_before_start()
        while missing := self.members.missing():
            self._say_who_is_there()
            if not await self._hear(until):
                raise JobFailed(f"{missing} did not start within {seconds:g} s")
            self._drainer.look_before_start()

    def _say_who_is_there(self) -> None:
        """Say of an open job that has not begun who has come and who is gone, when it changes."""
        if not self.members.is_open:
            return
        for node, cause in self.members.lost.items():
            self._reporter.once(f"early/{node}", f"lost {node} ({cause}) before the start")
        line = self.members.there()
        if line.encode() != (self._table.get(THERE_KEY) or self.members.there(()).encode()):
            with self._table.together():
                self._table.set(THERE_KEY, line.encode())
                self._reporter.note(line)

    async def _await_step(self) -> None:
        seconds = self._deadlines.stall_seconds
        until = self._headway.moved_at + seconds
        if self._holder.waits(self._plan):
            until = math.inf
        if not await self._hear(until, self._fence_at_broken_link):
            raise JobFailed(f"no iteration passed within {seconds:g} s")

    async def _hear(self, until: float, look: Callable[[], None] = lambda: None) -> bool:
        """Wait for news; whether there was any by the monotonic time ``until``.

        Args:
            look: called several times a second.
        """
        news = self.members.news
        while not news.is_set():
            if (left := until - time.monotonic()) <= 0:
                return False
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left, LOOK_SECONDS)):
                    await news.wait()
            self.members.fence_silent()
            look()
        news.clear()
        self._look()
        # Every worker finds the same and ends: no node is lost, the training has failed.
        if (reason := self._table.get(FAILED_KEY)) is not None:
            raise JobFailed(reason.decode())
        self._check_script()
        self._check_wish()
        return True

    def _wish(self) -> StopWish | None:
        """The wish that the job ends, if there is one."""
        value = self._table.get(STOP_KEY)
        return None if value is None else StopWish.from_json(value)

    def _check_wish(self) -> None:
        """JobStopped where the job is to end at once; else let it end when its step is saved."""
        wish = self._wish()
        if wish is None:
            return
        is_held = self._holder.waits(self._plan) and self._holder.may_change(self._plan)
        # Where nobody is left nobody has anything to save.
        is_waiting = self._table.get(f"{AWAITED}{self._plan.epoch}") is not None
        if not wish.saves or is_held or is_waiting or self._table.get("epoch") is None:
            raise self._stopped(wish)
        self._reporter.once(STOP_KEY, f"ends after this step ({wish.cause})")
        self.members.ask_to_end()

    def _stopped(self, wish: StopWish) -> JobStopped:
        step = f"step {self._headway.step} of {self._shape.train_iters}"
        return JobStopped(f"stopped after {step} ({wish.cause}); {self.restart_hint()}")

    def _fence_at_broken_link(self) -> None:
        """Take a node for lost where two that live do not reach each other.

        While state moves a message may have to wait until it has gone, however long.
        """
        is_moving = self._plan.change is not None
        least = self._shape.group_timeout_seconds / 2 if is_moving else 0.0
        broken = broken_links(self.members.waits.lasting(), self._plan, least)
        if broken:
            fence = whom_to_fence(broken, self._plan)
            self.members.fence(fence.node, fence.reason)

    def _check_script(self) -> None:
        """JobFailed where an error is the script's own: every other node would only repeat it."""
        raised = self.members.raised
        nodes = script_error([pipe.ranks for pipe in self._plan.pipelines], raised)
        if nodes is not None:
            raise self._script_error(nodes)

    def _script_error(self, nodes: Sequence[str]) -> JobFailed:
        others = ", ".join(nodes[1:])
        also = f", and {others} raised it too" if others else ""
        return JobFailed(f"{self._error_of(nodes[0])}{also}")

    def _error_of(self, node: str) -> str:
        log = self._logs / f"{node}.log"
        return f"{node} raised {self.members.raised[node]}; its traceback is in {log}"

    def _look(self) -> None:
        """Take in what workers have reported."""
        for report in self._headway.look():
            self._steps_in_epoch += report.epoch == self._plan.epoch
            self._rearranger.note(report)
            self._renewer.passed(report, self._plan)
            self._note_change(report)
            self._calls.give_up_late(self._plan, self._deadlines.stall_seconds)
            if self._steps_in_epoch == STEPS_TO_FORM_GROUPS:
                self._forget_older_epochs()

    def _note_change(self, report: StepReport) -> None:
        """A planned change is made when its step has passed."""
        change = self._plan.change
        if change is None or report.epoch != self._plan.epoch or report.step < change.step:
            return
        before, self._plan = self._plan, self._plan.made()
        self._say_changed(before, self._plan, change.step)

    def _say_changed(self, before: Plan, plan: Plan, step: int) -> None:
        with self._table.together():
            self._drainer.let_go(before, plan, step)
            if is_new(self._table, f"changed/{plan.epoch}"):
                pipelines = [asdict(pipeline) for pipeline in plan.pipelines]
                self._events.emit("changed", epoch=plan.epoch, step=step, pipelines=pipelines)
                self._reporter.changed(plan, step)

    def _forget_older_epochs(self) -> None:
        with self._table.together():
            for prefix in EPOCH_KEYS:
                for key in self._table.items(prefix):
                    epoch = int(key.removeprefix(prefix).partition("/")[0])
                    if epoch < self._plan.epoch and key != FIRST_PLAN:
                        self._table.delete(key)

    def _can_change(self) -> bool:
        """Whether a change can be planned now."""
        stays = self._drainer.say_they_stay
        if self._shape.redundancy == Redundancy.NONE:
            stays(self._plan, "with --bamboo-redundancy none no stage can move")
            return False
        if self._wish() is not None:
            stays(self._plan, "the job ends")
            return False
        # In the last step there is nothing left to protect.
        if self._headway.step + 1 >= self._shape.train_iters:
            stays(self._plan, "the last step is under way")
            return False
        is_between = self._steps_in_epoch > 0 or self._holder.waits(self._plan)
        may_change = is_between and self._holder.may_change(self._plan)
        return may_change and not self._headway.is_evaluating

    async def _change(self) -> bool:
        """Begin what is planned and no loss, if it is time for something; whether it was."""
        planned = await self._drain() or await self._heal() or await self._grow()
        return planned or await self._renew()

    async def _drain(self) -> bool:
        """Begin to let nodes go if some are to leave and can; whether it was so."""
        self._drainer.look(self._plan)
        if not self._can_change():
            return False
        leaving, replacing = self._drainer.due(self._plan)
        if not leaving:
            return False
        await self._change_epoch(Ending(leaving=leaving, replacing=replacing))
        return True

    async def _heal(self) -> bool:
        """Begin a planned change if it is time for one; whether it was."""
        if not self._can_change():
            return False
        standby = self._healer.standby_for(self._plan)
        if standby is None:
            if (cut := self._rearranger.due(self._plan)) is not None:
                await self._change_epoch(Ending(cut=cut))
                return True
            if self._rearranger.waits:
                return False
        if not self._healer.is_due(self._plan, standby):
            return False
        await self._change_epoch(Ending(standby=standby))
        return True

    async def _grow(self) -> bool:
        """Let a dissolved pipeline begin again if it can; whether it does."""
        is_last = self._headway.step + 1 >= self._shape.train_iters
        is_early = self._steps_in_epoch == 0 or self._headway.is_evaluating
        if self._wish() is not None or is_last or is_early:
            return False
        if not self._holder.may_change(self._plan):
            return False
        if (growth := self._grower.due(self._plan)) is None:
            return False
        await self._change_epoch(Ending(growth=growth))
        return True

    async def _renew(self) -> bool:
        """Let all begin again with those who have come if that pays; whether it does."""
        is_last = self._headway.step + 1 >= self._shape.train_iters
        if self._wish() is not None or is_last or self._steps_in_epoch == 0:
            return False
        if not (nodes := self._renewer.due(self._plan)):
            return False
        await self._change_epoch(Ending(renewing=nodes))
        return True

    async def _change_epoch(self, ending: Ending) -> None:
        """End the epoch, decide its newest step, and publish the plan that follows.

        A planned change gives way to losses that are found meanwhile.
        """
        epoch, lost, failures = self._plan.epoch, ending.lost, 0
        with self._table.together():
            if lost:
                failures = self._failures.note(self._headway.furthest)
            self._table.set(_ending_key(epoch), ending.to_json().encode())
            self._events.emit("ending", epoch=epoch, lost=sorted(lost))
        if failures > self._max_failures:
            raise self._no_progress(lost)
        await self._decide(ending)

    def _no_progress(self, lost: Set[str]) -> NoProgress:
        newest = ", ".join(f"{node} ({self.members.lost[node]})" for node in sorted(lost))
        return NoProgress(
            f"nodes were lost {self._max_failures + 1} times, more than --max-failures, since step "
            f"{self._headway.step} passed, at last {newest}: the training does not come forward; "
            f"look at the logs in {self._logs}; {self._headway.restart_hint()}"
        )

    async def _decide(self, ending: Ending) -> None:
        """Decide the newest step of an epoch whose end is announced, and publish what follows."""
        epoch, lost = self._plan.epoch, ending.lost
        survivors = [node for node in self._plan.nodes if node not in lost]
        records = await self._records.gather(epoch, survivors)
        for worker, record in records.items():
            if isinstance(record, Fenced) and node_of(worker) not in lost:
                seconds = self._records.seconds_of(worker)
                self.members.fence(node_of(worker), f"it left no record within {seconds:g} s")
                lost = lost | {node_of(worker)}
        decision, records = None, counting_records(self._plan, records)
        if any(isinstance(record, Record) for record in records.values()):
            decision = decide_step(records, self._records.confirmed(epoch))
        if ending.renewing and not lost:
            came = ", ".join(n for n in ending.renewing if n not in self._plan.nodes)
            self._begin_again(ending.renewing, f"{came} can take a place", decision)
            return
        if not lost:
            self._publish_change(ending, decision)
            return
        try:
            await self._publish_loss(lost, decision)
        except NoHolder as error:
            await self._restore(error, decision)

    async def _restore(self, error: NoHolder, decision: StepDecision | None) -> None:
        """Publish the plan by which all begin again; NoHolder where they may not, or nobody is."""
        before = self._plan
        freed = {*before.freed(decision), *self._drainer.going()}
        if self._wish() is not None:
            raise error
        self._restorer.check(before, error, self._passed_step(decision))
        nodes, why = await self._gatherer.gather(before, freed, error)
        self._begin_again(nodes, why, decision)

    def _begin_again(self, nodes: tuple[str, ...], why: str, decision: StepDecision | None) -> None:
        self._look()
        before, lost = self._plan, set(self._plan.nodes) & self.members.lost.keys()
        there = tuple(node for node in nodes if node not in self.members.lost)
        plan = self._restorer.plan(before, there, lost)
        with self._table.together():
            self._restorer.note(before, plan, why, self._passed_step(decision))
            self._publish(plan)
            if lost:
                self._reporter.lost({node: self.members.lost[node] for node in plan.lost}, plan)
            else:
                self._reporter.note(f"epoch {plan.epoch}: {plan.reason}")
            self._holder.say()
            self._drainer.dismiss(before.epoch, plan)

    def _passed_step(self, decision: StepDecision | None) -> int:
        """The newest step that has passed, or is decided to."""
        decided = 0 if decision is None else decision.step - (not decision.applied)
        return max(decided, self._headway.step)

    def _publish_change(self, ending: Ending, decision: StepDecision | None) -> None:
        # Who was asked to end may do so after any step: nothing moves in one.
        last_step = self._shape.train_iters if self._wish() is None else 0
        if ending.growth is not None and self._balance is not None:
            plan = grow(self._plan, decision, last_step, ending.growth, self._balance)
        elif ending.cut is not None and (rearranging := self._shape.rearranging()) is not None:
            plan = rearrange(self._plan, decision, last_step, ending.cut, rearranging)
        elif ending.leaving:
            leaving, replacing = ending.leaving, ending.replacing
            plan = drain(self._plan, decision, last_step, leaving, self._balance, replacing)
        else:
            plan = heal(self._plan, decision, last_step, ending.standby, self._balance)
        with self._table.together():
            self._publish(plan)
            self._reporter.planned(plan)
            self._holder.say()
            log_shares(self._events, plan, self._balance)
        if plan.let_go:
            # A standby gets ready while those who leave are still there.
            self._healer.standby_for(plan.made())

    async def _publish_loss(self, lost: Set[str], decision: StepDecision | None) -> None:
        before = self._plan
        freed = set(before.freed(decision))
        if before.change is not None and before.change.is_made(decision):
            self._say_changed(before, before.made(), before.change.step)
        plan = await self._plan_after(before, lost, decision)
        gone = set(before.nodes) - set(plan.nodes) - freed - set(plan.dismissed)
        for node in sorted(gone - self.members.lost.keys()):
            self.members.fence(node, "the step in which it was to join did not pass")
        with self._table.together():
            self._publish(plan)
            self._reporter.lost({node: self.members.lost[node] for node in plan.lost}, plan)
            self._holder.say()
            self._drainer.dismiss(before.epoch, plan)

    async def _plan_after(
        self, before: Plan, lost: Set[str], decision: StepDecision | None
    ) -> Plan:
        steps = range(self._restorer.first_step, self._shape.train_iters + 1)
        if not self._can_others_help(before, lost, decision):
            return go_on_after(before, lost, decision, steps, None)
        if decision is not None and (step := first_open(decision, steps)) not in steps:
            # Then there is nothing to repair: no work is left.
            return go_on_after(before, lost, decision, steps, self._shape.sharing())
        crews: Crews | None = {}
        if decision is not None and self._headway.must_evaluate(step - 1):
            crews = None  # before the next step it would compute with what it has not got
        elif decision is not None and self._balance is None:
            crews = await self._repairer.crews(before, lost, decision)
        return go_on_after(before, lost, decision, steps, self._balance, crews)

    def _can_others_help(self, before: Plan, lost: Set[str], decision: StepDecision | None) -> bool:
        """Whether pipelines may give another one their state, or do its work."""
        broken = broken_pipelines(before, lost, decision).values()
        # An error of the script's own would only come again.
        is_own = any(all_raised_alike(lack.holders, self.members.raised) for lack in broken)
        # Where each pipeline has a share of the optimizer's state no other one has it.
        is_whole = self._shape.num_shards == 1
        return is_whole and not is_own and self._shape.policy != PolicyName.CHECKPOINT

    def _publish(self, plan: Plan) -> None:
        plan = self._holder.hold(self._plan, plan, self._restorer.first_step)
        epoch = plan.epoch
        published = plan.to_json().encode()
        values = {f"plan/{epoch}": published, "epoch": str(epoch).encode()}
        values |= {joined_key(node): str(epoch).encode() for node in self._joining(plan)}
        with self._table.together():
            self._table.set_all(values)
            self._events.emit(
                "plan",
                epoch=epoch,
                digest=plan_digest(published),
                lost=plan.lost,
                reason=plan.reason,
                redone=plan.redone,
                redoing=plan.redoing,
                pipelines=[asdict(pipeline) for pipeline in plan.pipelines],
                restored=None if plan.restored is None else plan.restored.step,
            )
            if plan.decision is not None:
                decision = plan.decision
                self._events.emit(
                    "decision", epoch=epoch, step=decision.step, applied=decision.applied,
                    reason=decision.reason,
                )  # fmt: skip
        self._plan = plan
        self._steps_in_epoch = 0
        self._headway.moved()
        self._renewer.published(plan)
        # Under a new plan every worker begins to wait anew.
        self.members.waits.clear()

    def _joining(self, plan: Plan) -> set[str]:
        """The standbys that a plan names for the first time."""
        return set(plan.nodes) & set(self.members.waiting_standbys()) - set(self._plan.nodes)


def _ending_key(epoch: int) -> str:
    return f"ending/{epoch}"
