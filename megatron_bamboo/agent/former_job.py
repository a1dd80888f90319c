"""What a job folder says of the job that was in it, to who would begin another one there."""

from pathlib import Path

from megatron_bamboo.agent.outcome import OUTCOME_FILE, Outcome
from megatron_bamboo.agent.telling import LOSSES_FILE
from megatron_bamboo.errors import UserError
from megatron_bamboo.observe.events import read_events

TRACES = (LOSSES_FILE, "events", "logs", "state", OUTCOME_FILE)


def check_is_new(job_dir: Path, others: str = "another --job-dir") -> None:
    """UserError if there was a job in this folder; a job file alone was left by options that were
    refused.

    Args:
        others: what to give instead.
    """
    if not any((job_dir / name).exists() for name in TRACES):
        return
    outcome = Outcome.read(job_dir)
    if outcome is None:
        raise UserError(f"{job_dir} already holds a run: give {others}")
    end = f"status {outcome.status:d}, {outcome.status.name.lower().replace('_', ' ')}"
    raise UserError(
        f"{job_dir} already holds a job, which has ended ({end}): give {others}; {_hint(job_dir)}"
    )


def _hint(job_dir: Path) -> str:
    """What can be made of what the job has left."""
    events = read_events(job_dir / "events")
    saves = [e for e in events if e["event"] == "checkpoint" and e["failure"] is None]
    if saves:
        newest = max(saves, key=lambda event: event["step"])
        return f"with --load {newest['folder']} it goes on after step {newest['step']}"
    losses = job_dir / LOSSES_FILE
    if losses.exists() and losses.stat().st_size:
        return "there is no checkpoint of it to go on from"
    return "nothing was trained in this one, so that it may as well be removed"
