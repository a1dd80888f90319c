"""Whether this machine lets the processes of a job have what they need: checked before they start.

Each member of a group of processes has a connection to every other one, and the commit is a group
of all workers; the coordinator has connections of all nodes. With a limit of 1,024 open files, as
many machines have it, a job of some hundred nodes would fail at its first loss, when the groups of
two epochs are there at once.
"""

import os
import resource
from pathlib import Path

from megatron_bamboo.agent.job import JobShape
from megatron_bamboo.errors import UserError
from megatron_bamboo.membership.gate import MOST_WAITING

GROUP_DESCRIPTORS = 4
"""Of a group over gloo, beside its connections: its listener, and what its thread waits by."""
WORKER_DESCRIPTORS = 96
"""Of a worker without groups: logs, data, the store, what libraries open."""
COORDINATOR_DESCRIPTORS = 64
NUM_PAIRS = 8
"""Neighbours of a worker that runs two stages, sends state, and shadows a third."""
AGENT_CONNECTIONS = 2
"""Where it has made another one, the old one may not have ended."""
WORKER_CONNECTIONS = 6
"""Of each thread that asks something, and of each group that is being made."""
INFINIBAND = Path("/sys/class/infiniband")
GPU = Path("/dev/nvidiactl")


def worker_descriptors(shape: JobShape) -> int:
    """The open files that one of a job's workers needs at most, beside its node's others.

    Counted is one that runs a stage more than its own, while the groups of an epoch are made and
    those of the last one end.
    """
    arrangement = shape.arrangement
    size, num_pipelines = shape.tensor_size, len(arrangement.pipelines)
    places = arrangement.places()
    most = max(len({place for place in places if place[p] == s}) for p, s in _stages(shape))
    groups = [arrangement.num_nodes * size, size, max(p.num_stages for p in arrangement.pipelines)]
    groups += [num_pipelines] * (2 * most) + [2] * NUM_PAIRS
    if shape.num_shards > 1:
        groups += [2 * num_pipelines] * (3 * most)
    in_groups = sum(members - 1 + GROUP_DESCRIPTORS for members in groups if members > 1)
    return WORKER_DESCRIPTORS + 2 * in_groups


def coordinator_descriptors(shape: JobShape) -> int:
    """The open files that a job's coordinator needs at most, without standbys."""
    connections = AGENT_CONNECTIONS + WORKER_CONNECTIONS * shape.tensor_size
    return COORDINATOR_DESCRIPTORS + MOST_WAITING + shape.arrangement.num_nodes * connections


def allow_descriptors(needed: int, who: str) -> None:
    """Let this process and all that it will start have so many open files, and as many again if
    that can be.

    Raises:
        UserError: the machine's hard limit is below.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    ample = 2 * needed if hard == resource.RLIM_INFINITY else min(hard, 2 * needed)
    if ample < needed:
        raise UserError(
            f"{who} of this job needs up to {needed} open files, and this machine lets a process "
            f"have {hard}: raise the hard limit there (ulimit -Hn {needed}, or LimitNOFILE= of the "
            "service that starts it), or use fewer nodes"
        )
    if soft != resource.RLIM_INFINITY and soft < ample:
        resource.setrlimit(resource.RLIMIT_NOFILE, (ample, hard))


def allow_locked_memory(infiniband: Path = INFINIBAND, gpu: Path = GPU) -> str | None:
    """Let this process and all that it will start lock as much memory as can be; a warning where
    NCCL would want more, None otherwise.

    On other networks, and on processors, nobody locks any.
    """
    has_adapters = infiniband.is_dir() and any(infiniband.iterdir())
    if not (has_adapters and gpu.exists()) or os.environ.get("NCCL_IB_DISABLE") == "1":
        return None
    _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))
    if hard == resource.RLIM_INFINITY:
        return None
    return (
        f"warning: over InfiniBand NCCL locks memory, and this machine lets a process lock "
        f"{hard >> 10} KiB: raise it (ulimit -l unlimited), or set NCCL_IB_DISABLE=1"
    )


def _stages(shape: JobShape) -> list[tuple[int, int]]:
    """Each pipeline and stage."""
    pipelines = enumerate(shape.arrangement.pipelines)
    return [(number, stage) for number, p in pipelines for stage in range(p.num_stages)]
