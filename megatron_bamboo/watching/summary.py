"""From what a job's store holds to the job's status: a pure function of what was seen."""

import json
import statistics
from dataclasses import replace

from megatron_bamboo.agent.gatherer import AWAITED
from megatron_bamboo.agent.job import JobShape
from megatron_bamboo.agent.outcome import Outcome, Status
from megatron_bamboo.agent.report import REPORTED_KEY
from megatron_bamboo.membership.assignment import called_key
from megatron_bamboo.membership.decision import StepReport
from megatron_bamboo.membership.leaving import DRAINED, GOING, NOTICED, Notice
from megatron_bamboo.membership.workers import workers_of
from megatron_bamboo.planner.draining import place_of
from megatron_bamboo.planner.healing import Vacancy, vacancies
from megatron_bamboo.planner.missing import missing_stages
from megatron_bamboo.planner.plan import Plan, Transfer
from megatron_bamboo.watching.history import History
from megatron_bamboo.watching.status import (
    AwaitedStatus,
    CoordinatorStatus,
    JobStatus,
    LeavingStatus,
    Phase,
    Progress,
    StageStatus,
    StandbyStatus,
    Totals,
)
from megatron_bamboo.watching.store_view import RECENT_STEPS, StoreView

GONE_SECONDS = 60.0
"""A dead coordinator is followed by another long before, where there is a launcher."""


_ENDINGS = {
    Status.FINISHED: "finished",
    Status.FAILED: "failed",
    Status.USER_ERROR: "refused",
    Status.NO_HOLDER: "ended with a stage that no live node holds",
    Status.INJECTION_NOT_REACHED: "finished without an injected fault",
    Status.NO_PROGRESS: "ended since it lost nodes and did not come forward",
    Status.STOPPED: "ended as it was asked to",
    Status.INTERRUPTED: "interrupted",
}


def status_of(view: StoreView) -> JobStatus:
    """The status that a look into the store comes to."""
    plan, history = _plan(view), view.history
    return JobStatus(
        folder=view.folder,
        phase=_phase(view, plan),
        ending=None if view.outcome is None else _ending(view.outcome),
        progress=_progress(view),
        epoch=None if plan is None else plan.epoch,
        coordinator=_coordinator(view),
        pipelines=() if plan is None else _pipelines(plan, history, view.shape),
        nodes=() if plan is None else tuple(n for n in plan.nodes if n not in _lost(view)),
        awaited=None if plan is None else _awaited(view, plan),
        standbys=() if plan is None else _standbys(view, plan),
        leaving=_leaving(view),
        totals=Totals(
            history.takeovers,
            history.changes,
            history.restores,
            history.undone_steps,
            history.undone_samples,
            history.losses,
            history.drained,
            history.returned,
            history.saves,
            history.failed_saves,
        ),
        lines=history.lines,
    )


def _plan(view: StoreView) -> Plan | None:
    """The plan in force, with its change if that was made; None before the first."""
    epoch = view.keys.get("epoch")
    if epoch is None:
        return None
    plan = Plan.from_json(view.keys[f"plan/{int(epoch)}"])
    return plan.made() if plan.change and view.history.changed_epoch == plan.epoch else plan


def _phase(view: StoreView, plan: Plan | None) -> Phase:
    if view.outcome is not None:
        return Phase.ENDED
    if view.leader is None:
        return Phase.STARTING
    # After a restart of the machine the last sign of life lies in the future.
    is_old = not 0 <= view.silent_seconds <= GONE_SECONDS
    if not view.leader_is_there and (view.address is None or is_old):
        return Phase.ABANDONED
    if not view.leader_leads:
        return Phase.LEADERLESS
    if plan is None:
        return Phase.STARTING
    return Phase.RUNNING if _awaited(view, plan) is None else Phase.WAITING


def _ending(outcome: Outcome) -> str:
    word = _ENDINGS[outcome.status]
    return f"{word}: {outcome.message}" if outcome.message else word


def _progress(view: StoreView) -> Progress:
    progress, evaluated = _training_progress(view), view.history.validation
    if evaluated is None:
        return progress
    _, loss = evaluated.main
    return replace(progress, validation_loss=loss, validation_step=evaluated.step)


def _training_progress(view: StoreView) -> Progress:
    shape, saved = view.shape, view.history.saved_step
    reported = view.keys.get(REPORTED_KEY)
    step = shape.start_step if reported is None else int(reported)
    reports = _recent_reports(view, step)
    if not reports:
        samples = step * shape.global_batch_size
        return Progress(step, shape.train_iters, samples, saved)
    newest = reports[-1]
    norm = None if newest.grad_norm is None else float.fromhex(newest.grad_norm)
    return Progress(
        step,
        shape.train_iters,
        newest.samples,
        saved,
        loss=float.fromhex(newest.loss),
        learning_rate=newest.lr,
        gradient_norm=norm,
        step_seconds=newest.seconds,
        median_step_seconds=statistics.median(report.seconds for report in reports),
    )


