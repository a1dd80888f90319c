"""Groups for a script's own collectives: of its pipeline, and of its data-parallel peers.

The executor needs none of them. They are made only for a loop that asks for them, anew for each
plan, between two steps: all who have passed the same commit in the same epoch come to make them,
in one order, and if a loss comes first the end of that epoch releases whoever waits.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron_bamboo.execution.errors import PeerLost
from megatron_bamboo.execution.groups import Group
from megatron_bamboo.execution.local_groups import with_backend
from megatron_bamboo.execution.registry import GroupRegistry, primary_group
from megatron_bamboo.planner.plan import Plan


@dataclass(frozen=True, slots=True)
class ScriptGroups:
    """The groups that a worker is in under a plan, for collectives of its script."""

    tensor: ProcessGroup
    """Those who share its layers."""
    pipeline: ProcessGroup
    """Those who run its pipeline, in the order of their first stages."""
    data: tuple[ProcessGroup, ...]
    """Those who run the same units, in the order of the pipelines: one group for each different
    list of them, in the order of the units. More than one has who runs several stages, or stages
    that other pipelines cut otherwise; in a collective of all each has to take part."""


def make_script_groups(
    registry: GroupRegistry, plan: Plan, worker: str, step: int, tensor: ProcessGroup
) -> ScriptGroups | None:
    """The groups under a plan; None if the plan's epoch ends before they are made.

    Args:
        step: the one that all members have just passed.
        tensor: those who share layers with this worker.
    """
    number = plan.pipeline_of(worker)
    pipeline = plan.pipelines[number]
    members = tuple(dict.fromkeys(pipeline.stages))
    name = f"script/{step}/pipeline{number}"
    if len(members) > 1:
        registry.add(name, members, plan.epoch)
    try:
        data = [registry.get(primary_group(stages)) for stages in _places(plan, number, worker)]
        whole = registry.get(name)
    except PeerLost:
        return None
    peers = tuple(_as_process_group(group, worker) for group in data)
    return ScriptGroups(tensor, _as_process_group(whole, worker), peers)


def _places(plan: Plan, number: int, worker: str) -> Iterator[tuple[int, ...]]:
    """By pipeline the stages of some units, of all units that a worker runs, in their order."""
    for stages in plan.arrangement.places():
        if plan.pipelines[number].stages[stages[number]] == worker:
            yield stages


def _as_process_group(group: Group | None, worker: str) -> ProcessGroup:
    """What torch's functions take; a worker that is alone has the group of its process."""
    if group is None:
        assert dist.group.WORLD is not None
        return dist.group.WORLD
    members = group.members
    return with_backend(group.backend, dist.HashStore(), members.index(worker), len(members))
