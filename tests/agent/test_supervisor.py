"""The launcher's care where the job folder does not let it do its work."""

from pathlib import Path

import pytest

from megatron_bamboo.agent import job_folder
from megatron_bamboo.agent.job import JobShape, JobSpec
from megatron_bamboo.agent.nodes import NodesElsewhere
from megatron_bamboo.agent.supervisor import Supervisor
from megatron_bamboo.agent.telling import Teller
from megatron_bamboo.membership.address import ADDRESS_FILE
from megatron_bamboo.membership.keys import Secret
from megatron_bamboo.planner.arrangement import equal_pipelines


def test_what_cannot_be_removed_does_not_keep_it_from_ending(tmp_path: Path) -> None:
    shape = JobShape(equal_pipelines(2, 1, 2), "lazy", train_iters=9, global_batch_size=2)
    (tmp_path / ADDRESS_FILE).mkdir()
    teller = Teller(tmp_path, lambda _: None)
    Supervisor(JobSpec((), shape, tmp_path), Secret(b"5" * 32), teller, NodesElsewhere()).close()
    teller.close()


def test_a_folder_without_room_is_said_to_have_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert job_folder.lack_of_room(tmp_path) == ""
    assert job_folder.lack_of_room(tmp_path / "gone") == ""
    monkeypatch.setattr(job_folder, "LEAST_ROOM_BYTES", 1 << 70)
    said = f"; the file system of {tmp_path} has no room left"
    assert job_folder.lack_of_room(tmp_path) == said
