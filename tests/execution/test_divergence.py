"""Training that cannot go on ends the job with its reason: no worker is at fault."""

import json
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest
from processes import run_processes, worker_logs
from trained_stages import Job

pytestmark = pytest.mark.multiprocess


def test_a_loss_that_is_no_number_ends_the_job(
    tmp_path: Path, data_flags: tuple[str, ...], context: ForkServerContext
) -> None:
    # The rate rises from zero: the first step changes nothing, the second one everything.
    job = Job(2, 2, 1, str(tmp_path), data_flags, ("--lr", "1e30"))
    reason = "step 3: the loss is nan and the gradient norm nan; lower the learning rate"
    run_processes(context, job, "product_side", "fail_to_train", [(job, reason)])
    losses = (tmp_path / "job" / "losses.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in losses] == [1, 2]
    assert not (tmp_path / "job" / "state").exists()
    assert "Traceback" not in worker_logs(job)


def test_no_scale_of_the_loss_is_to_blame_for_a_loss_that_is_no_number(
    tmp_path: Path, data_flags: tuple[str, ...], context: ForkServerContext
) -> None:
    flags = ("--fp16", "--lr", "1e4", "--initial-loss-scale", "1024")
    job = Job(2, 1, 2, str(tmp_path), data_flags, flags)
    reason = "the loss is nan and the gradient norm nan; lower the learning rate"
    run_processes(context, job, "product_side", "fail_to_train", [(job, reason)])
