"""Which deaths of coordinators are still to come, of those that a job was given.

Coordinators die of other things, too, so what struck is told by what the dying said.
"""

from megatron_bamboo.agent.job import JobSpec, WriteFault
from megatron_bamboo.observe.events import read_events


def remaining_write_faults(spec: JobSpec) -> tuple[WriteFault, ...]:
    """Those that no coordinator has died of yet; each strikes after the one before it."""
    if not spec.write_faults:
        return ()
    events = read_events(spec.job_dir / "events")
    return spec.write_faults[sum(event["event"] == "coordinator_kill" for event in events) :]
