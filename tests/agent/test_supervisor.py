"""The launcher's care where the job folder does not let it do its work."""

from pathlib import Path

import pytest
from etcd_cluster import cluster

from megatron_bamboo.agent.job import Deadlines, JobShape, JobSpec
from megatron_bamboo.agent.nodes import NodesElsewhere
from megatron_bamboo.agent.outcome import Status
from megatron_bamboo.agent.supervisor import Supervisor
from megatron_bamboo.agent.telling import Teller
from megatron_bamboo.membership.address import ADDRESS_FILE
from megatron_bamboo.membership.keys import Secret
from megatron_bamboo.membership.stores import begin_store
from megatron_bamboo.planner.arrangement import equal_pipelines


def test_what_cannot_be_removed_does_not_keep_it_from_ending(tmp_path: Path) -> None:
    shape = JobShape(equal_pipelines(2, 1, 2), "lazy", train_iters=9, global_batch_size=2)
    (tmp_path / ADDRESS_FILE).mkdir()
    teller = Teller(tmp_path, lambda _: None)
    Supervisor(JobSpec((), shape, tmp_path), Secret(b"5" * 32), teller, NodesElsewhere()).close()
    teller.close()


@pytest.mark.multiprocess
def test_a_store_that_is_gone_for_good_is_not_waited_for(tmp_path: Path) -> None:
    """Whoever trained has given up by then; a launcher would stay until somebody ends it."""
    shape = JobShape(equal_pipelines(2, 1, 2), "lazy", train_iters=9, global_batch_size=2)
    (tmp_path / "logs").mkdir()
    with cluster(1) as member:

        class Gone(NodesElsewhere):
            """Ends the store as soon as somebody leads."""

            def respawn(self) -> None:
                if (tmp_path / ADDRESS_FILE).exists() and not ended:
                    ended.append(member.kill(0))

        ended: list[None] = []
        begin_store(tmp_path, member.url("tests/gone"))
        spec = JobSpec((), shape, tmp_path, deadlines=Deadlines(store_seconds=3.0))
        teller = Teller(tmp_path, lambda _: None)
        supervisor = Supervisor(spec, Secret(b"5" * 32), teller, Gone())
        outcome = supervisor.run()
        supervisor.close()
        teller.close()
    assert outcome.status is Status.FAILED and ended
    assert outcome.message == "the job folder or store cannot be used: it did not answer for 3 s"
