"""A step that is begun anew takes its microbatches from the first one on."""

from typing import Any

import pytest

from megatron_bamboo.config import ReplicaMemory
from megatron_bamboo.execution.compute import Compute
from megatron_bamboo.execution.mailbox import Mailbox
from megatron_bamboo.model.randomness import DropoutSeeds
from megatron_bamboo.planner.arrangement import equal_pipelines


def compute() -> Compute:
    return Compute({}, DropoutSeeds(1, 0), Mailbox(), ReplicaMemory.DEVICE)


def nothing(*_: Any) -> Any:
    raise AssertionError("no forward is run here")


def test_what_gives_its_microbatches_once_is_refused_where_they_are_needed_again() -> None:
    """Read on, it would give a forward another one's samples."""
    arrangement, once = equal_pipelines(2, 2, 2, 4), compute()
    once.start_step(iter([1, 2]), nothing, arrangement, 0)
    with pytest.raises(ValueError, match="as it is"):
        once.start_again(arrangement, 0)


def test_a_list_is_gone_through_again() -> None:
    arrangement, again = equal_pipelines(2, 2, 2, 4), compute()
    again.start_step([1, 2], nothing, arrangement, 0)
    again.start_again(arrangement, 0)
