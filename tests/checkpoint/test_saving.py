"""Writers and others in one save: all learn the same outcome, whatever becomes of a writer [6].

Each worker is a thread here; its writing process, the store and the files are the real ones.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing import ShardedTensor
from saved_tensors import tensors_of
from server_thread import credential, store_client

from megatron_bamboo.checkpoint.folder import TRACKER, read_tracker
from megatron_bamboo.checkpoint.moments import BeforeMoment, SaveMoment
from megatron_bamboo.checkpoint.saving import Saved, Saver, SaverParts
from megatron_bamboo.planner.arrangement import equal_pipelines
from megatron_bamboo.planner.plan import Plan, initial_plan
from megatron_bamboo.planner.taking_over import plan_after_loss

LEAD, OTHER, NO_WRITER = "node0", "node3", "node1"
STEP = 5
PLAN = initial_plan(["node0", "node1", "node2", "node3"], equal_pipelines(2, 2, 4), "lazy")
Hooks = dict[str, Callable[[SaveMoment], None]]


class Follower:
    """The plan in force, and one that may come."""

    def __init__(self) -> None:
        self.plans = [PLAN]
        self._seen = 1

    def follow_plans(self) -> Plan:
        self._seen = len(self.plans)
        return self.plans[-1]

    def has_pending_plan(self) -> bool:
        return len(self.plans) > self._seen


class Workers:
    """The workers of a job at a step boundary."""

    def __init__(self, address: str, root: Path) -> None:
        self._address = address
        self.root = root
        self.followers = {node: Follower() for node in PLAN.nodes}
        self.outcomes: dict[str, Saved] = {}
        self._threads: list[threading.Thread] = []

    def start(self, hooks: Hooks, seconds: float = 30.0) -> None:
        for node in PLAN.nodes:
            thread = threading.Thread(target=self._save, args=(node, hooks.get(node), seconds))
            self._threads.append(thread)
            thread.start()

    def finish(self) -> Saved:
        """The outcome, which is the same for all."""
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()
        assert len(set(self.outcomes.values())) == 1, self.outcomes
        return next(iter(self.outcomes.values()))

    def announce(self, plan: Plan) -> None:
        for follower in self.followers.values():
            follower.plans.append(plan)

    def _save(self, node: str, hook: Callable[[SaveMoment], None] | None, seconds: float) -> None:
        client = store_client(self._address, 10.0, node)
        parts = SaverParts(
            root=self.root,
            worker=node,
            tensor_size=1,
            client=client,
            store=self._address,
            credential=credential(node),
            attempt_seconds=seconds,
            sharded=False,
            state_of=_state_of,
            make_before=lambda: _before(hook),
        )
        self.outcomes[node] = Saver(parts).save(STEP, self.followers[node])
        client.close()


def _state_of(step: int, stages: Any, shares: Any) -> dict[str, Any]:
    parts = {
        f"stage{stage}": ShardedTensor.from_rank_offsets(
            "x", torch.full((3,), float(step + stage)), (0, stage, 2)
        )
        for stage in stages
    }
    return {"iteration": step, **parts}


def _before(hook: Callable[[SaveMoment], None] | None) -> BeforeMoment:
    return lambda moment, step: hook(moment) if hook else None


def at(moment: SaveMoment, action: Callable[[], object]) -> Callable[[SaveMoment], None]:
    return lambda reached: action() if reached is moment else None


def fail() -> None:
    raise OSError(28, "No space left on device")


@pytest.fixture
def workers(server: Any, process: None, tmp_path: Path) -> Workers:
    return Workers(server.address, tmp_path / "save")


def check_saved(workers: Workers) -> None:
    assert sorted(os.listdir(workers.root)) == ["iter_0000005", TRACKER]
    saved = tensors_of(workers.root / "iter_0000005")
    assert saved["x"].tolist() == [5.0] * 3 + [6.0] * 3


def test_all_learn_that_it_is_saved(workers: Workers) -> None:
    workers.start({})
    saved = workers.finish()
    assert (saved.step, saved.epoch, saved.folder, saved.failure) == (5, 0, str(workers.root), None)
    check_saved(workers)


@pytest.mark.parametrize("node", [LEAD, OTHER])
def test_a_full_disk_fails_for_all_alike_and_leaves_nothing(workers: Workers, node: str) -> None:
    workers.start({node: at(SaveMoment.WRITE, fail)})
    failure = workers.finish().failure
    assert (
        failure is not None and "No space left on device" in failure and "MiB are free" in failure
    )
    assert os.listdir(workers.root) == []


def test_a_folder_that_cannot_be_made_fails_for_all_alike(workers: Workers) -> None:
    workers.root.touch()
    workers.start({})
    assert "File exists" in str(workers.finish().failure)


@pytest.mark.parametrize("node", [LEAD, OTHER])
def test_a_writing_process_that_dies_alone_fails_for_all_alike(workers: Workers, node: str) -> None:
    kill = at(SaveMoment.WRITE, lambda: os.kill(os.getpid(), signal.SIGKILL))
    workers.start({node: kill})
    assert "the writing process ended with status -9" in str(workers.finish().failure)
    assert read_tracker(workers.root) is None


def test_a_writing_process_that_hangs_is_ended_at_the_deadline(workers: Workers) -> None:
    workers.start({OTHER: at(SaveMoment.WRITE, lambda: time.sleep(60))}, seconds=2.0)
    assert workers.finish().failure == "it was not done in 2 s"
    assert read_tracker(workers.root) is None


@pytest.mark.parametrize("moment", [SaveMoment.WRITE, SaveMoment.RENAME, SaveMoment.TRACK])
def test_a_new_plan_begins_the_attempt_anew(workers: Workers, moment: SaveMoment) -> None:
    """The lead's writing process hangs; then its node is said to be lost, though it still runs."""
    reached = workers.root.with_name("reached")

    def hang() -> None:
        reached.touch()
        time.sleep(60)

    workers.start({LEAD: at(moment, hang)})
    until = time.monotonic() + 30
    while not reached.exists():
        assert time.monotonic() < until
        time.sleep(0.01)
    workers.announce(plan_after_loss(PLAN, {LEAD}, None))
    saved = workers.finish()
    assert (saved.epoch, saved.failure) == (1, None)
    check_saved(workers)
