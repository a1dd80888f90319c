"""Leaves in the event log by which numbers the batch was shared out, or left as it is."""

from dataclasses import asdict

from megatron_bamboo.observe.events import Emitter
from megatron_bamboo.planner.plan import Plan
from megatron_bamboo.planner.rebalancing import Balance


def log_shares(events: Emitter, plan: Plan, balance: Balance | None) -> None:
    """Of a plan that changes something: each pipeline's microbatches and what they take."""
    if balance is None or plan.change is None:
        return
    after = plan.change.pipelines
    events.emit(
        "shares",
        epoch=plan.epoch,
        step=plan.change.step,
        before=plan.arrangement.microbatches,
        after=[pipeline.shape.num_microbatches for pipeline in after],
        paces=[asdict(balance.pace(pipeline)) for pipeline in after if pipeline.stages],
        reason=plan.reason,
    )
