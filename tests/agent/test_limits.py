"""What a job's processes need of their machine, and what happens where they do not get it."""

import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from launching import SCRIPT, WAIT_SECONDS

from megatron_bamboo.agent.job import JobShape
from megatron_bamboo.agent.limits import (
    GROUP_DESCRIPTORS,
    WORKER_DESCRIPTORS,
    allow_descriptors,
    allow_locked_memory,
    coordinator_descriptors,
    worker_descriptors,
)
from megatron_bamboo.errors import UserError
from megatron_bamboo.execution.registry import memberships
from megatron_bamboo.planner.arrangement import equal_pipelines
from megatron_bamboo.planner.plan import Plan, initial_plan
from megatron_bamboo.planner.taking_over import plan_after_loss

SHAPE = JobShape(equal_pipelines(4, 3, 4), "lazy", train_iters=5, global_batch_size=4)
UNLIMITED = resource.RLIM_INFINITY


def descriptors_of_groups(plan: Plan, worker: str, shape: JobShape) -> int:
    """Of all groups that a worker is in under a plan."""
    groups = memberships(
        plan.for_tensor_rank(0, shape.tensor_size),
        worker,
        True,
        shape.tensor_size,
        shape.num_shards > 1,
    )
    return sum(len(members) - 1 + GROUP_DESCRIPTORS for members in groups.values())


@pytest.mark.parametrize("sizes", [(4, 3, 1), (2, 8, 1), (8, 1, 2), (3, 40, 8)])
@pytest.mark.parametrize("sharded", [False, True], ids=["", "sharded"])
def test_what_is_counted_holds_the_groups_before_and_after_a_loss(
    sizes: tuple[int, int, int], sharded: bool
) -> None:
    num_stages, num_pipelines, size = sizes
    arrangement = equal_pipelines(num_stages, num_pipelines, 4)
    shards = num_pipelines if sharded else 1
    shape = replace(SHAPE, arrangement=arrangement, tensor_size=size, num_shards=shards)
    nodes = [f"node{number}" for number in range(arrangement.num_nodes)]
    before = initial_plan(nodes, arrangement, "lazy")
    after = plan_after_loss(before, {"node1"}, None)
    worker = "node0" if size == 1 else "node0:0"
    counted = worker_descriptors(shape) - WORKER_DESCRIPTORS
    both = [descriptors_of_groups(plan, worker, shape) for plan in (before, after)]
    assert sum(both) <= counted <= 2 * sum(both) + 200


def test_a_job_of_a_thousand_nodes_needs_more_than_most_machines_allow_at_first() -> None:
    shape = replace(SHAPE, arrangement=equal_pipelines(8, 125, 4))
    assert 2 * 1000 < worker_descriptors(shape) < 4096
    assert 8 * 1000 < coordinator_descriptors(shape) < 10_000


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> dict[int, tuple[int, int]]:
    """The limits of a process that is not this one."""
    known = {resource.RLIMIT_NOFILE: (1024, 4096), resource.RLIMIT_MEMLOCK: (64 << 10, 8 << 20)}
    monkeypatch.setattr(resource, "getrlimit", known.__getitem__)
    monkeypatch.setattr(resource, "setrlimit", known.__setitem__)
    return known


@pytest.mark.parametrize(
    ("known", "needed", "then"),
    [
        ((1024, 4096), 300, 1024),
        ((1024, 4096), 600, 1200),
        ((1024, 4096), 3000, 4096),
        ((1024, UNLIMITED), 3000, 6000),
        ((UNLIMITED, UNLIMITED), 3000, UNLIMITED),
    ],
)
def test_the_limit_is_raised_as_far_as_it_is_needed_and_can_be(
    limits: dict[int, tuple[int, int]], known: tuple[int, int], needed: int, then: int
) -> None:
    limits[resource.RLIMIT_NOFILE] = known
    allow_descriptors(needed, "a worker")
    assert limits[resource.RLIMIT_NOFILE] == (then, known[1])


def test_a_hard_limit_below_the_need_is_one_line(limits: dict[int, tuple[int, int]]) -> None:
    line = r"a worker of this job needs up to 5000 open files, .* a process have 4096: raise"
    with pytest.raises(UserError, match=line):
        allow_descriptors(5000, "a worker")
    assert limits[resource.RLIMIT_NOFILE] == (1024, 4096)


def test_locked_memory_matters_with_gpus_on_infiniband_alone(
    limits: dict[int, tuple[int, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NCCL_IB_DISABLE", raising=False)
    adapters, gpu = tmp_path / "infiniband", tmp_path / "nvidiactl"
    assert allow_locked_memory(adapters, gpu) is None
    (adapters / "mlx5_0").mkdir(parents=True)
    assert allow_locked_memory(adapters, gpu) is None
    assert limits[resource.RLIMIT_MEMLOCK] == (64 << 10, 8 << 20)
    gpu.touch()
    warning = allow_locked_memory(adapters, gpu)
    assert warning is not None and "lets a process lock 8192 KiB" in warning
    assert limits[resource.RLIMIT_MEMLOCK] == (8 << 20, 8 << 20)
    limits[resource.RLIMIT_MEMLOCK] = (64 << 10, UNLIMITED)
    assert allow_locked_memory(adapters, gpu) is None
    assert limits[resource.RLIMIT_MEMLOCK] == (UNLIMITED, UNLIMITED)
    limits[resource.RLIMIT_MEMLOCK] = (64 << 10, 64 << 10)
    monkeypatch.setenv("NCCL_IB_DISABLE", "1")
    assert allow_locked_memory(adapters, gpu) is None


@pytest.mark.multiprocess
def test_a_job_on_a_machine_with_too_low_a_limit_is_refused_before_any_node_starts(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-m", "megatron_bamboo", "run", "--nodes", "3"]
    ended = subprocess.run(
        [*command, "--job-dir", str(tmp_path), str(SCRIPT)],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100)),
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
    )
    assert ended.returncode == 2 and not (tmp_path / "logs").exists()
    assert ended.stderr.startswith("bamboo run: the coordinator of this job needs up to ")
    assert ended.stderr.count("\n") == 1