def _recent_reports(view: StoreView, newest: int) -> list[StepReport]:
    keys = (f"passed/{step}" for step in range(newest - RECENT_STEPS + 1, newest + 1))
    return [StepReport.from_json(view.keys[key]) for key in keys if key in view.keys]


def _coordinator(view: StoreView) -> CoordinatorStatus | None:
    leader = view.leader
    if leader is None:
        return None
    address = None if view.address is None else str(view.address)
    return CoordinatorStatus(
        leader.generation, leader.pid, view.leader_leads, view.silent_seconds, address
    )


def _pipelines(
    plan: Plan, history: History, shape: JobShape
) -> tuple[tuple[StageStatus, ...], ...]:
    lost = {loss.node for loss in history.losses}
    missing = missing_stages(plan, lost, None)
    return tuple(
        tuple(
            StageStatus(
                *_live_first(node, shadow, lost),
                max(protection.since_step, shape.start_step),
                protection.since_unix,
                _planned(plan, number, stage),
                (number, stage) not in missing,
            )
            for stage, (node, shadow, protection) in enumerate(
                zip(pipeline.stages, pipeline.replicas, history.protection[number], strict=True)
            )
        )
        for number, pipeline in enumerate(plan.pipelines)
    )


def _live_first(node: str, shadow: str | None, lost: set[str]) -> tuple[str, str | None]:
    """Who holds a stage: where a loss has come after the newest plan, as with the one that ends a
    job, it is the other one alone."""
    live = [holder for holder in (node, shadow) if holder is not None and holder not in lost]
    return (live[0], None if len(live) < 2 else live[1]) if live else (node, shadow)


def _planned(plan: Plan, number: int, stage: int) -> tuple[str, ...]:
    change = plan.change
    if change is None:
        return ()
    if number in change.recut:
        return (f"is cut anew after step {change.step}",)
    return tuple(
        f"{transfer.target} {_role(plan, transfer)} after step {change.step}"
        for transfer in change.transfers
        if (transfer.pipeline, transfer.stage) == (number, stage)
    )


def _role(plan: Plan, transfer: Transfer) -> str:
    assert plan.change is not None
    runs = plan.change.pipelines[transfer.pipeline].stages[transfer.stage]
    return "runs it" if runs == transfer.target else "shadows it"


def _standbys(view: StoreView, plan: Plan) -> tuple[StandbyStatus, ...]:
    """Those that have joined, train nothing, were not lost and do not leave."""
    busy = {*plan.nodes, *view.under(GOING), *_gone(view)}
    joined = view.under("agent/")
    return tuple(_standby(view, plan, node) for node in joined if node not in busy)


def _awaited(view: StoreView, plan: Plan) -> AwaitedStatus | None:
    """What the job waits for, if it does so since the plan's epoch has ended."""
    value = view.keys.get(f"{AWAITED}{plan.epoch}")
    if value is None or view.outcome is not None:
        return None
    there = tuple(standby.node for standby in _standbys(view, plan))
    return AwaitedStatus(there, **json.loads(value))


def _lost(view: StoreView) -> set[str]:
    return {loss.node for loss in view.history.losses}


def _gone(view: StoreView) -> set[str]:
    """The nodes that have ended, however."""
    return _lost(view) | {*view.under("finished/"), *view.under(DRAINED)}


def _leaving(view: StoreView) -> tuple[LeavingStatus, ...]:
    gone, joined = _gone(view), view.under("agent/")
    notices = {node: Notice.from_json(text) for node, text in view.under(NOTICED).items()}
    return tuple(
        LeavingStatus(node, str(notice))
        for node, notice in notices.items()
        if node in joined and node not in gone and not notice.is_over
    )


def _places_of_leaving(view: StoreView, plan: Plan) -> list[Vacancy]:
    running = {node for pipeline in plan.pipelines for node in pipeline.stages}
    return [place_of(plan, leaving.node) for leaving in _leaving(view) if leaving.node in running]


def _standby(view: StoreView, plan: Plan, node: str) -> StandbyStatus:
    called = view.keys.get(called_key(node))
    if called is None:
        return StandbyStatus(node)
    place = json.loads(called)
    vacancy = Vacancy(place["pipeline"], place["rank"])
    if vacancy not in (*vacancies(plan), *_places_of_leaving(view, plan)):
        return StandbyStatus(node)
    workers = workers_of((node,), view.shape.tensor_size)
    is_ready = all(f"ready/{worker}" in view.keys for worker in workers)
    return StandbyStatus(node, vacancy.pipeline, vacancy.rank, is_ready)
