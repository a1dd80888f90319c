"""What the forked process of a writer does: write, publish if it is the lead, and end.

``dist_checkpointing.save`` is a collective of the default group, with gloo calls that nothing can
end. So it runs in a process of its own, which can be killed at any moment, and which has the state
as it was when it was forked. It touches nothing of its parent's: its connections are new, inherited
descriptors are closed, and no inherited object is ever destroyed, since threads that some
destructors wait for did not survive the fork. That is why it neither collects garbage nor returns.
"""

import gc
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

import torch.distributed as dist
from megatron.core import dist_checkpointing

from megatron_bamboo.checkpoint.folder import make_partial, publish, remove
from megatron_bamboo.checkpoint.moments import SaveMoment
from megatron_bamboo.checkpoint.strategy import PlainSaveStrategy
from megatron_bamboo.membership.keys import Credential
from megatron_bamboo.membership.store_client import StoreClient
from megatron_bamboo.membership.torch_store import BambooStore

Before = Callable[[SaveMoment], None]


@dataclass(frozen=True, slots=True)
class Task:
    """One writer's part of one attempt."""

    root: Path
    step: int
    epoch: int
    rank: int
    num_writers: int
    store: str
    credential: Credential
    seconds: float

    @property
    def is_lead(self) -> bool:
        """Whether this writer makes the folder and publishes it."""
        return self.rank == 0

    @property
    def prefix(self) -> str:
        """Of the store's keys of this attempt; forgotten with those of the epoch's groups."""
        return f"group/{self.epoch}/save/{self.step}/"


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a writing process failed.

    ``by_peer``: it lost another writer, whose own failure, or whose node's loss, is the reason.
    """

    reason: str
    by_peer: bool

    @classmethod
    def of(cls, error: BaseException) -> Self:
        """In one line, without the traces that torch collects from all writers."""
        notes = getattr(error, "__notes__", [])
        failures = getattr(error, "failures", None)  # torch's CheckpointException, by rank
        if failures:
            error = next(iter(failures.values()))[0]
        first_line = next(iter(str(error).splitlines()), "")
        reason = "; ".join([f"{type(error).__name__}: {first_line}", *notes])
        # gloo raises RuntimeError alone, the store these types of OSError.
        kinds = (RuntimeError, ConnectionError, TimeoutError)
        return cls(reason, by_peer=not failures and isinstance(error, kinds))


def write(task: Task, state: dict[str, Any], before: Before) -> None:
    """Write this writer's part together with the others; the lead publishes."""
    gc.disable()
    store = BambooStore(
        StoreClient(task.store, task.seconds, task.credential), task.prefix, task.seconds
    )
    if task.is_lead:
        store.set("folder", str(make_partial(task.root, task.step, task.epoch)))
    folder = Path(store.get("folder").decode())
    _make_default_group(store, task)
    try:
        dist_checkpointing.save(
            state,
            str(folder),
            sharded_strategy=PlainSaveStrategy(lambda: before(SaveMoment.WRITE)),
        )
        if task.is_lead:
            publish(folder, task.root, task.step, before)
    except BaseException as error:
        # torch's words for a full disk do not say so.
        error.add_note(f"{shutil.disk_usage(task.root).free // 2**20} MiB are free there")
        if task.is_lead:
            remove(folder)
        raise


def _make_default_group(store: BambooStore, task: Task) -> None:
    """Replace the default group of one, which belongs to the parent, by that of all writers."""
    dist.distributed_c10d.GroupMember.WORLD = None
    dist.init_process_group(
        "gloo",
        store=store,
        rank=task.rank,
        world_size=task.num_writers,
        timeout=timedelta(seconds=task.seconds),
    )
